"""The policy on a real server: what a draft that is always wrong, one that recovers, and one that is right lead to."""

from statistics import fmean

import pytest

from adaptivespec.shapes import PRESETS, TreeShape
from tests.server.client import FULL_LENGTH, Answer, Client, Reference, assert_parity
from tests.server.models import CYCLE

SMALLEST = str(PRESETS["paper"].low)
LARGEST = str(PRESETS["paper"].high)
BREAKER_STEPS = 5


def breaker(client: Client) -> tuple[int, int]:
    client.wait_until_idle()
    counts = client.adaptive_info()["counts"]
    return counts["breaker_trips"], counts["breaker_recoveries"]


def assert_nothing_accepted(answer: Answer, num_tokens: int) -> None:
    """One token a step after the prefill's, and only the first few steps above the smallest shape."""
    assert answer.meta["spec_accept_rate"] == 0.0
    assert answer.meta["spec_verify_ct"] == num_tokens - 1
    assert answer.meta["spec_shape_histogram"][SMALLEST] >= num_tokens - 1 - BREAKER_STEPS


def test_a_draft_that_is_always_right_reaches_the_largest_shape(cyclic: Client, cycle_ids):
    answer = cyclic.generate(cycle_ids[:3], **FULL_LENGTH, max_new_tokens=200)
    assert answer.text == (CYCLE * 5)[3:203]
    meta = answer.meta
    assert meta["spec_shape_histogram"][LARGEST] >= 0.7 * meta["spec_verify_ct"]
    assert meta["spec_correct_drafts_histogram"][7] == meta["spec_shape_histogram"][LARGEST]
    assert meta["spec_accept_length"] > 6


def test_a_right_chain_has_accept_rate_one(cyclic: Client, cycle_ids):
    with cyclic.pinned([7, 1, 8]):
        answer = cyclic.generate(cycle_ids[:3], **FULL_LENGTH, max_new_tokens=1 + 8 * 10)
    assert answer.num_cut == 0
    assert answer.meta["spec_accept_rate"] == 1.0
    assert answer.meta["spec_correct_drafts_histogram"] == [0] * 7 + [10]


def test_the_breaker_trips_and_recovers_within_one_request(cyclic: Client, cycle_ids):
    # First the regex forces the letters backwards, which the draft never proposes; then it lets the cycle go on.
    forced = "ZYXWVUTSRQPONMLKJIHGFEDCBA"
    trips, recoveries = breaker(cyclic)
    answer = cyclic.generate(cycle_ids[:3], regex=forced + r"[\s\S]*", **FULL_LENGTH, max_new_tokens=150)
    rest = (CYCLE * 3)[CYCLE.index(forced[-1]) + 1 :]
    # Where the regex rules, a token of two letters may be the likeliest that is legal, so the text may be longer.
    assert len(answer.ids) == 150 <= len(answer.text)
    assert answer.text == (forced + rest)[: len(answer.text)]
    assert breaker(cyclic) == (trips + 1, recoveries + 1)
    counters = cyclic.counters()
    assert (counters["breaker_trips"], counters["breaker_recoveries"]) == breaker(cyclic)
    steps = answer.meta["spec_shape_histogram"]
    # Much of the forced part ran at the smallest shape, most of the rest at the largest.
    assert steps[SMALLEST] >= len(forced) - 2 * BREAKER_STEPS
    assert steps[LARGEST] >= 10


def test_a_draft_that_is_always_wrong_costs_speed_only(cyclic: Client, cycle_ids):
    """The bias has the target say one token again and again, where the draft goes on in the cycle."""
    trips, recoveries = breaker(cyclic)
    stuck = {"logit_bias": {str(cycle_ids[0]): 100.0}}
    answer = cyclic.generate(cycle_ids[:3], **stuck, **FULL_LENGTH, max_new_tokens=32)
    assert answer.ids == [cycle_ids[0]] * 32
    assert_nothing_accepted(answer, 32)
    assert breaker(cyclic) == (trips + 1, recoveries)


@pytest.mark.slow
def test_a_poison_draft_costs_speed_only(poison: Client, reference: Reference, prompts):
    trips, recoveries = breaker(poison)
    answers = poison.generate_batch(prompts[:4], [FULL_LENGTH | {"max_new_tokens": 32}] * 4)
    assert_parity(reference.answers(prompts[:4], 32), answers)
    for answer in answers:
        assert_nothing_accepted(answer, 32)
    assert breaker(poison) == (trips + 4, recoveries)


def test_the_shape_follows_the_text(remembering: Client, prompts):
    details = {"custom_params": {"adaptive": {"details": True, "drift": False}}}
    steps = [
        step
        for ids in prompts[:3]
        for step in remembering.generate(ids, **FULL_LENGTH, **details, max_new_tokens=64).meta["spec_steps"]
    ]
    assert len({shape for shape, _, _ in steps}) >= 3
    depths = {
        is_sure: [TreeShape.parse(shape).num_steps for shape, _, prob in steps if (prob > 0.5) == is_sure]
        for is_sure in (False, True)
    }
    assert fmean(depths[True]) > fmean(depths[False]) + 0.5
