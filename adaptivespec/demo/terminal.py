"""What the demo shows in the terminal: progress while it measures, a table at the end."""

from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from adaptivespec.demo.configurations import PLAIN
from adaptivespec.demo.measure import ALL_SETS, Measurements, Summary


class TerminalProgress:
    """A bar over all pairs on stderr, with a line for each event above it; without a terminal only the lines.

    Args:
        num_pairs: pairs of a complete run.
    """

    def __init__(self, num_pairs: int) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=num_pairs)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False)

    def doing(self, text: str) -> None:
        """Name what goes on from now."""
        self._bar.update(self._task, description=text)
        if not self._console.is_terminal:
            self.say(text)

    def advance(self) -> None:
        """Move the bar by one pair."""
        self._bar.advance(self._task)


def results_table(found: Measurements) -> Table:
    """The results as a table: speed ratios by prompt set, accept length, answers equal to plain's."""
    table = Table(
        title="decode speed, ratio to plain: median of pairs, smallest-largest below",
        caption="accept length: tokens per verify step, bonus token included. Batch size 1, greedy, bfloat16.",
        box=SIMPLE_HEAD,
        padding=0,  # so that all of it fits 80 columns
    )
    table.add_column("decoder", no_wrap=True)
    table.add_column("tokens/s", justify="right")
    for prompt_set in (*found.prompt_sets, ALL_SETS):
        table.add_column(prompt_set, justify="right")
    for heading in ("accept length", "same answer"):
        table.add_column(heading, justify="right", max_width=len("accept"))
    ones = ["1.00x"] * (len(found.prompt_sets) + 1)
    table.add_row(PLAIN.name, _shown(found.plain_tokens_per_s(), 1), *ones, "", "")
    for name, by_set in found.summaries().items():
        total = by_set[ALL_SETS]
        table.add_row(
            name,
            _shown(total.tokens_per_s, 1),
            *(_spread(by_set[prompt_set]) for prompt_set in (*found.prompt_sets, ALL_SETS)),
            _shown(total.accept_length, 2),
            f"{total.num_identical}/{total.num_answers}",
        )
    return table


def _spread(summary: Summary) -> str:
    if summary.ratio is None:
        return "-"
    return f"{summary.ratio:.2f}x\n{summary.ratio_min:.2f}-{summary.ratio_max:.2f}"


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
