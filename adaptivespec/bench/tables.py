"""What the rows add up to: one summary for each decoder, task and batch size."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, geometric_mean, median, quantiles
from typing import Any

from adaptivespec.bench.configurations import PLAIN, Configuration
from adaptivespec.bench.grading import Grades
from adaptivespec.bench.rows import Row, decode_speed, output_speed
from adaptivespec.bench.store import Store


@dataclass(frozen=True)
class Summary:
    """One decoder on one task at one batch size.

    Args:
        configuration, task, batch_size: what it is of.
        num_turns: n of the ratios: cells with plain's cell of the same turn beside them.
        ratio: decode tokens/s over plain's in the same turn, median; the quartiles and extremes follow.
        output_ratio: the same with prefill: output tokens/s from sending to the end.
        tokens_per_s, output_tokens_per_s: medians of the cells.
        accept_length: `Row.accept_length`, mean of the answers; None without steps.
        verify_steps, draft_calls: mean of an answer; draft_calls None where the server does not tell its shapes.
        shape_steps: verify steps by tree shape.
        ttft_p50, ttft_p95: seconds to the first token.
        inter_token_p50, inter_token_p95: seconds a token, over all tokens after the first.
        num_answers: all answers; num_identical: those equal to plain's token for token.
        agreement: tokens before an answer parts from plain's, as share of the longer one, mean.
        output_tokens: mean length; length_ratio: mean of length over plain's.
        num_at_cap: answers that the cap on the length ended.
        promoted: near misses accepted, per 1000 tokens.
        split_gap: largest `Row.split_gap`, nats; None where no answer parts from plain's, or plain was not asked.
        accuracy: share of the graded answers that are right; None where none was graded. num_graded: of how many.
    """

    configuration: str
    task: str
    batch_size: int
    num_turns: int
    ratio: float | None
    ratio_q1: float | None
    ratio_q3: float | None
    ratio_min: float | None
    ratio_max: float | None
    output_ratio: float | None
    tokens_per_s: float | None
    output_tokens_per_s: float | None
    accept_length: float | None
    verify_steps: float
    draft_calls: float | None
    shape_steps: dict[str, int]
    ttft_p50: float
    ttft_p95: float
    inter_token_p50: float | None
    inter_token_p95: float | None
    num_answers: int
    num_identical: int
    agreement: float
    output_tokens: float
    length_ratio: float
    num_at_cap: int
    promoted: float
    split_gap: float | None = None
    accuracy: float | None = None
    num_graded: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON types, floats rounded to four decimals."""
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}


Pair = tuple[list[Row], list[Row]]
"""A cell's rows, and those of plain decoding in the same turn."""


def pairs_of(store: Store, configuration: str, task: str, batch_size: int) -> list[Pair]:
    """The cells of a decoder that have plain's beside them. Plain's own are paired with themselves."""
    return [
        (turn[configuration], turn[PLAIN])
        for turn in store.turns()
        if configuration in turn
        and PLAIN in turn
        and (turn[PLAIN][0].cell.task, turn[PLAIN][0].cell.batch_size) == (task, batch_size)
    ]


def ratios_of(pairs: Iterable[Pair]) -> list[float]:
    """Decode speed over plain's, for each pair where both have one."""
    speeds = ((decode_speed(mine), decode_speed(plain)) for mine, plain in pairs)
    return [mine / plain for mine, plain in speeds if mine is not None and plain is not None]


def summarise(store: Store, configurations: Sequence[str], grades: Grades | None = None) -> list[Summary]:
    """Every summary for which something was measured, by batch size, then task, then in the order of the decoders."""
    cells = sorted({cell.batch_size for cell in store.cells})
    tasks = list(dict.fromkeys(cell.task for cell in store.cells))
    found = (
        (name, task, size, pairs_of(store, name, task, size))
        for size in cells
        for task in tasks
        for name in configurations
    )
    return [_summary(name, task, size, pairs, grades or {}) for name, task, size, pairs in found if pairs]


