"""Decoding walked through a trace: by a policy, or by whoever knows the answer beforehand."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from adaptivespec.metrics import Step
from adaptivespec.policy import ShapePolicy, StepResult
from adaptivespec.shapes import TreeShape
from adaptivespec.tracelab.trace import Trace, TracedAnswer


def walk(policy: ShapePolicy, request_id: Hashable, answer: TracedAnswer, lag: int = 0) -> list[Step]:
    """The steps that a policy would have taken through one answer; the first token comes from the prefill.

    Args:
        policy: hears of the request's start, steps and end as on a server.
        request_id: the request's name to it.
        answer: what was recorded.
        lag: steps by which what is revealed reaches it late.
    """
    steps: list[Step] = []
    news: deque[Callable[[], None]] = deque([partial(policy.start, request_id, answer.top1_probs[0])])
    root = 0
    while root < answer.num_roots:
        while len(news) > lag:
            news.popleft()()
        shape = policy.choose([request_id])
        accepted = answer.accepted_at(shape, root)
        steps.append(Step(shape, accepted, answer.top1_probs[root]))
        root += accepted + 1
        if root < answer.num_roots:
            result = StepResult(request_id, shape, accepted, answer.top1_probs[root])
            news.append(partial(policy.observe, result))
    policy.finish(request_id)
    return steps


def best_walk(answer: TracedAnswer, step_ms: Mapping[TreeShape, float]) -> list[Step]:
    """The steps that end an answer soonest, any shape free to be chosen at any step: no policy can be faster.

    Exact, by dynamic programming from the end of the answer; of equally fast shapes the smaller.
    """
    end = answer.num_roots
    rest = [0.0] * (end + 1)
    choices: list[TreeShape] = []
    for root in reversed(range(end)):
        rest[root], best = min(
            (cost + rest[min(root + answer.accepted_at(shape, root) + 1, end)], shape)
            for shape, cost in step_ms.items()
        )
        choices.append(best)
    choices.reverse()
    steps, root = [], 0
    while root < end:
        accepted = answer.accepted_at(choices[root], root)
        steps.append(Step(choices[root], accepted, answer.top1_probs[root]))
        root += accepted + 1
    return steps


@dataclass(frozen=True)
class Outcome:
    """What some answers took.

    Args:
        tokens: of the answers, each one's first left out, which the prefill gives.
        milliseconds: of decoding them.
        accepted: drafts accepted, those past the ends of the answers included.
        steps: verify steps by shape.
    """

    tokens: int
    milliseconds: float
    accepted: int
    steps: Counter[TreeShape]

    @property
    def tokens_per_s(self) -> float:
        """Decode speed."""
        return 1000 * self.tokens / self.milliseconds

    @property
    def accept_length(self) -> float:
        """Tokens a step, BONUS TOKEN INCLUDED."""
        return 1 + self.accepted / self.steps.total()


def outcomes(trace: Trace, decode: Callable[[int, TracedAnswer], Sequence[Step]]) -> dict[str, Outcome]:
    """By prompt set, what its answers take when each is decoded so.

    Args:
        decode: place of an answer in the trace, and the answer -> its steps.
    """
    found: dict[str, Outcome] = {}
    walks = [decode(number, answer) for number, answer in enumerate(trace.answers)]
    for name in trace.prompt_sets:
        pairs = zip(trace.answers, walks, strict=True)
        mine = [(answer, steps) for answer, steps in pairs if answer.prompt_set == name]
        shapes = Counter(step.shape for _, steps in mine for step in steps)
        found[name] = Outcome(
            tokens=sum(answer.num_roots for answer, _ in mine),
            milliseconds=sum(trace.step_ms[shape] * count for shape, count in shapes.items()),
            accepted=sum(step.accepted for _, steps in mine for step in steps),
            steps=shapes,
        )
    return found


def replay(trace: Trace, policy: ShapePolicy, label: str) -> dict[str, Outcome]:
    """What a fresh policy would have reached, by prompt set. It meets the answers one after the other, as a server would.

    Args:
        label: what an error calls the policy.

    Raises:
        TraceError: it may choose a shape that the trace does not have.
    """
    trace.require(policy.shapes, label)
    return outcomes(trace, lambda number, answer: walk(policy, number, answer, trace.lag))


def hindsight_best(trace: Trace) -> dict[str, Outcome]:
    """What the best choice of shape at every step would have reached, by prompt set."""
    return outcomes(trace, lambda _, answer: best_walk(answer, trace.step_ms))
