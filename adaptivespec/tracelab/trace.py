"""A trace: what each shape would have accepted at every token of some answers, and what a step of it costs. One file.

Strict verification commits the target's own tokens, and the draft's states depend on the committed tokens alone. So what a
shape accepts is a function of the prompt, the answer and the place of the root in it, whatever ran before: that is what a
trace holds. A chain accepts what a longer one does, up to its own length, so the longest stands for all; trees of
different sizes are not nested in SGLang, and each is recorded itself.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptivespec.errors import AdaptiveSpecError
from adaptivespec.reports import write_whole
from adaptivespec.shapes import TreeShape

FORMAT = "adaptivespec trace"
VERSION = 2


class TraceError(AdaptiveSpecError, ValueError):
    """A trace file that is none, or that lacks what is asked of it."""


@dataclass(frozen=True)
class TracedAnswer:
    """One answer of ``A`` tokens; every token but the last is the root of a tree.

    Args:
        prompt_set: name of the set that its prompt is from.
        prompt: place of the prompt in the set.
        token_ids: the answer.
        top1_probs: ``[A - 1]`` the draft's probability of its likeliest token at each root.
        accepted: by shape, ``[A - 1]`` drafts that are accepted at each root, also past the end of the answer; the bonus
            token is not counted.
        live: by shape, accepted drafts of each step when the server was pinned to it; None where it gave another answer,
            as near ties can.
        num_strayed: requests of the recording that went on with another token than the answer.
    """

    prompt_set: str
    prompt: int
    token_ids: list[int]
    top1_probs: list[float]
    accepted: Mapping[TreeShape, list[int]]
    live: Mapping[TreeShape, list[int] | None]
    num_strayed: int = 0

    @property
    def num_roots(self) -> int:
        """Places where a step may begin, A - 1, which is also the number of tokens that steps give."""
        return len(self.token_ids) - 1

    def accepted_at(self, shape: TreeShape, root: int) -> int:
        """Drafts that a tree of this shape has accepted at a root. Raises KeyError where the trace does not know."""
        if shape in self.accepted:
            return self.accepted[shape][root]
        source = covering(self.accepted, shape)
        if source is None:
            raise KeyError(str(shape))
        return min(self.accepted[source][root], shape.num_steps)


def covering(recorded: Iterable[TreeShape], shape: TreeShape) -> TreeShape | None:
    """The recorded shape that tells what a shape accepts: itself, or, of a chain, the longest; None where there is none."""
    known = set(recorded)
    longer = [other for other in known if other.topk == shape.topk == 1 and other.num_steps >= shape.num_steps]
    return shape if shape in known else max(longer, default=None)


def shapes_to_record(shapes: Iterable[TreeShape]) -> list[TreeShape]:
    """Those of the shapes that tell about all of them: every tree, and the longest chain."""
    wanted = list(dict.fromkeys(shapes))
    return [shape for shape in wanted if covering([other for other in wanted if other != shape], shape) is None]


@dataclass(frozen=True)
class Trace:
    """What was recorded, complete: every shape with a cost is recorded in every answer, or is a chain below a recorded one.

    Args:
        settings: what was served and asked, see `adaptivespec.bench.plan.Plan.settings`.
        sessions: provenance of the processes that recorded.
        device: as SGLang names it.
        lag: steps by which a result reaches the policy late: 1 where SGLang overlaps scheduling with the forward pass, else 0.
        plain_ms: milliseconds of a token of plain decoding, median of the even rounds, counted from 0.
        step_ms: by shape, milliseconds of a verify step, median of the even rounds.
        live: by prompt set and shape, decode speed over plain's that a server pinned to the shape had, median of the odd rounds;
            empty after a single round.
        answers: of each prompt.
    """

    settings: dict[str, Any]
    sessions: list[dict[str, str]]
    device: str
    lag: int
    plain_ms: float
    step_ms: Mapping[TreeShape, float]
    live: Mapping[str, Mapping[TreeShape, float]]
    answers: list[TracedAnswer]

    def __post_init__(self) -> None:
        if not self.answers or not self.step_ms:
            raise _broken("no answers or no costs")
        if not all(cost > 0 for cost in (self.plain_ms, *self.step_ms.values())):
            raise _broken("a cost that is not positive")
        for answer in self.answers:
            _check(answer, self.step_ms)

    @property
    def prompt_sets(self) -> list[str]:
        """Names of the sets, in their order."""
        return list(dict.fromkeys(answer.prompt_set for answer in self.answers))

    def require(self, shapes: Iterable[TreeShape], who: str) -> None:
        """Refuse what cannot be replayed.

        Raises:
            TraceError: some of the shapes are not in the trace; names them.
        """
        missing = [shape for shape in shapes if shape not in self.step_ms]
        if missing:
            raise TraceError(
                where=who,
                found=f"a trace without {' '.join(map(str, missing))}",
                expected=f"every shape that it may choose; the trace has {' '.join(map(str, self.step_ms))}",
                fix="record them with --shapes or --range, or replay another range",
            )

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        data = {"format": FORMAT, "version": VERSION, **vars(self)}
        data |= {"step_ms": _by_text(self.step_ms), "live": {name: _by_text(by) for name, by in self.live.items()}}
        data["answers"] = [
            {**vars(answer), "accepted": _by_text(answer.accepted), "live": _by_text(answer.live)}
            for answer in self.answers
        ]
        write_whole(path, json.dumps(data).encode())

    @classmethod
    def load(cls, path: Path) -> "Trace":
        """The trace in a file.

        Raises:
            TraceError: it cannot be read, is no trace, is of another version, or does not add up.
        """
        try:
            data = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            found = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise _broken(found, str(path)) from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise _broken("another kind of file", str(path))
        if (version := data.pop("version", None)) != VERSION:
            raise _broken(f"version {version!r}", str(path))
        try:
            data["step_ms"] = _by_shape(data["step_ms"])
            data["live"] = {name: _by_shape(by) for name, by in data["live"].items()}
            data["answers"] = [
                TracedAnswer(**{**each, "accepted": _by_shape(each["accepted"]), "live": _by_shape(each["live"])})
                for each in data["answers"]
            ]
            return cls(**data)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise _broken(f"what is no whole trace ({error})", str(path)) from error


def _check(answer: TracedAnswer, shapes: Iterable[TreeShape]) -> None:
    """Raise `TraceError` where an answer lacks something or holds what no server says."""
    name = f"answer {answer.prompt} of {answer.prompt_set}"
    if answer.num_roots < 1:
        raise _broken(f"{name} of {len(answer.token_ids)} tokens, which takes no step")
    columns: list[list[Any]] = [answer.top1_probs, *answer.accepted.values()]
    if any(len(column) != answer.num_roots for column in columns):
        raise _broken(f"{name} with columns of other lengths than its {answer.num_roots} roots")
    for shape, counts in answer.accepted.items():
        if not all(0 <= count <= shape.num_steps for count in counts):
            raise _broken(f"{name} with a step of {shape} that accepts more than it drafts, or less than nothing")
    unknown = [str(shape) for shape in shapes if covering(answer.accepted, shape) is None]
    if unknown:
        raise _broken(f"{name} without {' '.join(unknown)}")


def _broken(found: str, where: str = "trace") -> TraceError:
    return TraceError(
        where=where,
        found=found,
        expected=f"a whole trace of version {VERSION}",
        fix="give the trace.json that `scripts/replay.py record` wrote, or record it anew",
    )


def _by_text(values: Mapping[TreeShape, Any]) -> dict[str, Any]:
    return {str(shape): value for shape, value in values.items()}


def _by_shape(values: Mapping[str, Any]) -> dict[TreeShape, Any]:
    return {TreeShape.parse(text): value for text, value in values.items()}
