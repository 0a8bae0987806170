"""The plot of a replay, as the bytes of a PNG."""

from collections.abc import Sequence
from itertools import cycle

from adaptivespec.plots import SET_COLOURS, add_legend, new_axes, png
from adaptivespec.tracelab.report import HINDSIGHT, Row, speeds
from adaptivespec.tracelab.trace import Trace


def figure(trace: Trace, rows: Sequence[Row]) -> bytes:
    """Replayed against live speed of the static shapes, by set and their mean; policies and hindsight as lines at their mean."""
    axes = new_axes(6.0)
    colours = dict(zip(trace.prompt_sets, cycle(SET_COLOURS), strict=False))
    low, high = 1.0, 1.0
    for name, colour in {**colours, "all": "#000000"}.items():
        points = {str(row.shape): pair for row in rows if (pair := speeds(trace, row, name))}
        if not points:
            continue
        live, replayed = zip(*points.values(), strict=True)
        low, high = min(low, *live, *replayed), max(high, *live, *replayed)
        label = "geometric mean" if name == "all" else name
        axes.plot(live, replayed, "D" if name == "all" else "o", color=colour, markersize=5, alpha=0.8, label=label)
        for shape, point in points.items() if name == "all" else ():
            axes.annotate(shape, point, xytext=(4, -9), textcoords="offset points", fontsize=7)
    axes.plot([low, high], [low, high], color="#999999", linewidth=1)
    for row in rows:
        if row.shape is None:
            style = "-" if row.label == HINDSIGHT else "--"
            axes.axhline(row.mean, color="#555555", linestyle=style, linewidth=1)
            axes.text(low, row.mean, f"{row.label} {row.mean:.2f}x", fontsize=7, va="bottom")
    axes.set_xlabel("live decode tokens/s over plain, median, odd rounds")
    axes.set_ylabel("replayed over plain, costs of the even rounds")
    add_legend(axes, columns=min(len(colours) + 1, 3))
    axes.figure.supxlabel(
        f"source: trace of {trace.sessions[-1]['date']}, n = {len(trace.answers)} answers; static shapes: points",
        fontsize=7,
        color="#555555",
    )
    return png(axes.figure)
