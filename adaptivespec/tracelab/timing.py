"""What a step of each shape takes, and how fast each shape is live, from the rows of a benchmark run."""

from collections.abc import Iterable, Iterator
from statistics import median

from adaptivespec.bench.configurations import PLAIN, Configuration
from adaptivespec.bench.rows import Row, decode_speed
from adaptivespec.bench.store import Store
from adaptivespec.bench.tables import summarise
from adaptivespec.shapes import TreeShape
from adaptivespec.tracelab.trace import TraceError


def plain_ms(store: Store) -> float:
    """Milliseconds of a token of plain decoding, median of the answers."""
    speeds = [speed for row in _rows(store, PLAIN) if (speed := decode_speed([row])) is not None]
    return median(1000 / speed for speed in _some(speeds, PLAIN))


def step_ms(store: Store, configurations: Iterable[Configuration]) -> dict[TreeShape, float]:
    """By pinned shape, milliseconds of a verify step, median of the answers."""
    found = {}
    for item in configurations:
        if item.pinned is not None:
            rows = [row for row in _rows(store, item.name) if row.verify_steps]
            times = [1000 * (row.end - row.arrivals[0][0]) / row.verify_steps for row in rows]
            found[item.pinned] = median(_some(times, item.name))
    return found


def live_ratios(store: Store, configurations: Iterable[Configuration]) -> dict[str, dict[TreeShape, float]]:
    """By task and pinned shape, decode speed over plain's in the same turn, median."""
    shapes = {item.name: item.pinned for item in configurations if item.pinned is not None}
    found: dict[str, dict[TreeShape, float]] = {}
    for summary in summarise(store, list(shapes)):
        if summary.ratio is not None:
            found.setdefault(summary.task, {})[shapes[summary.configuration]] = summary.ratio
    return found


def answers(store: Store) -> dict[tuple[str, int], list[int]]:
    """By task and place of the prompt, plain decoding's answer in the first round; those without a step are left out."""
    rows = [row for row in _rows(store, PLAIN) if row.cell.block == row.cell.round == 0 and len(row.output_ids) > 1]
    return {(row.cell.task, row.prompt): row.output_ids for row in rows}


def _rows(store: Store, configuration: str) -> Iterator[Row]:
    for cell, rows in store.cells.items():
        if cell.configuration == configuration:
            yield from rows


def _some(values: list[float], name: str) -> list[float]:
    if not values:
        raise TraceError(
            where=name,
            found="no answer of two tokens or more",
            expected="something to time",
            fix="raise --max-new-tokens, or give other prompts",
        )
    return values
