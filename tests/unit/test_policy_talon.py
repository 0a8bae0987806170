"""`talon`: the promise of a shape against a plain model of SGLang's drafting, and what the policy makes of it."""

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from adaptivespec.config import AdaptiveConfig, selectable_shapes
from adaptivespec.errors import ConfigError
from adaptivespec.policy import StepResult, make_policy
from adaptivespec.policy.talon import expected_accepted
from adaptivespec.shapes import NO_SPECULATION, PRESETS, ShapeRange, TreeShape

LOW, HIGH = TreeShape(3, 4, 4), TreeShape(7, 1, 8)


def make(policy="talon", span="paper", start=LOW, budget=None):
    data = {"policy": policy, "shape": {"range": span}, "talon": {"budget": budget}}
    return make_policy(AdaptiveConfig.from_dict(data), start)


def choice(policy, *top1_probs):
    """What a batch with these roots runs with."""
    for number, top1_prob in enumerate(top1_probs):
        policy.start(number, top1_prob)
    return policy.choose(range(len(top1_probs)))


@st.composite
def shapes(draw):
    num_steps, topk = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    most = min(24, TreeShape(num_steps, topk, num_steps + 1).max_nodes)
    return TreeShape(num_steps, topk, draw(st.integers(num_steps + 1, most)))


ranges = st.builds(ShapeRange, shapes(), shapes())
probs = st.floats(0, 1)
signals = probs | st.sampled_from([math.nan, math.inf, -math.inf, -0.1, 1.1])


def drafted_length(shape, confidence):
    """The same, step by step as SGLang drafts: the topk best of a step are expanded, the best of all are verified."""
    shares = [confidence * (1 - confidence) ** place for place in range(shape.topk)]
    level, offered = [1.0], []
    for _ in range(shape.num_steps):
        children = sorted((parent * share for parent in level for share in shares), reverse=True)
        offered += children
        level = children[: shape.topk]
    return sum(sorted(offered, reverse=True)[: shape.num_drafts])


@settings(deadline=None)
@given(shapes(), probs)
def test_the_promise_is_that_of_the_tree_that_would_be_drafted(shape, confidence):
    assert expected_accepted(shape, confidence) == pytest.approx(drafted_length(shape, confidence), abs=1e-12)


def test_promises_that_can_be_checked_by_hand():
    assert expected_accepted(TreeShape(3, 1, 4), 0.5) == 0.5 + 0.25 + 0.125
    assert expected_accepted(LOW, 0.5) == 0.5 + 0.25 + 0.25  # two candidates of the root, one behind the likelier
    assert expected_accepted(HIGH, 1.0) == 7
    assert expected_accepted(TreeShape(7, 4, 8), 0.0) == expected_accepted(NO_SPECULATION, 0.7) == 0


@pytest.mark.parametrize(
    ("top1_prob", "shape"),
    [
        (0.0, LOW),
        (0.1, TreeShape(4, 4, 5)),
        (0.3, TreeShape(5, 3, 6)),
        (0.5, TreeShape(6, 2, 7)),
        (0.9, HIGH),
        (1.0, HIGH),
    ],
)
def test_a_sure_draft_gets_a_deep_narrow_tree_and_an_unsure_one_a_shallow_wide_one(top1_prob, shape):
    assert choice(make(), top1_prob) == shape


def test_talon_and_dcs_choose_differently():
    """A draft that is sure and wrong, then unsure and right: `dcs` follows what was accepted, `talon` does not."""
    steps = [(0.95, 0)] * 4 + [(0.3, 3)] * 8  # the next root's probability, drafts accepted
    walks = {}
    for name in ("talon", "dcs"):
        policy = make(name)
        policy.start("r", 0.95)
        walks[name] = [policy.choose(["r"])]
        for top1_prob, accepted in steps:
            policy.observe(StepResult("r", LOW, accepted, top1_prob))
            walks[name].append(policy.choose(["r"]))
    sure_and_wrong, unsure_and_right = 4, 12
    assert walks["talon"][sure_and_wrong] == HIGH
    assert walks["dcs"][sure_and_wrong] == TreeShape(4, 3, 5)
    assert walks["talon"][unsure_and_right] == TreeShape(5, 3, 6)
    assert walks["dcs"][unsure_and_right] == TreeShape(5, 2, 6)
    assert walks["talon"] == [HIGH] * 5 + [TreeShape(5, 3, 6)] * 8  # confidence alone


@settings(deadline=None, max_examples=50)
@given(ranges, st.none() | st.integers(2, 24), st.lists(st.lists(signals, min_size=1, max_size=3), max_size=8))
def test_every_choice_is_of_the_range_and_within_the_budget(span, budget, batches):
    within = [shape for shape in span.reachable() if budget is None or shape.num_draft_tokens <= budget]
    assume(within)
    start = within[0]
    policies = [make(span=span, start=start, budget=budget) for _ in range(2)]
    assert set(policies[0].shapes) <= set(within)
    for batch in batches:
        chosen = choice(policies[0], *batch)
        assert chosen in policies[0].shapes
        assert chosen == choice(policies[1], *batch)  # nothing but the signals decides
    bad = sum(not 0 <= prob <= 1 for batch in batches for prob in batch)
    assert policies[0].counts.bad_signals == bad


