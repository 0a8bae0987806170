"""A registry of runtime states: built at start under a memory budget, looked up and swapped while serving.

A state is whatever the caller builds for a key: graphs, attention backends, buffers. The registry knows neither the key's
meaning nor the state's contents. It belongs to one thread.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from cuda_graphs.backend import StateBackend
from cuda_graphs.errors import BudgetError, Need, RegistryError, UnknownStateError
from cuda_graphs.parts import Cost, Meter, PartId, SharedParts
from cuda_graphs.report import PartReport, RegistryReport, StateReport

K = TypeVar("K", bound=Hashable)
S = TypeVar("S")


class StateRegistry(Generic[K, S]):
    """Builds one state per key, and makes one of them the active one.

    Args:
        build: makes the state of a key. It may take parts from `registry.parts`, which states share.
        backend: measures and releases memory.
        budget_bytes: most bytes that all states and parts together may take; None for no limit.
        estimate: bytes that building the key's state will add, without the parts that exist already (ask
            `registry.parts.has`); used to refuse before building and to say what the rest would need.
        activate: makes a state the active one; called by `swap`. It must not make the host wait for the device.
        release: called for each built state, last built first, when states are released. It must not raise.
    """

    def __init__(
        self,
        build: Callable[[K], S],
        *,
        backend: StateBackend,
        budget_bytes: int | None = None,
        estimate: Callable[[K], int] | None = None,
        activate: Callable[[S], None] | None = None,
        release: Callable[[S], None] | None = None,
    ) -> None:
        if budget_bytes is not None and budget_bytes < 0:
            raise RegistryError(f"found budget_bytes={budget_bytes}; expected 0 or more. Fix: None means no limit.")
        self._build = build
        self._backend = backend
        self._budget_bytes = budget_bytes
        self._estimate = estimate
        self._activate = activate
        self._release = release
        self._meter = Meter(backend)
        self.parts = SharedParts(self._meter)
        self._states: dict[K, S] = {}
        self._costs: dict[K, tuple[Cost, tuple[PartId, ...]]] = {}
        self._active: S | None = None
        self.active_key: K | None = None
        self.num_switches = 0

    @property
    def keys(self) -> tuple[K, ...]:
        """Keys that have a state, in build order."""
        return tuple(self._states)

    def build_all(
        self, keys: Sequence[K], progress: Callable[[StateReport, int, int], None] | None = None
    ) -> RegistryReport:
        """Builds the states in the given order and returns what they cost.

        Give the largest first: graphs that share a memory pool then fit into what the first one took.

        Args:
            keys: at least one, none twice and none built before.
            progress: called after each state with its report, its number from 1 and the number of keys.

        Raises:
            BudgetError: what is built exceeds the budget, the next key's estimate would exceed it, or the device ran out
                of memory.
            RegistryError: `keys` is empty or names a key twice.
            Exception: whatever `build` raised.
            After any of them but a bad `keys`, every state of the registry is released.

        Effects: allocates on the device. Host sync: several. Graph-safe: no.
        """
        self._check_keys(keys)
        needs: list[Need] = []
        try:
            for position, key in enumerate(keys):
                self._check_estimate(needs, keys[position:])
                self._build_one(key, needs, keys[position + 1 :])
                if progress is not None:
                    progress(self._state_report(key), position + 1, len(keys))
        except BaseException:
            self.release_all()
            raise
        return self.report()

    def lookup(self, key: K) -> S:
        """Returns the state of `key`; `UnknownStateError` without one. Host sync: none."""
        try:
            return self._states[key]
        except KeyError:
            raise UnknownStateError(key, self.keys) from None

    def swap(self, key: K) -> S:
        """Makes the state of `key` the active one and returns it.

        `activate` runs only if this is another object than the active state; keys play no part in that, so shapes that
        agree in some coordinate are never taken for one another. The first activation is no switch. If `activate` raises,
        no state is active and the next swap activates again.

        Host sync: none, unless `activate` makes one. Graph-safe: host code, between replays.
        """
        state = self.lookup(key)
        if state is not self._active:
            had_active = self._active is not None
            self._active = self.active_key = None
            if self._activate is not None:
                self._activate(state)
            self._active = state
            self.num_switches += had_active
        self.active_key = key
        return state

    def report(self) -> RegistryReport:
        """What has been built so far and what it took."""
        users = [part for _, parts in self._costs.values() for part in parts]
        return RegistryReport(
            backend=self._backend.name,
            states=tuple(self._state_report(key) for key in self._states),
            parts=tuple(
                PartReport(kind, key, cost.num_bytes, cost.seconds, users.count((kind, key)))
                for (kind, key), cost in self.parts.costs().items()
            ),
            budget_bytes=self._budget_bytes,
            active_key=self.active_key,
            num_switches=self.num_switches,
        )

    def release_all(self) -> None:
        """Drops every state and part and returns their memory; no state is active afterwards.

        Memory that the caller still refers to stays taken. Host sync: one on CUDA.
        """
        self._active = self.active_key = None
        while self._states:
            _, state = self._states.popitem()
            if self._release is not None:
                self._release(state)
            del state
        self._costs.clear()
        self.parts.clear()
        self._backend.release()

    def _check_keys(self, keys: Sequence[K]) -> None:
        if not keys:
            raise RegistryError("found no keys to build; expected at least one. Fix: pass the keys to serve.")
        seen = set(self._states)
        for key in keys:
            if key in seen:
                raise RegistryError(f"found the key {key} twice; expected each once. Fix: remove the repetition.")
            seen.add(key)

    def _check_estimate(self, needs: list[Need], rest: Sequence[K]) -> None:
        if self._budget_bytes is None or self._estimate is None:
            return
        if self._total_bytes() + self._estimate(rest[0]) > self._budget_bytes:
            raise BudgetError([*needs, *self._needs_of_rest(rest)], self._budget_bytes)

    def _build_one(self, key: K, needs: list[Need], rest: Sequence[K]) -> None:
        """Builds and stores the state of `key` and appends its need; no local name keeps a state alive on an error."""
        before = self._total_bytes()
        try:
            with self.parts.recording() as used:
                self._states[key], cost = self._meter.measure(lambda: self._build(key))
        except Exception as error:
            if not self._backend.is_out_of_memory(error):
                raise
            needed = [*needs, *self._needs_of_rest([key, *rest])]
            raise BudgetError(needed, self._budget_bytes, out_of_memory_key=key) from error
        self._costs[key] = (cost, tuple(used))
        needs.append(Need(key, self._total_bytes() - before, is_measured=True))
        if self._budget_bytes is not None and self._total_bytes() > self._budget_bytes:
            raise BudgetError([*needs, *self._needs_of_rest(rest)], self._budget_bytes)

    def _needs_of_rest(self, keys: Sequence[K]) -> list[Need]:
        return [Need(key, self._estimate(key) if self._estimate else None, is_measured=False) for key in keys]

    def _total_bytes(self) -> int:
        costs = [cost for cost, _ in self._costs.values()] + list(self.parts.costs().values())
        return sum(cost.num_bytes for cost in costs)

    def _state_report(self, key: K) -> StateReport:
        cost, parts = self._costs[key]
        return StateReport(key, cost.num_bytes, cost.seconds, parts)
