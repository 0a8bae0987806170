from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.metrics import Promotion, RequestCounts, ServerCounts
from adaptivespec.shapes import NO_SPECULATION, PRESETS, TreeShape

LOW, HIGH = TreeShape(3, 4, 4), TreeShape(7, 1, 8)
shapes = st.sampled_from((*PRESETS["paper"].reachable(), NO_SPECULATION))
# A step accepts a path: not deeper than the tree, and not more than the nodes it has.
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


def test_steps_are_counted_by_shape():
    assert recorded([(LOW, 3), (HIGH, 2), (HIGH, 0)]).to_meta() == {
        "spec_shape_histogram": {"(3,4,4)": 1, "(7,1,8)": 2}
    }
    assert RequestCounts().to_meta() == {"spec_shape_histogram": {}}


def test_promotions_are_counted_listed_on_demand_and_those_cut_off_apart():
    counts = RequestCounts.of(0.4, details=True)
    promotions = [Promotion(3, 0.3, 0.5), Promotion(5, 0.1, 0.4)]
    counts.record_promotions(promotions, num_returned=5, kappa=0.3)
    assert counts.to_meta()["spec_margin"] == {
        "kappa": 0.3,
        "num_promoted": 1,
        "num_promoted_cut": 1,
        "promotions": [[3, 0.3, 0.5]],
    }
    counts.record_promotions(promotions, num_returned=6, kappa=0.4)
    assert (counts.promoted, counts.promoted_cut, len(counts.promotions)) == (3, 1, 3)


def test_kappa_is_the_least_that_the_request_ran_with():
    """An operator may change it: what was promoted before must not look like a breach."""
    counts = RequestCounts.of(None, details=False)
    assert "spec_margin" not in counts.to_meta()
    for kappa in (0.4, 0.1, 0.6):
        counts.record_promotions([Promotion(1, 0.3, 0.5)], num_returned=5, kappa=kappa)
    assert counts.to_meta()["spec_margin"] == {"kappa": 0.1, "num_promoted": 3, "num_promoted_cut": 0}


def test_steps_are_listed_on_demand_with_the_probability_at_their_root():
    counts = RequestCounts.of(None, details=True)
    counts.root_prob = 0.75
    counts.record(LOW, 3)
    counts.root_prob = 0.5
    counts.record(HIGH, 0)
    assert counts.to_meta()["spec_steps"] == [["(3,4,4)", 3, 0.75], ["(7,1,8)", 0, 0.5]]
    assert "spec_steps" not in recorded([(LOW, 3)]).to_meta()


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


@given(st.lists(batch_steps, max_size=20))
def test_server_counts_are_sums_and_lengths_and_rates_are_in_their_range(batches):
    counts = ServerCounts()
    for shape, accepted in batches:
        counts.record_step(shape, iter(accepted))
    steps = sum(len(accepted) for _, accepted in batches)
    assert counts.verify_steps == steps
    assert counts.accepted == sum(sum(accepted) for _, accepted in batches)
    assert counts.proposed == sum(shape.num_drafts * len(accepted) for shape, accepted in batches)
    assert counts.shape_switches == sum(one != other for one, other in pairwise(shape for shape, _ in batches))
    assert 0 <= counts.accept_rate <= 1
    assert counts.accept_length == ((counts.accepted + steps) / steps if steps else 0)


def test_before_the_first_step_and_without_speculation():
    assert (ServerCounts().accept_rate, ServerCounts().accept_length) == (0.0, 0.0)
    counts = ServerCounts()
    counts.record_step(NO_SPECULATION, [0, 0])
    assert (counts.proposed, counts.accept_rate, counts.accept_length) == (0, 0.0, 1.0)