@settings(deadline=None, max_examples=50)
@given(ranges, st.none() | st.integers(2, 24))
def test_more_confidence_never_gives_a_shallower_tree(span, budget):
    within = [shape for shape in span.reachable() if budget is None or shape.num_draft_tokens <= budget]
    assume(within)
    policy = make(span=span, start=within[0], budget=budget)
    walk = [choice(policy, step / 200) for step in range(201)]
    assert all(one.num_steps <= surer.num_steps for one, surer in pairwise(walk))
    assert walk[-1].num_steps == max(shape.num_steps for shape in within)


def test_depth_follows_confidence_where_deeper_shapes_are_wider_too():
    """By the promise alone this range would go from three steps to two and back as confidence rises."""
    span = ShapeRange(TreeShape(4, 4, 8), TreeShape(2, 3, 12))
    promised = [min(span.reachable(), key=lambda s: (-expected_accepted(s, c), s)).num_steps for c in (0.2, 0.3, 0.9)]
    assert promised[0] > promised[1] < promised[2]
    assert [choice(make(span=span, start=span.low), c).num_steps for c in (0.2, 0.3, 0.9)] == [2, 2, 4]


def test_among_chains_the_deepest_within_the_budget_is_chosen():
    start = PRESETS["short"].low
    for top1_prob in (0.01, 0.5, 1.0):
        assert choice(make(span="short", start=start), top1_prob) == TreeShape(4, 1, 5)
        assert choice(make(span="short", start=start, budget=3), top1_prob) == TreeShape(2, 1, 3)


def test_the_batch_has_the_mean_of_its_known_requests():
    assert choice(make(), 0.9, 0.1) == TreeShape(6, 2, 7)
    policy = make()
    policy.start("r", 0.9)
    assert policy.choose(["r", "new", "newer"]) == HIGH


def test_without_a_signal_and_after_the_end_the_start_shape_is_chosen():
    policy = make(start=TreeShape(5, 4, 8))
    assert policy.choose([]) == policy.choose(["r"]) == TreeShape(5, 4, 8)
    policy.start("r", 0.9)
    policy.finish("r")
    policy.finish("r")
    policy.observe(StepResult("r", HIGH, 0, math.nan))  # late, under overlap
    assert policy.choose(["r"]) == TreeShape(5, 4, 8)
    assert policy.counts.bad_signals == 0


@pytest.mark.parametrize("top1_prob", [math.nan, math.inf, -math.inf, -0.1, 1.1])
def test_an_impossible_probability_counts_as_zero_and_is_counted(top1_prob):
    policy = make()
    policy.start("r", top1_prob)
    policy.observe(StepResult("r", HIGH, 7, top1_prob))
    assert policy.choose(["r"]) == LOW
    assert policy.counts.bad_signals == 2
    policy.observe(StepResult("r", HIGH, 7, 1.0000001))  # a rounding error is none
    assert policy.choose(["r"]) == HIGH
    assert policy.counts.bad_signals == 2


def test_states_are_built_for_what_can_be_chosen_only():
    config = AdaptiveConfig.from_dict({"policy": "talon", "shape": {"range": "paper"}})
    chosen = (LOW, TreeShape(4, 4, 5), TreeShape(5, 3, 6), TreeShape(6, 2, 7), HIGH)
    assert selectable_shapes(config, LOW) == chosen
    assert selectable_shapes(config, TreeShape(3, 1, 4)) == (*chosen, TreeShape(3, 1, 4))


@pytest.mark.parametrize("budget", [0, 1, 257, 8.0, True, "8", [8]])
def test_a_budget_that_is_none_is_refused(budget):
    with pytest.raises(ConfigError, match=r"^talon\.budget: found .*; expected an integer from 2 to 256; fix: "):
        make(budget=budget)


@pytest.mark.parametrize(("start", "budget", "least"), [(LOW, 3, 4), (TreeShape(5, 4, 8), 7, 8)])
def test_a_budget_that_excludes_the_start_or_the_whole_range_is_refused(start, budget, least):
    with pytest.raises(
        ConfigError, match=rf"^talon\.budget: found {budget}; expected at least {least}: .*; fix: raise"
    ):
        make(start=start, budget=budget)
    assert make("dcs", start=start, budget=budget).shapes  # of no concern to the others


def test_an_unknown_key_is_refused():
    with pytest.raises(ConfigError, match=r'^talon\.budgte: found an unknown key; .*did you mean "budget"'):
        AdaptiveConfig.from_dict({"talon": {"budgte": 8}})
