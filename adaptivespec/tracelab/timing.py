"""What a step of each shape takes, and how fast each shape is live, from the rows of a benchmark run.

Costs are of the even rounds, counted from 0, and live speeds of the odd ones: a replay whose costs were of the same answers as
the live speeds would agree with them whatever it says.
"""

from collections.abc import Iterable, Iterator
from statistics import median

from adaptivespec.bench.configurations import PLAIN, Configuration
from adaptivespec.bench.rows import Row, decode_speed
from adaptivespec.bench.store import Store
from adaptivespec.bench.tables import pairs_of, ratios_of
from adaptivespec.shapes import TreeShape
from adaptivespec.tracelab.trace import TraceError


def plain_ms(store: Store) -> float:
    """Milliseconds of a token of plain decoding, median of the answers of the even rounds."""
    speeds = [speed for row in _even_rounds(store, PLAIN) if (speed := decode_speed([row])) is not None]
    return median(1000 / speed for speed in _some(speeds, PLAIN))


def step_ms(store: Store, configurations: Iterable[Configuration]) -> dict[TreeShape, float]:
    """By pinned shape, milliseconds of a verify step, median of the answers of the even rounds."""
    found = {}
    for item in configurations:
        if item.pinned is not None:
            rows = [row for row in _even_rounds(store, item.name) if row.verify_steps]
            times = [1000 * (row.end - row.arrivals[0][0]) / row.verify_steps for row in rows]
            found[item.pinned] = median(_some(times, item.name))
    return found


def live_ratios(store: Store, configurations: Iterable[Configuration]) -> dict[str, dict[TreeShape, float]]:
    """By task and pinned shape, decode speed over plain's in the same turn, median of the odd rounds; empty after a single
    round."""
    shapes = {item.name: item.pinned for item in configurations if item.pinned is not None}
    found: dict[str, dict[TreeShape, float]] = {}
    for task in dict.fromkeys(cell.task for cell in store.cells):
        for name, shape in shapes.items():
            pairs = [pair for pair in pairs_of(store, name, task, 1) if pair[0][0].cell.round % 2]
            if ratios := ratios_of(pairs):
                found.setdefault(task, {})[shape] = median(ratios)
    return found


def answers(store: Store) -> dict[tuple[str, int], list[int]]:
    """By task and place of the prompt, plain decoding's answer in the first round; those without a step are left out."""
    rows = [
        row for row in _even_rounds(store, PLAIN) if row.cell.block == row.cell.round == 0 and len(row.output_ids) > 1
    ]
    return {(row.cell.task, row.prompt): row.output_ids for row in rows}


def _even_rounds(store: Store, configuration: str) -> Iterator[Row]:
    for cell, rows in store.cells.items():
        if cell.configuration == configuration and cell.round % 2 == 0:
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
