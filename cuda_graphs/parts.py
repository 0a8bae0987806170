"""Parts that several states share: each is built once and its cost is charged once."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

from cuda_graphs.backend import StateBackend

T = TypeVar("T")
PartId = tuple[str, Hashable]


@dataclass(frozen=True)
class Cost:
    """What building something took, without the shared parts built on the way."""

    num_bytes: int
    seconds: float


class Meter:
    """Measures what building takes; what is measured inside another measurement is not charged to the outer one too."""

    def __init__(self, backend: StateBackend) -> None:
        self._backend = backend
        self._inner: list[Cost] = []  # one entry per open measurement: what was measured inside it so far

    def measure(self, make: Callable[[], T]) -> tuple[T, Cost]:
        """Returns what `make` made and its own cost. An error in `make` passes through. Host sync: two on CUDA."""
        self._inner.append(Cost(0, 0.0))
        try:
            start, before = perf_counter(), self._backend.bytes_in_use()
            made = make()
            grown, seconds = self._backend.bytes_in_use() - before, perf_counter() - start
        finally:
            inner = self._inner.pop()
        if self._inner:
            outer = self._inner[-1]
            self._inner[-1] = Cost(outer.num_bytes + grown, outer.seconds + seconds)
        # Freeing scratch memory while building can make the difference negative; nothing costs less than nothing.
        own = max(0, grown - inner.num_bytes) + self._backend.reported_bytes(made)
        return made, Cost(own, max(0.0, seconds - inner.seconds))


class SharedParts:
    """The parts of a registry's states, by kind and key.

    A build function asks `registry.parts.get("verify", (8, True), make)`: the first call makes the part, later ones get
    the same object. The registry notes which state uses which part.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._made: dict[PartId, tuple[Any, Cost]] = {}
        self._used: list[PartId] | None = None

    def get(self, kind: str, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the part of this kind and key, making it with `make()` on first use.

        A `make` that raises leaves nothing behind. `make` may itself get other parts.
        """
        part_id = (kind, key)
        if part_id not in self._made:
            self._made[part_id] = self._meter.measure(make)
        if self._used is not None and part_id not in self._used:
            self._used.append(part_id)
        part: T = self._made[part_id][0]
        return part

    def has(self, kind: str, key: Hashable) -> bool:
        """Whether the part exists already, so that an estimate can leave it out."""
        return (kind, key) in self._made

    @contextmanager
    def recording(self) -> Iterator[list[PartId]]:
        """Yields a list that fills with the ids of the parts that are got inside, each once, in order of first use."""
        outer, self._used = self._used, []
        try:
            yield self._used
        finally:
            self._used = outer

    def costs(self) -> dict[PartId, Cost]:
        """The cost of each part, in order of making."""
        return {part_id: cost for part_id, (_, cost) in self._made.items()}

    def clear(self) -> None:
        """Forgets every part."""
        self._made.clear()
