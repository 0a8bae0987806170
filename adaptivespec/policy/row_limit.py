"""Fewer drafts for larger batches: where every row of a verify step costs time, drafts only pay while there are few."""

from collections.abc import Iterable

from adaptivespec.shapes import NO_SPECULATION, TreeShape


class RowLimit:
    """The most token rows, batch size times num_draft_tokens, that requests decoded together may have. Source: this project.

    A request alone is given what was chosen for it: the range says how many rows that may be.

    Args:
        shapes: that a larger batch may be given instead of the one chosen for it.
        max_rows: 0 for no limit.

    Attributes:
        shapes: those, and `NO_SPECULATION` where there is a limit.
    """

    def __init__(self, shapes: Iterable[TreeShape], max_rows: int) -> None:
        self._max_rows = max_rows
        self._widest_first = sorted(set(shapes), key=lambda shape: (shape.num_draft_tokens, shape), reverse=True)
        self.shapes = (*shapes, NO_SPECULATION) if max_rows else tuple(shapes)

    def fit(self, shape: TreeShape, batch_size: int) -> TreeShape:
        """The shape itself within the limit, else the widest that is, else `NO_SPECULATION`."""
        if not self._max_rows or batch_size < 2 or shape.num_draft_tokens * batch_size <= self._max_rows:
            return shape
        fitting = (each for each in self._widest_first if each.num_draft_tokens * batch_size <= self._max_rows)
        return next(fitting, NO_SPECULATION)
