"""Accept lengths with their uncertainty: prompts are drawn anew, since tokens of one answer hang together."""

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


def recovery(with_memory: Steps, without: Steps, reference: Steps, draws: int = 2000) -> Interval:
    """Share of what a reference gains over doing without that the memory gains, in accept length, on the same prompts."""

    def share(chosen: Sequence[int]) -> float:
        whole = _difference(reference, without, chosen)
        return _difference(with_memory, without, chosen) / whole if whole else float("nan")

    return _bootstrap(share, len(without), draws)


def _difference(one: Steps, other: Steps, chosen: Sequence[int]) -> float:
    return accept_length([one[i] for i in chosen]) - accept_length([other[i] for i in chosen])


def _bootstrap(figure: Callable[[Sequence[int]], float], count: int, draws: int) -> Interval:
    rng = random.Random(0)
    drawn = sorted(figure(rng.choices(range(count), k=count)) for _ in range(draws))
    return Interval(figure(range(count)), drawn[int(draws * 0.025)], drawn[int(draws * 0.975)])
