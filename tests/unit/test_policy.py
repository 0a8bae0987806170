"""Policies against the rules of the design, and `dcs` against a plain reference model."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from adaptivespec.config import AdaptiveConfig
from adaptivespec.policy import POLICY_NAMES, StepResult, make_policy
from adaptivespec.shapes import NO_SPECULATION, PRESETS, TreeShape

LOW, HIGH = TreeShape(3, 4, 4), TreeShape(7, 1, 8)
START = TreeShape(5, 4, 8)  # outside the range, to tell it from DCS 0


def make(policy="dcs", start=START, **dcs):
    return make_policy(AdaptiveConfig.from_dict({"policy": policy, "shape": {"range": "paper"}, "dcs": dcs}), start)


def feed(policy, accepted, top1_prob=1.0, request_id="r", shape=LOW):
    for num_accepted in accepted:
        policy.observe(StepResult(request_id, shape, num_accepted, top1_prob))


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_is_made_by_name_and_stays_within_its_shapes(name):
    policy = make(name)
    assert policy.name == name
    policy.start("r", 0.7)
    for num_accepted in (0, 1, 3, 3, 3, 0):
        assert policy.choose(["r", "unknown"]) in policy.shapes
        feed(policy, [num_accepted], 0.9)
    policy.finish("r")
    policy.finish("r")
    assert policy.choose([]) in policy.shapes


def test_static_always_chooses_the_start_shape():
    policy = make("static")
    policy.start("r", 1.0)
    feed(policy, [3] * 9)
    assert [policy.choose(["r"]) for _ in range(3)] == [START] * 3


def test_cycle_walks_every_shape_and_never_repeats_a_neighbour():
    policy = make("cycle")
    walk = [policy.choose(["r"]) for _ in range(2 * len(policy.shapes))]
    assert set(walk) == {*PRESETS["paper"].reachable(), START}
    assert all(one != next_one for one, next_one in zip(walk, walk[1:] + walk[:1], strict=True))


def test_dcs_starts_with_half_the_probability_over_half():
    policy = make()
    policy.start("r", 0.5)  # 0.5 * 0.5 / 0.5
    assert policy.choose(["r"]) == TreeShape(5, 3, 6)


@pytest.mark.parametrize("batch", [[], ["never seen"]])
def test_dcs_without_a_signal_chooses_the_start_shape(batch):
    assert make().choose(batch) == START


def test_dcs_leaves_requests_without_a_signal_out_of_the_mean():
    policy = make()
    policy.start("r", 1.0)
    assert policy.choose(["r", "new", "newer"]) == HIGH


def test_dcs_takes_the_mean_over_the_batch():
    policy = make()
    policy.start("sure", 1.0)
    policy.start("lost", 0.0)
    assert policy.choose(["sure", "lost"]) == TreeShape(5, 3, 6)
    assert policy.choose(["lost"]) == LOW
    assert policy.choose(["sure"]) == HIGH


def test_dcs_credits_the_shape_that_produced_the_result():
    policy = make(alpha=1.0)
    policy.start("r", 0.5)
    feed(policy, [3], 0.5, shape=TreeShape(6, 2, 7))  # RAR 3/6: at 0.5
    assert policy.choose(["r"]) == TreeShape(5, 3, 6)
    feed(policy, [3], 0.5, shape=LOW)  # RAR 3/3: at 1
    assert policy.choose(["r"]) == HIGH


def test_a_perfect_draft_reaches_the_high_end_and_a_poisoned_one_the_low_end():
    policy = make()
    policy.start("r", 0.6)
    feed(policy, [3] * 20, 0.6)
    assert policy.choose(["r"]) == HIGH
    feed(policy, [0] * 20, 1.0)
    assert policy.choose(["r"]) == LOW


def test_the_breaker_trips_after_five_zero_steps_and_recovers_with_a_fresh_rar():
    policy = make(alpha=0.0, initial_rar=1.0)  # RAR stays 1, so that only the breaker can lower DCS
    policy.start("r", 1.0)
    feed(policy, [0] * 4)
    assert policy.choose(["r"]) == HIGH
    assert policy.counts.trips == 0
    feed(policy, [0])
    assert policy.choose(["r"]) == LOW
    feed(policy, [0] * 7)
    assert (policy.counts.trips, policy.counts.recoveries) == (1, 0)
    feed(policy, [1])
    assert policy.choose(["r"]) == HIGH
    assert (policy.counts.trips, policy.counts.recoveries) == (1, 1)


def test_recovery_restarts_the_rar_at_its_initial_value():
    policy = make()
    policy.start("r", 1.0)
    feed(policy, [0] * 5)
    feed(policy, [3], top1_prob=0.5)
    assert policy.choose(["r"]) == TreeShape(5, 3, 6)  # 0.5 * 0.5 / 0.5, not the mean of past and present


def test_an_accepting_step_resets_the_count_of_zero_steps():
    policy = make()
    policy.start("r", 1.0)
    feed(policy, [0, 0, 0, 0, 1] * 5)
    assert policy.counts.trips == 0


def test_steps_without_speculation_touch_neither_rar_nor_breaker():
    policy = make()
    policy.start("r", 0.5)
    feed(policy, [0] * 9, 0.5, shape=NO_SPECULATION)
    assert policy.choose(["r"]) == TreeShape(5, 3, 6)
    assert policy.counts.trips == 0


def test_a_tripped_request_lowers_its_batch_only_by_its_share():
    policy = make(alpha=0.0, initial_rar=1.0)
    policy.start("good", 1.0)
    policy.start("bad", 1.0)
    feed(policy, [0] * 5, request_id="bad")
    assert policy.choose(["good", "bad"]) == TreeShape(5, 3, 6)


@pytest.mark.parametrize("top1_prob", [math.nan, math.inf, -math.inf, -0.1, 1.1])
def test_an_impossible_probability_counts_as_zero_and_is_counted(top1_prob):
    policy = make()
    policy.start("r", top1_prob)
    assert policy.choose(["r"]) == LOW
    feed(policy, [3], top1_prob)
    assert policy.choose(["r"]) == LOW
    assert policy.counts.bad_signals == 2
    feed(policy, [3], 1.0)
    assert policy.choose(["r"]) == HIGH
    assert policy.counts.bad_signals == 2


def test_a_rounding_error_above_one_is_no_bad_signal():
    policy = make()
    policy.start("r", 1.0000001)
    assert policy.choose(["r"]) == HIGH
    assert policy.counts.bad_signals == 0


def test_late_results_of_finished_requests_are_ignored():
    policy = make()
    policy.start("r", 1.0)
    policy.finish("r")
    feed(policy, [0] * 9, math.nan)
    assert policy.choose(["r"]) == START
    assert (policy.counts.trips, policy.counts.bad_signals) == (0, 0)


def test_a_request_prefilled_again_keeps_its_history():
    policy = make(alpha=1.0)
    policy.start("r", 1.0)
    feed(policy, [0], 1.0)
    policy.start("r", 1.0)
    assert policy.choose(["r"]) == LOW


def test_a_finished_request_that_comes_back_starts_afresh():
    policy = make(alpha=1.0)
    policy.start("r", 1.0)
    feed(policy, [0], 1.0)
    policy.finish("r")
    policy.start("r", 1.0)
    assert policy.choose(["r"]) == HIGH


def reference_dcs(history, top1_prob, alpha, initial, divisor, limit):
    """One request's (DCS, trips, recoveries), recomputed from its whole history of (accepted, num_steps)."""
    rar, zeros, tripped, trips, recoveries = initial, 0, False, 0, 0
    for accepted, num_steps in history:
        if num_steps == 0:
            continue
        if accepted > 0 and tripped:
            tripped, rar, zeros, recoveries = False, initial, 0, recoveries + 1
            continue
        rar = (1 - alpha) * rar + alpha * accepted / num_steps
        zeros = zeros + 1 if accepted == 0 else 0
        if zeros == limit and not tripped:
            tripped, trips = True, trips + 1
    usable = 0 <= top1_prob <= 1
    return (max(0.0, min(1.0, top1_prob * rar / divisor)) if usable and not tripped else 0.0), trips, recoveries


