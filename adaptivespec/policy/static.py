"""`static`: one shape for ever."""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from adaptivespec.policy.base import ShapePolicy
from adaptivespec.shapes import TreeShape

if TYPE_CHECKING:
    from adaptivespec.config import AdaptiveConfig


class StaticPolicy(ShapePolicy):
    """Always the start shape."""

    name = "static"

    def __init__(self, config: "AdaptiveConfig", start_shape: TreeShape) -> None:
        super().__init__()
        self.shapes = (start_shape,)

    def choose(self, request_ids: Sequence[Hashable]) -> TreeShape:
        return self.shapes[0]
