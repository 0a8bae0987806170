"""What the benchmark shows in the terminal: progress while it measures, a table at the end."""

import sys
from collections.abc import Iterator, Sequence
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table
from tqdm import tqdm

from adaptivespec.bench.tables import Summary, geometric_means


class BarProgress:
    """A bar over all cells on stderr, with lines above it; without a terminal only the lines."""

    def __init__(self, num_cells: int) -> None:
        self._bar = tqdm(total=num_cells, unit="cell", disable=None)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.write(text, file=sys.stderr)

    def doing(self, text: str) -> None:
        """Name what goes on from now."""
        self._bar.set_description(text)
        if self._bar.disable:
            self.say(text)

    def advance(self) -> None:
        """Move the bar by one cell."""
        self._bar.update()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def results_tables(summaries: Sequence[Summary]) -> Iterator[Table]:
    """A table for each batch size: speed over plain's and accept length, by task."""
    means = geometric_means(summaries)
    for size in dict.fromkeys(item.batch_size for item in summaries):
        mine = [item for item in summaries if item.batch_size == size]
        tasks = list(dict.fromkeys(item.task for item in mine))
        table = Table(
            title=f"decode speed over plain, batch size {size}: median of turns, quartiles below; accept length; answers the same as plain's",
            box=SIMPLE_HEAD,
            padding=0,  # so that three tasks fit 80 columns
        )
        table.add_column("decoder", no_wrap=True)
        for task in tasks:
            table.add_column(task, justify="right")
        for heading in ("mean", "tokens/s", "same"):
            table.add_column(heading, justify="right")
        for name in dict.fromkeys(item.configuration for item in mine):
            by_task = {item.task: item for item in mine if item.configuration == name}
            mean = means.get(size, {}).get(name)
            speeds = [item.tokens_per_s for item in by_task.values() if item.tokens_per_s is not None]
            same, answers = (
                sum(getattr(item, key) for item in by_task.values()) for key in ("num_identical", "num_answers")
            )
            table.add_row(
                name,
                *(_cell(by_task.get(task)) for task in tasks),
                "-" if mean is None else f"{mean:.2f}x",
                f"{fmean(speeds):.1f}" if speeds else "-",
                f"{same}/{answers}",
            )
        gaps = [item.split_gap for item in mine if item.split_gap is not None]
        if gaps:
            table.caption = f"where answers part, plain's two likeliest tokens are {max(gaps):.3f} nats apart at most"
        yield table


def _cell(item: Summary | None) -> str:
    if item is None or item.ratio is None:
        return "-"
    length = "" if item.accept_length is None else f", {item.accept_length:.2f}"
    return f"{item.ratio:.2f}x{length}\n{item.ratio_q1:.2f}-{item.ratio_q3:.2f}"
