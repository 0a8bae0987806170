"""Checks of the registry with a toy draft and verify pair: on a CUDA device with `CudaBackend`, in tests with a fake."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from statistics import median
from time import perf_counter
from typing import Any

import torch

from cuda_graphs.backend import GraphBackend
from cuda_graphs.errors import BudgetError, RegistryError
from cuda_graphs.registry import StateRegistry
from cuda_graphs.toy import ToyModel, ToyPair, ToyShape, eager_step, toy_registry

BATCH_SIZES = (1, 2, 4)
TRIED_BATCHES = (1, 3, 4)  # 3 runs padded
MAX_SWAP_US = 50.0
LEAK_SLACK_BYTES = 4 << 20  # two of torch's smallest segments


@dataclass(frozen=True)
class Check:
    """Outcome of one check; `figures` are JSON values."""

    name: str
    is_ok: bool
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{'PASS' if self.is_ok else 'FAIL'}  {self.name}: {self.detail}"


class ToyCheck:
    """Runs the checks of one backend on the shapes of a preset.

    Args:
        shapes: at least two; the largest is captured first.
        backend: records, replays and measures.
        device: where the toy's tensors live.
    """

    def __init__(self, shapes: Sequence[ToyShape], backend: GraphBackend, device: torch.device) -> None:
        self.shapes = sorted(shapes, key=lambda s: (s.num_draft_tokens, s.topk, s.num_steps), reverse=True)
        self.backend = backend
        self.device = device
        # On a GPU the toy is large enough for its memory to show beside the device's granularity of a few MiB.
        self.model = ToyModel.random(device, vocab=32768 if device.type == "cuda" else 1024)
        self.active: ToyPair | None = None
        self.registry = toy_registry(self.model, backend, BATCH_SIZES, activate=self._activate)
        self._seed = 0

    def _activate(self, pair: ToyPair) -> None:
        self.active = pair

    def run(self) -> Iterator[Check]:
        """Yields each check as it ends. A backend's or torch's error fails the check it occurs in.

        Where building fails the rest is not run. Effects: builds states and, in the end, releases them. Host sync: many.
        """
        built = self._guarded("capture", self._check_capture)
        yield built
        if built.is_ok:
            for name, check in (
                ("replay equals eager", self._check_replay),
                ("replay equals eager after every swap", self._check_swaps),
                ("results outlive other replays", self._check_results_survive),
                ("no host sync in a step", self._check_no_sync),
                ("swap time", self._check_swap_time),
                ("budget", self._check_budget),
            ):
                yield self._guarded(name, check)

    def _guarded(self, name: str, check: Callable[[], tuple[bool, str, dict[str, Any]]]) -> Check:
        try:
            return Check(name, *check())
        except (RuntimeError, RegistryError) as error:  # torch's errors are RuntimeErrors
            return Check(name, False, f"{type(error).__name__}: {error}")

    def _inputs(self, batch_size: int) -> dict[str, torch.Tensor]:
        """New random inputs at every call, so that results left over from another step never pass for these."""
        self._seed += 1
        generator = torch.Generator().manual_seed(self._seed)
        vocab, hidden = self.model.embedding.shape
        return {
            "hidden": torch.randn(batch_size, hidden, generator=generator, dtype=torch.float64).to(self.device),
            "token": torch.randint(vocab, (batch_size,), generator=generator).to(self.device),
        }

    def _difference(self, shape: ToyShape, batch_size: int) -> str | None:
        """Swaps to `shape`, makes a step by replay, and names a result that differs from the eager one."""
        inputs = self._inputs(batch_size)
        found = self.registry.swap(shape).step(inputs)
        expected = eager_step(self.model, shape, inputs)
        wrong = [name for name, value in expected.items() if not _is_same(found[name], value)]
        return f"{shape} at batch size {batch_size}: {', '.join(wrong)} differ" if wrong else None

    def _check_capture(self) -> tuple[bool, str, dict[str, Any]]:
        before = self.backend.num_captures
        report = self.registry.build_all(self.shapes)
        num_captures = self.backend.num_captures - before
        num_parts = len({(s.num_draft_tokens, s.topk == 1) for s in self.shapes})
        expected = (len(self.shapes) + num_parts) * len(BATCH_SIZES)
        figures = {
            "num_captures": num_captures,
            "total_bytes": report.total_bytes,
            "seconds": round(report.total_seconds, 3),
            "states": [
                {**state.to_dict(), "bytes_with_parts": report.bytes_with_parts(state.key)} for state in report.states
            ],
            "parts": [part.to_dict() for part in report.parts],
        }
        detail = (
            f"{num_captures} graphs captured, expected {expected} for {len(self.shapes)} shapes that share {num_parts}"
            f" verify parts; {report.total_bytes} bytes, expected more than 0; {report.total_seconds:.2f} s"
        )
        return num_captures == expected and report.total_bytes > 0, detail, figures

    def _check_replay(self) -> tuple[bool, str, dict[str, Any]]:
        found = [self._difference(shape, batch) for shape in self.shapes for batch in TRIED_BATCHES]
        return _verdict(found, f"{len(self.shapes)} shapes at batch sizes {list(TRIED_BATCHES)}")

    def _check_swaps(self) -> tuple[bool, str, dict[str, Any]]:
        pairs = list(permutations(self.shapes, 2))
        found = [self._difference(shape, 3) for pair in pairs for shape in pair]
        num_equal_steps = sum(a.num_steps == b.num_steps for a, b in pairs)
        what = f"{len(pairs)} ordered pairs of shapes, {num_equal_steps} of them with equal num_steps"
        ok, detail, _ = _verdict(found, what)
        return ok, detail, {"num_pairs": len(pairs), "num_pairs_of_equal_steps": num_equal_steps}

    def _check_results_survive(self) -> tuple[bool, str, dict[str, Any]]:
        """A shape's draft results stay as they are while every other state runs: they lie outside the shared pool."""
        found = []
        for shape in self.shapes:
            inputs = self._inputs(4)
            drafted = self.registry.swap(shape).draft_graphs(inputs)
            for other in self.shapes:
                if other != shape:
                    self.registry.swap(other).step(self._inputs(4))
            expected = eager_step(self.model, shape, inputs)
            wrong = [name for name, value in drafted.items() if not _is_same(value, expected[name])]
            found.append(f"{shape}: {', '.join(wrong)} overwritten" if wrong else None)
        return _verdict(found, f"draft results of {len(self.shapes)} shapes")

    def _check_no_sync(self) -> tuple[bool, str, dict[str, Any]]:
        inputs = self._inputs(3)
        probe = torch.ones((), device=self.device)
        try:
            with self.backend.forbid_host_sync():
                probe.item()
        except RuntimeError:
            pass
        else:
            return False, "the detector let .item() pass, so it would not see a sync in a step either", {}
        with self.backend.forbid_host_sync():
            for shape in self.shapes:
                self.registry.swap(shape).step(inputs)
        return True, f"{len(self.shapes)} steps with a swap before each; the detector stops .item()", {}

    def _check_swap_time(self) -> tuple[bool, str, dict[str, Any]]:
        rounds, swaps = 9, 1000
        times = []
        for _ in range(rounds):
            start = perf_counter()
            for at in range(swaps):
                self.registry.swap(self.shapes[at % len(self.shapes)])
            times.append((perf_counter() - start) / swaps * 1e6)
        swap_us = round(median(times), 3)
        is_active = self.active is self.registry.lookup(self.shapes[(swaps - 1) % len(self.shapes)])
        detail = f"{swap_us} us per swap (median of {rounds} rounds of {swaps}), expected at most {MAX_SWAP_US}"
        return swap_us <= MAX_SWAP_US and is_active, detail, {"swap_us": swap_us}

    def _check_budget(self) -> tuple[bool, str, dict[str, Any]]:
        """Half of what the states need is refused, twice: the second refusal shows that the first returned its memory.

        What they need is measured anew: the first build also paid for kernels and workspaces, once and for all.
        """
        self.active = None
        self.registry.release_all()
        total = self.registry.build_all(self.shapes).total_bytes
        self.registry.release_all()
        budget = total // 2
        refusals, left = [], []
        for _ in range(2):
            tight = toy_registry(self.model, self.backend, BATCH_SIZES, budget_bytes=budget)
            refusals.append(_refusal(tight, self.shapes))
            left.append(self.backend.bytes_in_use())
        captured = self.backend.num_captures
        early = toy_registry(self.model, self.backend, BATCH_SIZES, budget_bytes=budget, estimate=lambda _: budget + 1)
        refusals.append(_refusal(early, self.shapes))
        early_captures, leaked = self.backend.num_captures - captured, left[1] - left[0]
        is_ok = (
            all(r is not None and r.needed_bytes > budget and len(r.needs) == len(self.shapes) for r in refusals)
            and early_captures == 0
            and total > 0
            and leaked <= LEAK_SLACK_BYTES
        )
        needed = [None if r is None else r.needed_bytes for r in refusals]
        detail = (
            f"budget of {budget} bytes for states of {total}, needed {needed} (None: not refused); {early_captures}"
            f" captures after an estimate over budget; {leaked} bytes left over by a refusal, expected at most {LEAK_SLACK_BYTES}"
        )
        return is_ok, detail, {"budget_bytes": budget, "needed_bytes": needed, "leaked_bytes": leaked}


def _refusal(registry: StateRegistry[Any, ToyPair], shapes: Sequence[ToyShape]) -> BudgetError | None:
    try:
        registry.build_all(shapes)
    except BudgetError as error:
        return error.with_traceback(None)  # its frames would keep the states alive
    registry.release_all()
    return None


def _verdict(differences: Sequence[str | None], what: str) -> tuple[bool, str, dict[str, Any]]:
    wrong = [difference for difference in differences if difference]
    detail = f"{what}: {len(wrong)} of {len(differences)} wrong" + (f", first {wrong[0]}" if wrong else "")
    return not wrong, detail, {"num_compared": len(differences), "num_wrong": len(wrong)}


def _is_same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.is_floating_point():
        return torch.allclose(found, expected, rtol=1e-9, atol=1e-9)
    return torch.equal(found, expected)
