"""What all plots share: each is the bytes of a PNG that reads on a phone."""

import io
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

SET_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, told apart by colour-blind readers."""

STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
WIDTH_INCHES = 5.2
DPI = 160


def new_axes(height: float, rows: int = 1) -> Any:
    """Axes of a new figure, `height` inches high; an array of them for several rows."""
    # No pyplot: it keeps every figure, and looks for a screen.
    with rc_context(STYLE):
        return Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, layout="constrained").subplots(rows)


def add_legend(axes: Any, columns: int) -> None:
    """The legend of labelled artists, above the plot."""
    axes.figure.legend(loc="outside upper center", ncols=columns, frameon=False, fontsize=9, handlelength=1)


def png(figure: Any) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
