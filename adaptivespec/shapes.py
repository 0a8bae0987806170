"""Draft-tree shapes: the triplet, its rules, and the range that a policy moves in."""

import math
import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from adaptivespec.errors import ConfigError

MAX_NUM_STEPS = 64
MAX_TOPK = 64
MAX_NUM_DRAFT_TOKENS = 256

_SHAPE_TEXT = re.compile(r"\(?\s*(\d{1,9})\s*[-,]\s*(\d{1,9})\s*[-,]\s*(\d{1,9})\s*\)?", re.ASCII)


def max_nodes(num_steps: int, topk: int) -> int:
    """The most nodes, root included, that a draft of this depth and width can offer.

    The first step offers `topk` nodes, each later one `topk` children for each of `topk` kept nodes.
    Source: SGLang's `organize_draft_results`.
    """
    return 1 + topk + (num_steps - 1) * topk * topk if num_steps else 1


@dataclass(frozen=True, order=True, slots=True)
class TreeShape:
    """The shape of one draft tree; always legal, else `ConfigError` at construction.

    `(0, 1, 1)`, `NO_SPECULATION`, drafts nothing. Any other shape has at least one step. With topk 1 it is a chain:
    num_draft_tokens is then num_steps + 1. With more it is a tree, with at least so many: SGLang moves the accepted path,
    num_steps + 1 columns of it, to the front of num_draft_tokens slots (`_compact_accept_to_front`). Ordered as the
    tuple of its fields; hashable; prints as `(3,4,4)`.

    Args:
        num_steps: depth of the draft, 0 to 64. The first step is the one read off the draft-extend pass.
        topk: children drafted for each expanded node, 1 to 64.
        num_draft_tokens: nodes that the target verifies, THE ROOT INCLUDED, num_steps + 1 to 256, and not more than the
            draft can offer.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        _check(self.num_steps, self.topk, self.num_draft_tokens, where="tree shape")

    def __str__(self) -> str:
        return f"({self.num_steps},{self.topk},{self.num_draft_tokens})"

    @property
    def num_drafts(self) -> int:
        """Nodes proposed to the target: num_draft_tokens without the root."""
        return self.num_draft_tokens - 1

    @property
    def max_nodes(self) -> int:
        """The most nodes, root included, that this depth and width can offer."""
        return max_nodes(self.num_steps, self.topk)

    def to_list(self) -> list[int]:
        """The JSON form, `[num_steps, topk, num_draft_tokens]`."""
        return [self.num_steps, self.topk, self.num_draft_tokens]

    @classmethod
    def parse(cls, value: Any, where: str = "tree shape") -> "TreeShape":
        """The shape that a user wrote.

        Args:
            value: a `TreeShape`, a list or tuple of three integers, or text such as "3-4-4", "3,4,4" or "(3,4,4)".
            where: key path or option to name in the error.

        Raises:
            ConfigError: neither form, or a shape that breaks a rule.
        """
        if isinstance(value, TreeShape):
            return value
        parts: Any = value
        if isinstance(value, str):
            match = _SHAPE_TEXT.fullmatch(value.strip())
            parts = [int(group) for group in match.groups()] if match else None
        if not isinstance(parts, list | tuple) or len(parts) != 3:
            raise ConfigError(
                where=where,
                found=_shown(value),
                expected="three integers: num_steps, topk, num_draft_tokens (the root counted)",
                fix='write for example [3, 1, 4] or "3-1-4"',
            )
        num_steps, topk, num_draft_tokens = parts
        _check(num_steps, topk, num_draft_tokens, where=where)
        return cls(num_steps, topk, num_draft_tokens)


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check(num_steps: Any, topk: Any, num_draft_tokens: Any, where: str) -> None:
    """Raise `ConfigError` naming the first rule that the triplet breaks."""
    triplet = (num_steps, topk, num_draft_tokens)

    def refuse(expected: str, fix: str) -> ConfigError:
        return ConfigError(where=where, found=_shown(triplet), expected=expected, fix=fix)

    if any(type(value) is not int for value in triplet):
        raise refuse("three integers: num_steps, topk, num_draft_tokens", "write whole numbers, for example [3, 1, 4]")
    if triplet == (0, 1, 1):
        return
    if not 1 <= num_steps <= MAX_NUM_STEPS:
        raise refuse(
            f"num_steps from 1 to {MAX_NUM_STEPS}, or (0,1,1) for no speculation", "change num_steps, the first number"
        )
    if not 1 <= topk <= MAX_TOPK:
        raise refuse(f"topk from 1 to {MAX_TOPK}", "change topk, the second number")
    if topk == 1 and num_draft_tokens != num_steps + 1:
        raise refuse(
            f"num_draft_tokens = num_steps + 1 = {num_steps + 1} with topk 1, the root counted",
            "change num_draft_tokens, the third number",
        )
    least, most = num_steps + 1, min(MAX_NUM_DRAFT_TOKENS, max_nodes(num_steps, topk))
    if not least <= num_draft_tokens <= most:
        raise refuse(
            f"num_draft_tokens from {least} to {most} with num_steps {num_steps} and topk {topk}, the root counted",
            "change num_draft_tokens, the third number",
        )


NO_SPECULATION = TreeShape(0, 1, 1)


def envelope(shapes: Iterable[TreeShape]) -> TreeShape:
    """The shape whose every coordinate is the largest among `shapes`; legal whenever they are, but often none of them.

    Raises:
        ValueError: no shapes.
    """
    triplets = [shape.to_list() for shape in shapes]
    if not triplets:
        raise ValueError("envelope of no shapes")
    return TreeShape(*(max(column) for column in zip(*triplets, strict=True)))


@dataclass(frozen=True)
class ShapeRange:
    """The shapes between two ends, as a step function of t in [0, 1].

    Each coordinate is `low + (high - low) * t`, rounded half up on its own; then num_draft_tokens is cut to the nodes
    that a draft of this depth and width can offer: for a chain (topk 1) num_steps + 1. Any coordinate may rise or fall.
    Source: design of this project after the AdaptiveSpec paper (topk there is written with 1 - t, the same number).

    Args:
        low: the shape at t = 0.
        high: the shape at t = 1.

    Raises:
        ConfigError: an end is `NO_SPECULATION`. Where nothing is drafted nothing is accepted, so a policy that follows
            acceptance would never leave it.
    """

    low: TreeShape
    high: TreeShape

    def __post_init__(self) -> None:
        for name, shape in (("low", self.low), ("high", self.high)):
            if shape == NO_SPECULATION:
                raise ConfigError(
                    where=f"shape.range.{name}",
                    found=f"{shape}, no speculation",
                    expected="a shape that drafts at least one token",
                    fix="use for example [1, 1, 2]",
                )

    def at(self, t: float) -> TreeShape:
        """The shape at `t`; exact for every float, since `t` is looked up among exact breakpoints.

        Raises:
            ValueError: `t` is NaN or outside [0, 1].
        """
        if not 0.0 <= t <= 1.0:
            raise ValueError(f"position in a shape range: found {t!r}; expected a number from 0 to 1")
        starts, shapes = self._pieces
        return shapes[bisect_right(starts, t) - 1]

    def reachable(self) -> tuple[TreeShape, ...]:
        """Every shape that `at` returns for some float, each once, in order from low to high."""
        return self._pieces[1]

    @cached_property
    def _pieces(self) -> tuple[list[float], tuple[TreeShape, ...]]:
        """For each piece of the step function, the smallest float in it and its shape."""
        points = sorted({Fraction(0), Fraction(1), *self._breakpoints()})
        starts: list[float] = []
        shapes: list[TreeShape] = []

        def add(start: float, shape: TreeShape) -> None:
            if not shapes or shapes[-1] != shape:
                starts.append(start)
                shapes.append(shape)

        for index, point in enumerate(points):
            nearest = float(point)
            # A rising coordinate takes its new value at the breakpoint, a falling one just behind it. Where both have
            # the same breakpoint that one point has a shape of its own - if a float can hit it.
            if nearest == point:
                add(nearest, self._exactly_at(point))
            if index + 1 < len(points):
                behind = nearest if nearest > point else math.nextafter(nearest, math.inf)
                add(behind, self._exactly_at((point + points[index + 1]) / 2))
        return starts, tuple(shapes)

    def _breakpoints(self) -> set[Fraction]:
        """The t at which a coordinate is an integer plus a half."""
        found = set()
        for low, high in zip(self.low.to_list(), self.high.to_list(), strict=True):
            for whole in range(min(low, high), max(low, high)):
                found.add((whole + Fraction(1, 2) - low) / (high - low))
        return found

    def _exactly_at(self, t: Fraction) -> TreeShape:
        num_steps, topk, num_draft_tokens = (
            math.floor(low + (high - low) * t + Fraction(1, 2))
            for low, high in zip(self.low.to_list(), self.high.to_list(), strict=True)
        )
        # At least num_steps + 1 without help: both ends have it, and interpolation and rounding keep the order. It is also
        # the most that a chain offers.
        return TreeShape(num_steps, topk, min(num_draft_tokens, max_nodes(num_steps, topk)))


_PAPER = ShapeRange(low=TreeShape(3, 4, 4), high=TreeShape(7, 1, 8))

_SHORT = ShapeRange(low=TreeShape(1, 1, 2), high=TreeShape(4, 1, 5))

# Named ranges. "paper" is the published one, for accelerators, where verifying some more rows is nearly free; "short" was
# chosen by measurement on a CPU, where every row costs a tenth of a token (scripts/RESULTS.md).
PRESETS: dict[str, ShapeRange] = {"paper": _PAPER, "short": _SHORT}


def default_range(device: str) -> ShapeRange:
    """The range where the config names none. ``device``: as SGLang names it."""
    return PRESETS["short" if device == "cpu" else "paper"]


def preset(name: str, where: str = "shape.range") -> ShapeRange:
    """The named range.

    Raises:
        ConfigError: no such name; the message lists the valid ones.
    """
    if name not in PRESETS:
        raise ConfigError(
            where=where,
            found=_shown(name),
            expected=f"one of {', '.join(PRESETS)}",
            fix='name one of them, or give {"low": [..], "high": [..]}',
        )
    return PRESETS[name]
