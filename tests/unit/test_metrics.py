from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec.metrics import Promotion, RequestCounts, ServerCounts
from adaptivespec.shapes import NO_SPECULATION, PRESETS, TreeShape

LOW, HIGH = TreeShape(3, 4, 4), TreeShape(7, 1, 8)
shapes = st.sampled_from((*PRESETS["paper"].reachable(), NO_SPECULATION))
# A step accepts a path: not deeper than the tree, and not more than the nodes it has.
steps = shapes.flatmap(lambda shape: st.tuples(st.just(shape), st.integers(0, min(shape.num_steps, shape.num_drafts))))
batch_steps = shapes.flatmap(
    lambda shape: st.tuples(
        st.just(shape), st.lists(st.integers(0, min(shape.num_steps, shape.num_drafts)), min_size=1, max_size=5)
    )
)


def recorded(history) -> RequestCounts:
    counts = RequestCounts()
    for shape, num_accepted in history:
        counts.record(shape, num_accepted)
    return counts


def test_two_shapes_in_one_request():
    counts = recorded([(LOW, 3), (HIGH, 2), (HIGH, 0)])
    assert counts.to_meta() == {
        "spec_accept_rate": 5 / 17,  # 3 + 7 + 7 proposed, never 3 x the widest
        "spec_accept_length": 8 / 3,  # a bonus token in each step
        "spec_num_correct_drafts": 5,
        "spec_num_proposed_drafts": 17,
        "spec_verify_ct": 3,
        "spec_correct_drafts_histogram": [1, 0, 1, 1],
        "spec_shape_histogram": {"(3,4,4)": 1, "(7,1,8)": 2},
    }
    assert counts.check_identities() == []


def test_promotions_are_counted_listed_on_demand_and_those_cut_off_apart():
    counts = recorded([(HIGH, 4)])
    counts.kappa = 0.2
    promotions = [Promotion(3, 0.3, 0.5), Promotion(5, 0.1, 0.4)]
    counts.record_promotions(promotions, num_returned=5, keep=True)
    assert counts.to_meta()["spec_margin"] == {
        "kappa": 0.2,
        "num_promoted": 1,
        "num_promoted_cut": 1,
        "promotions": [[3, 0.3, 0.5]],
    }
    counts.record_promotions(promotions, num_returned=6, keep=False)
    assert (counts.promoted, counts.promoted_cut, len(counts.promotions)) == (3, 1, 1)
    assert counts.check_identities() == []
    counts.promoted += 1
    assert counts.check_identities() == ["promoted <= accepted: found 5 <= 4"]


def test_steps_are_listed_on_demand_with_the_probability_at_their_root():
    counts = RequestCounts(root_prob=0.75)
    counts.record(LOW, 3, keep=True)
    counts.root_prob = 0.5
    counts.record(HIGH, 0, keep=True)
    assert counts.to_meta()["spec_steps"] == [["(3,4,4)", 3, 0.75], ["(7,1,8)", 0, 0.5]]
    assert "spec_steps" not in recorded([(LOW, 3)]).to_meta()


def test_a_request_without_steps():
    counts = RequestCounts()
    assert counts.check_identities() == []
    assert (counts.accept_rate, counts.accept_length) == (0.0, 0.0)
    assert counts.to_meta()["spec_correct_drafts_histogram"] == []


def test_steps_without_speculation_have_length_one_and_rate_zero():
    counts = recorded([(NO_SPECULATION, 0)] * 4)
    assert (counts.verify_steps, counts.proposed, counts.accept_rate, counts.accept_length) == (4, 0, 0.0, 1.0)
    assert counts.check_identities() == []


def test_poison_has_rate_zero_and_a_perfect_chain_rate_one():
    assert recorded([(LOW, 0)] * 9).accept_rate == 0.0
    assert recorded([(HIGH, 7)] * 9).accept_rate == 1.0


