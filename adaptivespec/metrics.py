"""What speculation did, counted: per request and per server.

Proposed counts what really was proposed, summed step by step: `shape.num_drafts`, the root not counted. Accepted never
counts the bonus token; an accept length always does.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from adaptivespec.shapes import TreeShape


class Promotion(NamedTuple):
    """A drafted token that stands in for the target's own: its place in the output, and both their probabilities."""

    position: int
    prob: float
    top1_prob: float


class Step(NamedTuple):
    """One verify step: its shape, the accepted drafts, bonus token not counted, and the draft's probability of its likeliest
    token at the root of the tree."""

    shape: TreeShape
    accepted: int
    top1_prob: float


@dataclass
class RequestCounts:
    """What SGLang does not count of one request.

    Args:
        kappa: least ratio that the request has been verified with, which an operator may change; None where it is strict.
        steps_per_shape: verify steps at each shape.
        promoted: accepted drafts that stand in for the target's own token, returned ones.
        promoted_cut: the same, cut off by a stop or the length cap and never returned.
        promotions: the returned ones in order; None where the request does not ask for them.
        root_prob: the draft's probability of its likeliest token at the root of the next tree.
        steps: all steps in order; None where the request does not ask for them.
    """

    kappa: float | None = None
    steps_per_shape: Counter[TreeShape] = field(default_factory=Counter)
    promoted: int = 0
    promoted_cut: int = 0
    promotions: list[Promotion] | None = None
    root_prob: float = 0.0
    steps: list[Step] | None = None

    @classmethod
    def of(cls, kappa: float | None, *, details: bool) -> Self:
        """Of a new request, which asks for lists of steps and promotions or not."""
        return cls(kappa, promotions=[] if details else None, steps=[] if details else None)

    def record(self, shape: TreeShape, num_accepted: int) -> None:
        """Count one step.

        Args:
            shape: the shape that produced the result.
            num_accepted: accepted draft tokens, 0 to shape.num_steps, the bonus token not counted.
        """
        self.steps_per_shape[shape] += 1
        if self.steps is not None:
            self.steps.append(Step(shape, num_accepted, self.root_prob))

    def record_promotions(self, promotions: Iterable[Promotion], num_returned: int, kappa: float) -> None:
        """Count the promotions of one step.

        Args:
            promotions: what was promoted.
            num_returned: length that the output may reach at most; what lies beyond it was cut off.
            kappa: that the step was verified with.
        """
        self.kappa = kappa if self.kappa is None else min(self.kappa, kappa)
        for promotion in promotions:
            if promotion.position >= num_returned:
                self.promoted_cut += 1
                continue
            self.promoted += 1
            if self.promotions is not None:
                self.promotions.append(promotion)

    def to_meta(self) -> dict[str, Any]:
        """The entries that a response's `meta_info` has beside SGLang's own.

        `spec_margin` is there where a margin was set: `promotions` holds `[position in the output, p(token), p(top1)]` where
        it was asked for. `spec_steps`, too, is there where it was: `[shape, accepted drafts, p(top1) of the draft]`.
        """
        meta: dict[str, Any] = {
            "spec_shape_histogram": {str(shape): self.steps_per_shape[shape] for shape in sorted(self.steps_per_shape)}
        }
        if self.kappa is not None:
            meta["spec_margin"] = {
                "kappa": self.kappa,
                "num_promoted": self.promoted,
                "num_promoted_cut": self.promoted_cut,
            }
            if self.promotions is not None:
                meta["spec_margin"]["promotions"] = [list(promotion) for promotion in self.promotions]
        if self.steps is not None:
            meta["spec_steps"] = [[str(step.shape), *step[1:]] for step in self.steps]
        return meta


@dataclass
class ServerCounts:
    """The steps of all requests of one scheduler.

    Args:
        verify_steps: summed over requests, steps without speculation included: a batch of 8 adds 8.
        proposed: draft tokens offered to the target.
        accepted: draft tokens accepted, bonus tokens not counted.
        steps_per_shape: batch steps at each shape; a batch of 8 adds 1.
        shape_switches: batch steps whose shape was not that of the batch step before.
        breaker_trips, breaker_recoveries: copied from the policy's counts.
        promoted, promoted_cut: as in `RequestCounts`.
        refusals: refused run-time settings by reason; a refused start ends the process and a refused request never
            reaches the scheduler.
    """

    verify_steps: int = 0
    proposed: int = 0
    accepted: int = 0
    steps_per_shape: Counter[TreeShape] = field(default_factory=Counter)
    shape_switches: int = 0
    breaker_trips: int = 0
    breaker_recoveries: int = 0
    promoted: int = 0
    promoted_cut: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    _last_shape: TreeShape | None = field(default=None, repr=False, compare=False)

    @property
    def accept_rate(self) -> float:
        """Accepted / proposed, in [0, 1]; 0.0 where nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else 0.0

    @property
    def accept_length(self) -> float:
        """Mean tokens per step, BONUS TOKEN INCLUDED, so 1.0 where no draft is accepted; 0.0 before the first step."""
        return (self.accepted + self.verify_steps) / self.verify_steps if self.verify_steps else 0.0

    def record_step(self, shape: TreeShape, accepted_per_request: Iterable[int]) -> None:
        """Count one step of a batch; a batch without requests is not counted.

        Args:
            shape: the shape that produced the results.
            accepted_per_request: accepted draft tokens of each request, bonus tokens not counted.
        """
        accepted = list(accepted_per_request)
        if not accepted:
            return
        self.verify_steps += len(accepted)
        self.proposed += shape.num_drafts * len(accepted)
        self.accepted += sum(accepted)
        self.steps_per_shape[shape] += 1
        self.shape_switches += self._last_shape is not None and shape != self._last_shape
        self._last_shape = shape

    def to_dict(self) -> dict[str, Any]:
        """The counters and what follows from them, as JSON types."""
        plain = ("verify_steps", "proposed", "accepted", "accept_rate", "accept_length", "shape_switches")
        events = ("breaker_trips", "breaker_recoveries", "promoted", "promoted_cut")
        tokens = self.accepted + self.verify_steps
        return {
            **{name: getattr(self, name) for name in plain + events},
            "promoted_per_1000_tokens": 1000 * (self.promoted + self.promoted_cut) / tokens if tokens else 0.0,
            "steps_per_shape": {str(shape): steps for shape, steps in sorted(self.steps_per_shape.items())},
            "refusals": dict(self.refusals),
        }

    def record_refusal(self, reason: str) -> None:
        """Count one refusal under the reason of its `RefusedError`."""
        self.refusals[reason] += 1
