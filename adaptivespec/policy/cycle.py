"""`cycle`: every shape in turn. For diagnostics and tests, not for speed."""

from collections.abc import Hashable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from adaptivespec.policy.base import ShapePolicy
from adaptivespec.shapes import TreeShape

if TYPE_CHECKING:
    from adaptivespec.config import AdaptiveConfig


class CyclePolicy(ShapePolicy):
    """The shapes of the range, low to high, then the start shape where it is not among them; one a step, for ever.

    With two shapes or more, neighbouring steps never have the same shape: every step swaps the runtime state.
    """

    name = "cycle"

    def __init__(self, config: "AdaptiveConfig", start_shape: TreeShape) -> None:
        super().__init__()
        self.shapes = tuple(dict.fromkeys((*config.shape.known_range.reachable(), start_shape)))
        self._walk = cycle(self.shapes)

    def choose(self, request_ids: Sequence[Hashable]) -> TreeShape:
        return next(self._walk)
