"""`talon`: the tree that the draft's confidence promises most of, under a fixed budget of nodes.

After TALON (Liu et al. 2026, arXiv:2601.07353), which grows one tree a request while it drafts - the K likeliest tokens
at the root, behind each later node only what is confident enough - until a budget of nodes is spent: deep and narrow
where the draft is sure, shallow and wide where it is not. Shapes that are built at start allow the same trade, with less
to decide on. What differs from the paper:

* The shape is chosen before anything is drafted, from the draft's top-1 probability at the root. It stands for the
  confidence at every node of the tree, and the other candidates are modelled. The paper knows each node's own.
* Inside its shape a tree grows as SGLang grows it: `topk` candidates at every node, those with the likeliest paths kept.
  The paper's gate by confidence is not there, and no depth or width outside the range is either.
* The budget is an upper bound. The paper spends all of it; a smaller shape of the range is chosen where it promises more.
* One shape serves the whole batch, by the mean of its requests' confidence.

Confidence is all that counts: there is no running acceptance, no circuit breaker and no cost of a step, which are what
`dcs` is compared for. So among chains the deepest within the budget always promises most, and this policy only moves in a
range that trades width for depth.
"""

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from adaptivespec.errors import ConfigError
from adaptivespec.policy.base import ShapePolicy, StepResult
from adaptivespec.shapes import TreeShape

if TYPE_CHECKING:
    from adaptivespec.config import AdaptiveConfig


def expected_accepted(shape: TreeShape, confidence: float) -> float:
    """Drafts, the bonus token not counted, that the target should accept from a tree of this shape.

    The draft is modelled as calibrated and equally sure at every node: the likeliest token has probability `confidence`,
    each next one this share of what is left. A node is accepted with the probability of its path, so the sum over the
    tree's nodes is the expected length. They are taken as SGLang takes them: at each depth the `topk` likeliest are
    expanded to `topk` children each, and of all that the likeliest `num_drafts` are kept. Source: this project.

    Args:
        shape: the tree's.
        confidence: of the likeliest token, 0 to 1.
    """
    expected = 0.0
    num_expanded = [0] * (shape.num_steps + 1)
    # The likeliest node not taken yet comes first: (minus path probability, depth, place among its siblings).
    open_nodes = [(-confidence, 1, 1)]
    for _ in range(shape.num_drafts):
        minus_prob, depth, place = heappop(open_nodes)
        expected -= minus_prob
        if place < shape.topk:
            heappush(open_nodes, (minus_prob * (1 - confidence), depth, place + 1))
        if depth < shape.num_steps and num_expanded[depth] < shape.topk:
            num_expanded[depth] += 1
            heappush(open_nodes, (minus_prob * confidence, depth + 1, 1))
    return expected


class TalonPolicy(ShapePolicy):
    """The shape of the range, at most `budget` nodes, with the largest `expected_accepted` at the batch's confidence.

    A request's confidence is its newest top-1 probability, 0 where that is not finite or not in [0, 1]; the batch has the
    mean of those known, in whole percent, rounded down. Equal promises: the smaller shape. More confidence never gives a
    shallower tree, also where deeper shapes of the range are wider. Where no request is known the start shape is chosen.

    Raises:
        ConfigError: the budget excludes the start shape or every shape of the range.
    """

    name = "talon"

    def __init__(self, config: "AdaptiveConfig", start_shape: TreeShape) -> None:
        super().__init__()
        self._start_shape = start_shape
        self._confidences: dict[Hashable, float] = {}
        self._by_percent = _best_by_percent(_within_budget(config, start_shape))
        self.shapes = tuple(dict.fromkeys((*self._by_percent, start_shape)))

    def choose(self, request_ids: Sequence[Hashable]) -> TreeShape:
        confidences = self._confidences
        known = [confidences[request_id] for request_id in request_ids if request_id in confidences]
        return self._by_percent[int(100 * sum(known) / len(known))] if known else self._start_shape

    def start(self, request_id: Hashable, top1_prob: float) -> None:
        self._confidences[request_id] = self.usable_prob(top1_prob)

    def observe(self, result: StepResult) -> None:
        if result.request_id in self._confidences:
            self._confidences[result.request_id] = self.usable_prob(result.top1_prob)

    def finish(self, request_id: Hashable) -> None:
        self._confidences.pop(request_id, None)


def _within_budget(config: "AdaptiveConfig", start_shape: TreeShape) -> list[TreeShape]:
    reachable = config.shape.known_range.reachable()
    smallest = min(shape.num_draft_tokens for shape in reachable)
    least = max(smallest, start_shape.num_draft_tokens)
    budget = config.talon.budget
    if budget is not None and budget < least:
        raise ConfigError(
            where="talon.budget",
            found=str(budget),
            expected=f"at least {least}: the start shape is {start_shape}, and the smallest of the range verifies "
            f"{smallest} nodes, the root counted",
            fix="raise talon.budget, or choose another start shape or shape.range",
        )
    return [shape for shape in reachable if budget is None or shape.num_draft_tokens <= budget]


def _best_by_percent(shapes: list[TreeShape]) -> list[TreeShape]:
    """The best shape at a confidence of 0, 1, ... 100%, found once so that a step only looks it up."""
    best: list[TreeShape] = []
    for percent in range(100, -1, -1):
        promises = [(-expected_accepted(shape, percent / 100), shape) for shape in shapes]
        best.append(min(promises)[1])
        # From sure to unsure and never deeper: where deeper shapes are wider too, the promise alone would go up and down.
        shapes = [shape for shape in shapes if shape.num_steps <= best[-1].num_steps]
    return best[::-1]
