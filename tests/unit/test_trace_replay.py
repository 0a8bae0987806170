"""`adaptivespec.tracelab.replay`: walking a trace is decoding, and nothing beats the choice made in hindsight."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec.config import AdaptiveConfig, resolve_start
from adaptivespec.metrics import Step
from adaptivespec.policy import ShapePolicy, make_policy
from adaptivespec.shapes import TreeShape
from adaptivespec.tracelab.replay import best_walk, hindsight_best, replay, walk
from adaptivespec.tracelab.report import static
from adaptivespec.tracelab.trace import TracedAnswer, TraceError
from tests.unit.trace_fakes import C1, C2, C3, TREE, trace, traced

SHAPES = (C1, C2, C3, TREE)
CHAINS = {"range": {"low": C1.to_list(), "high": C3.to_list()}}


@st.composite
def answers(draw, max_roots=30):
    count = draw(st.integers(1, max_roots))
    column = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    probs = draw(st.lists(st.floats(0, 1), min_size=count, max_size=count))
    return TracedAnswer("x", 0, list(range(count + 1)), probs, {C3: draw(column), TREE: draw(column)}, {})


costs = st.fixed_dictionaries({shape: st.floats(1, 100) for shape in SHAPES})


def policy(name: str, shape=CHAINS) -> ShapePolicy:
    config = AdaptiveConfig.from_dict({"policy": name, "shape": shape})
    return make_policy(config, resolve_start(config, None))


def milliseconds(steps: list[Step], step_ms) -> float:
    return sum(step_ms[step.shape] for step in steps)


@settings(deadline=None)
@given(answers(), st.sampled_from(SHAPES), st.integers(0, 2))
def test_a_static_shape_walks_from_root_to_root_whatever_the_lag(answer, shape, lag):
    steps, root = walk(static(shape), 0, answer, lag), 0
    for step in steps:
        assert step == Step(shape, answer.accepted_at(shape, root), answer.top1_probs[root])
        root += step.accepted + 1
    assert root - 1 - steps[-1].accepted < answer.num_roots <= root


@settings(deadline=None)
@given(answers(), costs, st.sampled_from(["dcs", "talon", "cycle"]), st.integers(0, 2))
def test_no_policy_and_no_static_shape_beats_hindsight(answer, step_ms, name, lag):
    best = milliseconds(best_walk(answer, step_ms), step_ms)
    for other in (policy(name), *map(static, SHAPES)):
        assert best <= milliseconds(walk(other, 0, answer, lag), step_ms) + 1e-9


@settings(deadline=None)
@given(answers(max_roots=5), costs)
def test_hindsight_is_the_best_of_all_choices(answer, step_ms):
    def took(choices) -> float:
        root, total = 0, 0.0
        for shape in choices:
            if root < answer.num_roots:
                total += step_ms[shape]
                root += answer.accepted_at(shape, root) + 1
        return total

    assert milliseconds(best_walk(answer, step_ms), step_ms) == pytest.approx(
        min(took(choices) for choices in product(SHAPES, repeat=answer.num_roots))
    )


class Notes(ShapePolicy):
    """Notes what it hears and when it is asked."""

    name = "notes"
    shapes = (C1,)

    def __init__(self) -> None:
        super().__init__()
        self.heard: list = []

    def choose(self, request_ids):
        self.heard.append("choose")
        return C1

    def start(self, request_id, top1_prob):
        self.heard.append(("start", top1_prob))

    def observe(self, result):
        self.heard.append((result.num_accepted, result.top1_prob))

    def finish(self, request_id):
        self.heard.append("finish")


@pytest.mark.parametrize(
    ("lag", "heard"),
    [
        (0, [("start", 0.1), "choose", (1, 0.3), "choose", (0, 0.4), "choose", "finish"]),
        (1, ["choose", ("start", 0.1), "choose", (1, 0.3), "choose", "finish"]),
    ],
)
def test_a_policy_hears_what_a_server_tells_it(lag, heard):
    answer = TracedAnswer("x", 0, [5, 6, 7, 8, 9], [0.1, 0.2, 0.3, 0.4], {C1: [1, 1, 0, 1]}, {})
    notes = Notes()
    walk(notes, 0, answer, lag)
    assert notes.heard == heard


def test_before_a_policy_has_heard_it_takes_the_start_shape():
    late = [step.shape for step in walk(policy("dcs", {**CHAINS, "start": TREE.to_list()}), 0, traced(), lag=1)]
    assert late[0] == TREE
    assert TREE not in late[1:]


def test_outcomes_are_by_set_and_count_returned_tokens_only():
    what = trace()
    found = replay(what, static(C2), "static")
    assert list(found) == ["x", "y"]
    for name, outcome in found.items():
        steps = [step for answer in what.answers if answer.prompt_set == name for step in walk(static(C2), 0, answer)]
        assert outcome.tokens == 22
        assert outcome.steps == {C2: len(steps)}
        assert outcome.milliseconds == 70.0 * len(steps)
        assert outcome.tokens_per_s == pytest.approx(22 / (0.07 * len(steps)))
        assert outcome.accept_length == pytest.approx(1 + sum(step.accepted for step in steps) / len(steps))
        assert hindsight_best(what)[name].milliseconds <= outcome.milliseconds


def test_a_policy_that_needs_more_is_refused():
    wide = {"range": {"low": [1, 1, 2], "high": [4, 1, 5]}}
    with pytest.raises(TraceError, match=r"^wide: found a trace without \(4,1,5\)"):
        replay(trace(), policy("dcs", wide), "wide")
    assert TreeShape(4, 1, 5) in policy("dcs", wide).shapes
