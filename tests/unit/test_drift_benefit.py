"""The memory is switched off where it costs acceptance, on again where it pays, and left alone where nothing is sure."""

import random

import pytest

from adaptivespec.drift_benefit import Benefit


def run(benefit: Benefit, steps: int, with_memory: float, without: float, seed: int = 0) -> list[int]:
    """Steps at which it switched, where a draft is accepted with these probabilities (three a step)."""
    rng, switched = random.Random(seed), []
    for step in range(steps):
        corrected = benefit.corrects(step)
        accepted = sum(rng.random() < (with_memory if corrected else without) for _ in range(3))
        if benefit.record(corrected, accepted):
            switched.append(step)
    return switched


def test_every_so_manyth_step_runs_the_other_way() -> None:
    benefit = Benefit(check_every=4)
    assert [benefit.corrects(step) for step in range(8)] == [True, True, True, False] * 2
    benefit.is_on = False
    assert [benefit.corrects(step) for step in range(8)] == [False, False, False, True] * 2


def test_zero_never_checks() -> None:
    assert all(Benefit(check_every=0).corrects(step) for step in range(100))


def test_a_harmful_memory_is_switched_off_and_a_good_one_on_again() -> None:
    benefit = Benefit(check_every=4)
    assert run(benefit, 2000, with_memory=0.1, without=0.5)
    assert not benefit.is_on
    assert run(benefit, 2000, with_memory=0.6, without=0.3, seed=1)
    assert benefit.is_on
    assert benefit.switches == 2


@pytest.mark.parametrize("seed", range(5))
def test_harder_text_for_both_sides_is_not_taken_for_harm(seed: int) -> None:
    """The few steps without correction remember as far back as the many with it."""
    benefit = Benefit(check_every=16)
    assert run(benefit, 8000, with_memory=0.72, without=0.7, seed=seed) == []
    assert run(benefit, 3000, with_memory=0.35, without=0.3, seed=seed + 100) == []
    assert benefit.with_memory.mean > benefit.without.mean - 0.1


@pytest.mark.parametrize("seed", range(5))
def test_a_good_memory_stays_on(seed: int) -> None:
    assert run(Benefit(check_every=8), 5000, with_memory=0.5, without=0.4, seed=seed) == []


def test_a_few_steps_decide_nothing() -> None:
    assert run(Benefit(check_every=2), 60, with_memory=0.0, without=1.0) == []


def test_figures_are_those_of_the_steps() -> None:
    benefit = Benefit(check_every=2)
    for step in range(10):
        benefit.record(benefit.corrects(step), 2 if benefit.corrects(step) else 1)
    figures = benefit.to_dict()
    assert figures["accepted_per_step_with"] == pytest.approx(2.0)
    assert figures["accepted_per_step_without"] == pytest.approx(1.0)
    assert (figures["is_on"], figures["steps_with"], figures["steps_without"], figures["switches"]) == (True, 5, 5, 0)


def test_requests_count_from_places_of_their_own_and_those_are_the_same_each_time():
    one, other = Benefit(check_every=8), Benefit(check_every=8)
    places = [one.first_step() for _ in range(200)]
    assert set(places) == set(range(8))
    assert [other.first_step() for _ in range(200)] == places
    assert Benefit(check_every=0).first_step() == 0
