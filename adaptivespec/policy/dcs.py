"""`dcs`: the Draft Confidence Score of the AdaptiveSpec paper, with a circuit breaker."""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from adaptivespec.policy.base import ShapePolicy, StepResult
from adaptivespec.shapes import TreeShape

if TYPE_CHECKING:
    from adaptivespec.config import AdaptiveConfig


class _RequestState:
    __slots__ = ("dcs", "is_tripped", "num_zero_steps", "rar")

    def __init__(self, rar: float) -> None:
        self.rar = rar
        self.num_zero_steps = 0
        self.is_tripped = False
        self.dcs = 0.0


class DcsPolicy(ShapePolicy):
    """Moves through the range with the mean DCS of the batch.

    `DCS = clip(p_top1 * RAR / divisor, 0, 1)` for each request. RAR is the running mean, with weight alpha, of
    accepted drafts / num_steps of the shape that produced them; steps without speculation leave it, and the breaker,
    as they are. After `breaker_steps` consecutive steps without an accepted draft a request counts as DCS 0, until a
    step accepts one: its RAR then restarts at its initial value. A request whose top-1 probability is not finite or not
    in [0, 1] counts as DCS 0 until its next result. Requests that are not known yet are left out of the mean; where none
    is known the start shape is chosen. Source: AdaptiveSpec paper; the breaker's recovery: this project.
    """

    name = "dcs"

    def __init__(self, config: "AdaptiveConfig", start_shape: TreeShape) -> None:
        super().__init__()
        self._range = config.shape.known_range
        self._config = config.dcs
        self._start_shape = start_shape
        self._states: dict[Hashable, _RequestState] = {}
        self.shapes = tuple(dict.fromkeys((*self._range.reachable(), start_shape)))

    def choose(self, request_ids: Sequence[Hashable]) -> TreeShape:
        states = self._states
        total, num_known = 0.0, 0
        for request_id in request_ids:
            state = states.get(request_id)
            if state is not None:
                total += state.dcs
                num_known += 1
        return self._range.at(total / num_known) if num_known else self._start_shape

    def start(self, request_id: Hashable, top1_prob: float) -> None:
        state = self._states.setdefault(request_id, _RequestState(self._config.initial_rar))
        state.dcs = self._score(state, top1_prob)

    def observe(self, result: StepResult) -> None:
        state = self._states.get(result.request_id)
        if state is None:
            return
        if result.shape.num_steps:
            self._update_acceptance(state, result.num_accepted, result.shape.num_steps)
        state.dcs = self._score(state, result.top1_prob)

    def finish(self, request_id: Hashable) -> None:
        self._states.pop(request_id, None)

    def _update_acceptance(self, state: _RequestState, num_accepted: int, num_steps: int) -> None:
        state.num_zero_steps = 0 if num_accepted else state.num_zero_steps + 1
        if state.is_tripped and num_accepted:
            state.is_tripped = False
            state.rar = self._config.initial_rar
            self.counts.recoveries += 1
            return
        state.rar += self._config.alpha * (num_accepted / num_steps - state.rar)
        if state.num_zero_steps >= self._config.breaker_steps and not state.is_tripped:
            state.is_tripped = True
            self.counts.trips += 1

    def _score(self, state: _RequestState, top1_prob: float) -> float:
        prob = self.usable_prob(top1_prob)
        return 0.0 if state.is_tripped else min(prob * state.rar / self._config.divisor, 1.0)
