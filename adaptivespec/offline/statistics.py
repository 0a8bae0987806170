"""Accept lengths with their uncertainty: prompts are drawn anew, since tokens of one answer hang together."""

import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """An estimate and the bounds of its 95% bootstrap interval."""

    value: float
    low: float
    high: float


def accept_length(steps: Sequence[Sequence[int]]) -> float:
    """Tokens a step, BONUS TOKEN INCLUDED, over all prompts; `steps` holds each prompt's accepted drafts by step."""
    return 1 + sum(map(sum, steps)) / max(1, sum(map(len, steps)))


Steps = Sequence[Sequence[int]]


def gain(with_memory: Steps, without: Steps, draws: int = 2000) -> Interval:
    """Difference of the accept lengths of the same prompts, and its interval by drawing prompts with replacement."""
    return _bootstrap(lambda chosen: _difference(with_memory, without, chosen), len(without), draws)


class Case(NamedTuple):
    """The same prompts with a memory, without, and by a reference."""

    with_memory: Steps
    without: Steps
    reference: Steps


def recovery(cases: Sequence[Case], draws: int = 2000) -> Interval:
    """Share of what references gain over doing without that memories gain, in accept length, summed over some cases, and its
    interval by drawing each case's prompts with replacement. Draws in which the references gain nothing are left out."""

    def share(chosen: Sequence[Sequence[int]]) -> float:
        pairs = list(zip(cases, chosen, strict=True))
        whole = sum(_difference(case.reference, case.without, some) for case, some in pairs)
        part = sum(_difference(case.with_memory, case.without, some) for case, some in pairs)
        return part / whole if whole > 0 else math.nan

    rng = random.Random(0)
    everyone = [range(len(case.without)) for case in cases]
    found = (share([rng.choices(some, k=len(some)) for some in everyone]) for _ in range(draws))
    return _interval(share(everyone), [value for value in found if not math.isnan(value)])


def _difference(one: Steps, other: Steps, chosen: Sequence[int]) -> float:
    return accept_length([one[i] for i in chosen]) - accept_length([other[i] for i in chosen])


def _bootstrap(figure: Callable[[Sequence[int]], float], count: int, draws: int) -> Interval:
    rng = random.Random(0)
    return _interval(figure(range(count)), [figure(rng.choices(range(count), k=count)) for _ in range(draws)])


def _interval(value: float, drawn: list[float]) -> Interval:
    drawn = sorted(drawn) or [math.nan]
    return Interval(value, drawn[int(len(drawn) * 0.025)], drawn[int(len(drawn) * 0.975)])