def _summary(configuration: str, task: str, batch_size: int, pairs: list[Pair], grades: Grades) -> Summary:
    rows = [row for mine, _ in pairs for row in mine]
    beside = [both for mine, plain in pairs for both in zip(mine, plain, strict=True)]
    ratios = ratios_of(pairs)
    q1, _, q3 = quartiles(ratios)
    speeds = [speed for mine, _ in pairs if (speed := decode_speed(mine)) is not None]
    steps = sum(row.verify_steps for row in rows)
    lengths = [length for row in rows if (length := row.accept_length) is not None]
    calls = [row.draft_calls for row in rows]
    known_calls = [number for number in calls if number is not None]
    shapes: Counter[str] = Counter()
    for row in rows:
        shapes.update(row.shape_steps or {})
    gaps = [gap for row in rows for gap in row.inter_token()]
    tokens = sum(len(row.output_ids) for row in rows)
    graded = [grades[key] for row in rows if (key := (task, row.prompt, tuple(row.output_ids))) in grades]
    return Summary(
        configuration=configuration,
        task=task,
        batch_size=batch_size,
        num_turns=len(ratios),
        ratio=median(ratios) if ratios else None,
        ratio_q1=q1,
        ratio_q3=q3,
        ratio_min=min(ratios, default=None),
        ratio_max=max(ratios, default=None),
        output_ratio=median(output_speed(mine) / output_speed(plain) for mine, plain in pairs),
        tokens_per_s=median(speeds) if speeds else None,
        output_tokens_per_s=median(output_speed(mine) for mine, _ in pairs),
        accept_length=fmean(lengths) if lengths else None,
        verify_steps=steps / len(rows),
        draft_calls=fmean(known_calls) if len(known_calls) == len(calls) else None,
        shape_steps=dict(sorted(shapes.items())),
        ttft_p50=percentile([row.ttft for row in rows], 50),
        ttft_p95=percentile([row.ttft for row in rows], 95),
        inter_token_p50=percentile(gaps, 50) if gaps else None,
        inter_token_p95=percentile(gaps, 95) if gaps else None,
        num_answers=len(rows),
        num_identical=sum(row.output_ids == plain.output_ids for row, plain in beside),
        agreement=fmean(
            row.shared_len(plain) / max(len(row.output_ids), len(plain.output_ids)) for row, plain in beside
        ),
        output_tokens=tokens / len(rows),
        length_ratio=fmean(len(row.output_ids) / len(plain.output_ids) for row, plain in beside),
        num_at_cap=sum(row.hit_cap for row in rows),
        promoted=1000 * sum(row.promoted for row in rows) / tokens,
        split_gap=max((row.split_gap for row in rows if row.split_gap is not None), default=None),
        accuracy=fmean(graded) if graded else None,
        num_graded=len(graded),
    )


def quartiles(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """First quartile, median and third quartile; None without values."""
    if len(values) < 2:
        only = values[0] if values else None
        return only, only, only
    q1, q2, q3 = quantiles(values, n=4, method="inclusive")
    return q1, q2, q3


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that at least so many percent of all do not exceed."""
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]


def geometric_means(summaries: Sequence[Summary]) -> dict[int, dict[str, float]]:
    """By batch size and decoder, over all tasks, the mean of the median ratios; decoders that lack a task are left out."""
    found: dict[int, dict[str, float]] = {}
    for size in dict.fromkeys(item.batch_size for item in summaries):
        tasks = {item.task for item in summaries if item.batch_size == size}
        for name in dict.fromkeys(item.configuration for item in summaries):
            ratios = [
                item.ratio
                for item in summaries
                if (item.batch_size, item.configuration) == (size, name) and item.ratio is not None
            ]
            if len(ratios) == len(tasks):
                found.setdefault(size, {})[name] = round(geometric_mean(ratios), 4)
    return found


def best_static(means: dict[str, float], configurations: Sequence[Configuration]) -> str | None:
    """The decoder of one fixed shape with the largest mean; None where there is none."""
    names = [item.name for item in configurations if item.is_static and item.name in means]
    return max(names, key=means.__getitem__, default=None)
