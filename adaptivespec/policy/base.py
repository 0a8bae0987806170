"""The policy seam: `choose` a shape for a step, then `observe` what the step gave."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adaptivespec.shapes import TreeShape

# A float32 softmax may end a little above 1; more than this is a broken draft.
_MAX_TOP1_PROB = 1.001


class StepResult(NamedTuple):
    """What one decode step revealed about one request.

    Args:
        request_id: the request.
        shape: the shape that PRODUCED this result; under overlap not the one chosen last.
        num_accepted: accepted draft tokens, 0 to shape.num_steps; the bonus token is not counted.
        top1_prob: the draft's true softmax probability of its top-1 token at the root of the next step's tree.
    """

    request_id: Hashable
    shape: TreeShape
    num_accepted: int
    top1_prob: float


@dataclass
class PolicyCounts:
    """Events since the policy was made.

    Args:
        trips: requests that the circuit breaker cut off.
        recoveries: requests whose breaker closed again.
        bad_signals: top-1 probabilities that were not finite or not in [0, 1]: a draft that is broken for that row.
    """

    trips: int = 0
    recoveries: int = 0
    bad_signals: int = 0


class ShapePolicy(ABC):
    """Chooses one shape for each step of a batch. Not thread-safe; the scheduler's thread owns it.

    The life of a request: `start` after its prefill, then in every step `choose` and, perhaps one step late,
    `observe`; at its end `finish`. Results of requests that are not known (any more) are ignored: under overlap the
    result of a step arrives after the request has finished. `shapes` holds every shape that `choose` may return.
    """

    name: str
    shapes: tuple[TreeShape, ...]

    def __init__(self) -> None:
        self.counts = PolicyCounts()

    @abstractmethod
    def choose(self, request_ids: Sequence[Hashable]) -> TreeShape:
        """The shape of the next step of the batch of these requests; unknown ids and an empty batch are legal."""

    def start(self, request_id: Hashable, top1_prob: float) -> None:  # noqa: B027  policies without state need none
        """Learn of a request after its prefill.

        A request that is known already - prefilled again after a retraction - keeps its acceptance history.

        Args:
            request_id: the request.
            top1_prob: the draft's true softmax probability of its top-1 token at the root of the first tree.
        """

    def observe(self, result: StepResult) -> None:  # noqa: B027
        """Learn what a step revealed about a request; ignored where the request is unknown."""

    def finish(self, request_id: Hashable) -> None:  # noqa: B027
        """Forget a request, finished or aborted; unknown ids are ignored."""

    def usable_prob(self, top1_prob: float) -> float:
        """The probability, at most 1; 0 where it is none, which is counted in `counts.bad_signals`."""
        if 0.0 <= top1_prob <= _MAX_TOP1_PROB:  # NaN fails the comparison too
            return min(top1_prob, 1.0)
        self.counts.bad_signals += 1
        return 0.0
