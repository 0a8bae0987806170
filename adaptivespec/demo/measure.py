"""What was measured: answers, pairs of a decoder's answer with plain's, and what they add up to."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from statistics import median
from typing import Any, Self

from adaptivespec.demo.configurations import PLAIN

ALL_SETS = "all"
"""The name under which the pairs of every prompt set are pooled."""


@dataclass(frozen=True)
class Answer:
    """One greedy answer at batch size 1.

    Args:
        token_ids: the answer, the closing token included.
        text: the same, decoded.
        tokens_per_s: decode speed, (tokens - 1) / (end of the request - end of the prefill); None for an answer of one token.
        verify_steps: target forward passes after the prefill; 0 without speculation.
        accepted: draft tokens accepted in them, BONUS TOKENS LEFT OUT.
        shape_steps: verify steps by tree shape; empty but for ADAPTIVE.
    """

    token_ids: tuple[int, ...]
    text: str
    tokens_per_s: float | None
    verify_steps: int = 0
    accepted: int = 0
    shape_steps: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_response(cls, response: dict[str, Any]) -> Self:
        """The answer in a response of ``/generate`` from a server with ``--enable-metrics``. Raises KeyError for others."""
        meta = response["meta_info"]
        return cls(
            token_ids=tuple(response["output_ids"]),
            text=response["text"],
            tokens_per_s=meta["decode_throughput"] if meta["completion_tokens"] > 1 else None,
            verify_steps=meta.get("spec_verify_ct", 0),
            accepted=meta.get("spec_num_correct_drafts", 0),
            shape_steps=meta.get("spec_shape_histogram", {}),
        )


@dataclass(frozen=True)
class Pair:
    """The same prompt answered by `PLAIN` and by another decoder, one right after the other.

    Args:
        split_gap: where the answers differ, how far apart in log-probability plain's two best tokens are at the place
            where they part: near 0 for a tie that rounding decides.
    """

    configuration: str
    prompt_set: str
    prompt_index: int
    plain: Answer
    other: Answer
    split_gap: float | None = None

    @property
    def ratio(self) -> float | None:
        """Decode speed of the other decoder over plain's; None where one of the answers is of one token."""
        if self.plain.tokens_per_s is None or self.other.tokens_per_s is None:
            return None
        return self.other.tokens_per_s / self.plain.tokens_per_s

    @property
    def is_identical(self) -> bool:
        """Whether both answers are the same, token for token."""
        return self.plain.token_ids == self.other.token_ids

    @property
    def shared_len(self) -> int:
        """Tokens before the answers part; all of them where they are identical."""
        both = zip(self.plain.token_ids, self.other.token_ids, strict=False)
        return sum(1 for _ in takewhile(lambda tokens: tokens[0] == tokens[1], both))


@dataclass(frozen=True)
class Summary:
    """Some pairs of one decoder, added up.

    Args:
        num_pairs: pairs with a speed ratio.
        ratio, ratio_min, ratio_max: median, smallest and largest speed ratio to plain; None without pairs.
        tokens_per_s: median decode speed; None without pairs.
        accept_length: tokens per verify step, BONUS INCLUDED, over all steps; None without steps.
        num_identical, num_answers: answers equal to plain's token for token, and all answers.
        split_gap_max: largest `Pair.split_gap`; None where all are identical.
        shape_steps: verify steps by tree shape.
    """

    num_pairs: int
    ratio: float | None
    ratio_min: float | None
    ratio_max: float | None
    tokens_per_s: float | None
    accept_length: float | None
    num_identical: int
    num_answers: int
    split_gap_max: float | None
    shape_steps: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON types, floats rounded to three decimals."""
        return {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(self).items()}


def summarise(pairs: Sequence[Pair]) -> Summary:
    """Add up pairs; without any, every figure is None or 0."""
    ratios = [pair.ratio for pair in pairs if pair.ratio is not None]
    speeds = [pair.other.tokens_per_s for pair in pairs if pair.other.tokens_per_s is not None]
    steps = sum(pair.other.verify_steps for pair in pairs)
    shapes: Counter[str] = Counter()
    for pair in pairs:
        shapes.update(pair.other.shape_steps)
    return Summary(
        num_pairs=len(ratios),
        ratio=median(ratios) if ratios else None,
        ratio_min=min(ratios, default=None),
        ratio_max=max(ratios, default=None),
        tokens_per_s=median(speeds) if speeds else None,
        accept_length=1 + sum(pair.other.accepted for pair in pairs) / steps if steps else None,
        num_identical=sum(pair.is_identical for pair in pairs),
        num_answers=len(pairs),
        split_gap_max=max((pair.split_gap for pair in pairs if pair.split_gap is not None), default=None),
        shape_steps=dict(sorted(shapes.items())),
    )


@dataclass
class Measurements:
    """Everything that a run of the demo has found so far; a report can be made of it at any time.

    Args:
        configurations: names of the decoders to be measured against plain, in the order of the report.
        prompt_sets: names of the prompt sets.
        pairs: in the order of measuring.
        commands: launch command of each decoder started.
        notes: what a decoder's server says of itself, such as its tree shape.
        shape_trace: shape of each verify step of one generation by ADAPTIVE.
        problem: why the run ended early; "" where it did not.
        seconds: how long measuring took, server starts included.
    """

    configurations: list[str]
    prompt_sets: list[str]
    pairs: list[Pair] = field(default_factory=list)
    commands: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    shape_trace: list[str] = field(default_factory=list)
    problem: str = ""
    seconds: float = 0.0

    def of(self, configuration: str, prompt_set: str = ALL_SETS) -> list[Pair]:
        """The pairs of one decoder, of one prompt set or of all."""
        return [
            pair
            for pair in self.pairs
            if pair.configuration == configuration and prompt_set in (ALL_SETS, pair.prompt_set)
        ]

    def summaries(self) -> dict[str, dict[str, Summary]]:
        """Summary by decoder, then by prompt set and `ALL_SETS`; decoders without a pair are left out."""
        return {
            name: {prompt_set: summarise(self.of(name, prompt_set)) for prompt_set in (*self.prompt_sets, ALL_SETS)}
            for name in self.configurations
            if self.of(name)
        }

    def plain_tokens_per_s(self, prompt_set: str = ALL_SETS) -> float | None:
        """Median decode speed of the plain answers in all pairs of a set; None without any."""
        pairs = [pair for pair in self.pairs if prompt_set in (ALL_SETS, pair.prompt_set)]
        speeds = [pair.plain.tokens_per_s for pair in pairs if pair.plain.tokens_per_s is not None]
        return median(speeds) if speeds else None

    def headline(self) -> dict[str, Any]:
        """The figures of the demo's last line, as JSON types."""
        plain = {name: self.plain_tokens_per_s(name) for name in (*self.prompt_sets, ALL_SETS)}
        return {
            "complete": not self.problem,
            "problem": self.problem or None,
            "unit": "decode tokens/s and its ratio to plain, median of pairs; accept length with the bonus token",
            PLAIN.name: {name: speed and {"tokens_per_s": round(speed, 3)} for name, speed in plain.items()},
            **{
                name: {prompt_set: summary.to_dict() for prompt_set, summary in by_set.items()}
                for name, by_set in self.summaries().items()
            },
            "seconds": round(self.seconds, 1),
        }

    def to_dict(self) -> dict[str, Any]:
        """All of it, as JSON types: the raw data beside the report."""
        return asdict(self)


def new_shapes(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """The shapes counted between two readings of a server's ``steps_per_shape``, each as often as it was used."""
    return sorted((Counter(after) - Counter(before)).elements())
