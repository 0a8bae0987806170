"""One streamed answer as it is kept: what arrived when, and what the server says it took."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from adaptivespec.shapes import TreeShape


class Cell(NamedTuple):
    """What is measured at once: the requests of one batch to one decoder.

    Args:
        block: servers that were up together; each block has its own plain decoding.
        task: name of the prompt set.
        batch_size: requests that are sent at the same time.
        group: which `batch_size` prompts of the task, counted from 0.
        round: counted from 0.
        configuration: name of the decoder.
    """

    block: int
    task: str
    batch_size: int
    group: int
    round: int
    configuration: str

    @property
    def turn(self) -> tuple[Any, ...]:
        """What all decoders that took turns at the same prompts have in common."""
        return self[:-1]


@dataclass(frozen=True)
class Row:
    """One request of a cell, greedy.

    Args:
        cell: the cell.
        slot: place in the batch.
        sent: seconds since the cell began at which the request went out.
        arrivals: [seconds since the cell began, tokens so far] of each event of the stream.
        output_ids: the answer.
        hit_cap: whether the cap on its length ended it.
        verify_steps, accepted: as in `adaptivespec.metrics`; 0 without speculation.
        promoted: drafts accepted in place of the target's own token, returned ones.
        shape_steps: verify steps by tree shape; None where the server does not tell.
        shapes: tree shape of each verify step, in order; None where the server does not tell.
        split_gap: where the answer parts from plain's, how far apart in log-probability plain's two likeliest tokens are there: near
            0 for a tie that rounding decides; None where it does not, or plain was not asked.
    """

    cell: Cell
    slot: int
    sent: float
    arrivals: list[list[float]]
    output_ids: list[int]
    hit_cap: bool
    verify_steps: int = 0
    accepted: int = 0
    promoted: int = 0
    shape_steps: Mapping[str, int] | None = None
    shapes: list[str] | None = None
    split_gap: float | None = None

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Row":
        """The inverse of `to_dict`. Raises KeyError or TypeError for anything else."""
        cell = Cell(**{name: data.pop(name) for name in Cell._fields})
        return cls(cell=cell, **data)

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON types, flat."""
        fields = {name: value for name, value in vars(self).items() if name != "cell"}
        return {**self.cell._asdict(), **fields}

    @property
    def prompt(self) -> int:
        """Place of its prompt in the task."""
        return self.cell.group * self.cell.batch_size + self.slot

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.arrivals[0][0] - self.sent

    @property
    def end(self) -> float:
        """Seconds from the begin of the cell to the last token."""
        return self.arrivals[-1][0]

    @property
    def accept_length(self) -> float | None:
        """Output tokens over verify steps, as SpecForge and SGLang count; None without steps."""
        return len(self.output_ids) / self.verify_steps if self.verify_steps else None

    def tokens_at(self, seconds: float) -> int:
        """Tokens that had arrived so many seconds after the begin of the cell."""
        return max((int(tokens) for when, tokens in self.arrivals if when <= seconds), default=0)

    def inter_token(self) -> Iterator[float]:
        """Seconds a token: each gap between two events, once for each token that came with it and divided by their number."""
        for (before, had), (now, has) in zip(self.arrivals, self.arrivals[1:], strict=False):
            new = int(has - had)
            yield from [(now - before) / new] * new

    @property
    def draft_calls(self) -> int | None:
        """Draft forwards, num_steps in each verify step, the one in the draft-extend pass counted; None: not known."""
        if self.verify_steps == 0:
            return 0
        if self.shape_steps is None:
            return None
        return sum(TreeShape.parse(shape).num_steps * steps for shape, steps in self.shape_steps.items())

    def shared_len(self, other: "Row") -> int:
        """Tokens before two answers part."""
        both = zip(self.output_ids, other.output_ids, strict=False)
        return sum(1 for _ in takewhile(lambda tokens: tokens[0] == tokens[1], both))


def decode_speed(rows: list[Row]) -> float | None:
    """Tokens/s of a cell while nothing is prefilled: from the last of the answers' first events to the last token of all;
    None: no token came after that. What an answer had by then, it got while others waited for their prefill."""
    begin = max(row.arrivals[0][0] for row in rows)
    tokens = sum(len(row.output_ids) - row.tokens_at(begin) for row in rows)
    seconds = max(row.end for row in rows) - begin
    return tokens / seconds if tokens and seconds > 0 else None


def output_speed(rows: list[Row]) -> float:
    """Tokens/s of a cell from the first request's sending to the last token, prefill included."""
    return sum(len(row.output_ids) for row in rows) / (max(row.end for row in rows) - min(row.sent for row in rows))
