"""Accept lengths with their uncertainty: prompts are drawn anew, since tokens of one answer hang together."""

import random
from collections.abc import Sequence
from typing import NamedTuple


class Interval(NamedTuple):
    """An estimate and the bounds of its 95% bootstrap interval."""

    value: float
    low: float
    high: float


def accept_length(steps: Sequence[Sequence[int]]) -> float:
    """Tokens a step, BONUS TOKEN INCLUDED, over all prompts; `steps` holds each prompt's accepted drafts by step."""
    return 1 + sum(map(sum, steps)) / max(1, sum(map(len, steps)))


def gain(with_memory: Sequence[Sequence[int]], without: Sequence[Sequence[int]], draws: int = 2000) -> Interval:
    """Difference of the accept lengths of the same prompts, and its interval by drawing prompts with replacement."""
    count, rng = len(without), random.Random(0)

    def difference(chosen: Sequence[int]) -> float:
        return accept_length([with_memory[i] for i in chosen]) - accept_length([without[i] for i in chosen])

    drawn = sorted(difference(rng.choices(range(count), k=count)) for _ in range(draws))
    return Interval(difference(range(count)), drawn[int(draws * 0.025)], drawn[int(draws * 0.975)])