def assert_chosen_near(shape, span, t):
    """`shape` is the one at `t`, up to float rounding of `t`."""
    assert shape in {span.at(min(max(t + off, 0.0), 1.0)) for off in (-1e-9, 0.0, 1e-9)}


steps = st.sampled_from((*PRESETS["paper"].reachable(), NO_SPECULATION)).flatmap(
    lambda shape: st.tuples(st.just(shape), st.sampled_from([0, 0, 0, shape.num_steps // 2, shape.num_steps]))
)
probs = st.floats(0, 1) | st.sampled_from([math.nan, math.inf, -1.0])


@settings(deadline=None)
@given(
    st.lists(steps, max_size=40),
    probs,
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0.01, 10),
    st.integers(1, 6),
)
def test_one_request_follows_the_reference(history, top1_prob, alpha, initial, divisor, limit):
    policy = make(alpha=alpha, initial_rar=initial, divisor=divisor, breaker_steps=limit)
    policy.start("r", top1_prob)
    for shape, accepted in history:
        feed(policy, [accepted], top1_prob, shape=shape)
    plain = [(accepted, shape.num_steps) for shape, accepted in history]
    dcs, trips, recoveries = reference_dcs(plain, top1_prob, alpha, initial, divisor, limit)
    assert_chosen_near(policy.choose(["r"]), PRESETS["paper"], dcs)
    assert (policy.counts.trips, policy.counts.recoveries) == (trips, recoveries)


class BatchMachine(RuleBasedStateMachine):
    """Requests come, decode, retract and go in any order; the choice always is that of the reference's mean."""

    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.policy = make()
        self.histories = {}
        self.probs = {}
        self.num_made = 0

    @rule(target=requests, top1_prob=probs)
    def start(self, top1_prob):
        self.num_made += 1
        name = f"request {self.num_made}"
        self.policy.start(name, top1_prob)
        self.histories[name], self.probs[name] = [], top1_prob
        return name

    @rule(name=requests, top1_prob=probs)
    def prefill_again(self, name, top1_prob):
        self.policy.start(name, top1_prob)
        self.probs[name] = top1_prob

    @rule(name=requests, step=steps, top1_prob=probs, times=st.integers(1, 6))
    def observe(self, name, step, top1_prob, times):
        shape, accepted = step
        feed(self.policy, [accepted] * times, top1_prob, name, shape)
        self.histories[name] += [(accepted, shape.num_steps)] * times
        self.probs[name] = top1_prob

    @rule(name=consumes(requests), step=steps, top1_prob=probs)
    def finish_then_hear_late(self, name, step, top1_prob):
        self.policy.finish(name)
        feed(self.policy, [step[1]], top1_prob, name, step[0])
        del self.histories[name], self.probs[name]

    @invariant()
    def chooses_the_mean(self):
        scores = [reference_dcs(self.histories[r], self.probs[r], 0.3, 0.5, 0.5, 5)[0] for r in self.histories]
        chosen = self.policy.choose([*self.histories, "unknown"])
        if scores:
            assert_chosen_near(chosen, PRESETS["paper"], sum(scores) / len(scores))
        else:
            assert chosen == START


TestBatchMachine = BatchMachine.TestCase
TestBatchMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