@settings(deadline=None)
@given(st.lists(steps, max_size=30))
def test_identities_hold_for_every_history(history):
    counts = recorded(history)
    assert counts.check_identities() == []
    meta = counts.to_meta()
    histogram = meta["spec_correct_drafts_histogram"]
    assert sum(histogram) == meta["spec_verify_ct"] == len(history)
    assert sum(i * steps for i, steps in enumerate(histogram)) == meta["spec_num_correct_drafts"]
    assert meta["spec_num_proposed_drafts"] == sum(shape.num_draft_tokens - 1 for shape, _ in history)
    assert 0 <= meta["spec_num_correct_drafts"] <= meta["spec_num_proposed_drafts"]
    assert 0 <= meta["spec_accept_rate"] <= 1
    assert sum(meta["spec_shape_histogram"].values()) == len(history)
    # Every step commits its accepted tokens and one bonus token.
    committed = sum(accepted + 1 for _, accepted in history)
    assert meta["spec_accept_length"] == (committed / len(history) if history else 0)


def widen(counts):
    counts.proposed = 2


def lose_a_step(counts):
    counts.verify_steps -= 1


def claim_more(counts):
    counts.accepted += 1


def go_deeper(counts):
    counts.record(LOW, 5)


def go_below(counts):
    counts.record(LOW, -1)


def misfile(counts):
    counts.steps_per_shape[HIGH] += 1


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (lose_a_step, ["sum(accepted histogram) == verify_steps", "sum(shape histogram) == verify_steps"]),
        (claim_more, ["sum(i * h_i) == accepted", "accepted <= proposed"]),
        (widen, ["sum(drafts of shape * steps) == proposed", "accepted <= proposed"]),
        (go_deeper, ["accepted in a step <= deepest num_steps", "accepted <= proposed"]),
        (go_below, ["0 <= accepted in every step"]),
        (misfile, ["sum(shape histogram) == verify_steps", "sum(drafts of shape * steps) == proposed"]),
    ],
)
def test_each_broken_identity_is_named(damage, names):
    counts = recorded([(LOW, 3)])
    damage(counts)
    assert [line.split(":")[0] for line in counts.check_identities()] == names


def test_the_server_counts_batches_and_requests_apart():
    counts = ServerCounts()
    counts.record_step(LOW, [3, 0, 1])
    counts.record_step(LOW, [])
    counts.record_step(HIGH, [7])
    counts.record_step(HIGH, [0])
    counts.record_step(LOW, [0, 0])
    counts.record_refusal("pp")
    assert (counts.verify_steps, counts.proposed, counts.accepted) == (7, 9 + 14 + 6, 11)
    assert counts.steps_per_shape == {LOW: 2, HIGH: 2}
    assert counts.shape_switches == 2
    assert counts.refusals == {"pp": 1}
    assert counts.accept_length == 18 / 7
    assert counts.accept_rate == 11 / 29
    assert counts.check_identities() == []


@settings(deadline=None)
@given(st.lists(batch_steps, max_size=20))
def test_server_counts_are_the_sum_over_requests(batches):
    server = ServerCounts()
    requests = [RequestCounts() for _ in range(5)]
    for shape, accepted in batches:
        server.record_step(shape, iter(accepted))
        for request, num_accepted in zip(requests, accepted, strict=False):
            request.record(shape, num_accepted)
    for name in ("verify_steps", "proposed", "accepted"):
        assert getattr(server, name) == sum(getattr(request, name) for request in requests)
    chosen = [shape for shape, _ in batches]
    assert server.shape_switches == sum(one != other for one, other in pairwise(chosen))
    assert server.check_identities() == []


def test_a_broken_server_identity_is_named():
    counts = ServerCounts(verify_steps=1, proposed=3, accepted=4, breaker_recoveries=1, shape_switches=1)
    counts.steps_per_shape[LOW] = 2
    assert [line.split(":")[0] for line in counts.check_identities()] == [
        "batch steps <= verify_steps",
        "breaker_recoveries <= breaker_trips",
        "accepted <= proposed",
    ]
