"""Whether the memory pays: acceptance with and without it, from the same traffic."""

import math
import random
from dataclasses import dataclass, field
from typing import Any

_WINDOW = 512  # checks
_MIN_STEPS = 64
# Standard errors; asked after every step, so that two or three would be passed by chance sooner or later.
_CONFIDENCE = 4.0


@dataclass
class Arm:
    """Accepted drafts of the steps on one side; older steps count less."""

    steps: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def fade(self, keep: float) -> None:
        """Let all steps so far count this much less."""
        self.steps, self.total, self.squares = self.steps * keep, self.total * keep, self.squares * keep

    def record(self, accepted: int) -> None:
        """Add one step."""
        self.steps, self.total, self.squares = self.steps + 1, self.total + accepted, self.squares + accepted**2

    @property
    def mean(self) -> float:
        """Accepted drafts a step; 0.0 before the first."""
        return self.total / self.steps if self.steps else 0.0

    @property
    def error(self) -> float:
        """Squared standard error of the mean."""
        variance = self.squares / self.steps - self.mean**2
        return max(variance, 0.0) / self.steps


@dataclass
class Benefit:
    """One tenant's memory: on until acceptance is surely better without it, off until it is surely better with it.

    Every `check_every`-th step of a request runs the other way, which is what tells. Requests count from places drawn
    here, so that both sides have steps from all parts of an answer, and other tenants' traffic moves none of them.

    Args:
        check_every: 0: no step does, and the memory stays on.
    """

    check_every: int
    is_on: bool = True
    with_memory: Arm = field(default_factory=Arm)
    without: Arm = field(default_factory=Arm)
    switches: int = 0
    _places: random.Random = field(default_factory=lambda: random.Random(0))

    def first_step(self) -> int:
        """The number that a new request counts its steps from."""
        return self._places.randrange(self.check_every) if self.check_every else 0

    def corrects(self, step: int) -> bool:
        """Whether the step of this number is to be corrected."""
        is_check = self.check_every and step % self.check_every == self.check_every - 1
        return self.is_on != bool(is_check)

    def record(self, was_corrected: bool, accepted: int) -> bool:
        """Add a step's accepted drafts; says whether that switched the memory on or off."""
        # Both fade at every step: they speak of the same traffic, also after it has changed.
        keep = 1 - 1 / (_WINDOW * max(self.check_every, 1))
        for arm in (self.with_memory, self.without):
            arm.fade(keep)
        (self.with_memory if was_corrected else self.without).record(accepted)
        if min(self.with_memory.steps, self.without.steps) < _MIN_STEPS:
            return False
        gain = self.with_memory.mean - self.without.mean
        doubt = _CONFIDENCE * math.sqrt(self.with_memory.error + self.without.error)
        if not (gain < -doubt if self.is_on else gain > doubt):
            return False
        self.is_on = not self.is_on
        self.switches += 1
        # What was measured decided; the next decision takes new steps.
        self.with_memory, self.without = Arm(), Arm()
        return True

    def to_dict(self) -> dict[str, Any]:
        """State and figures, as JSON types."""
        return {
            "is_on": self.is_on,
            "accepted_per_step_with": self.with_memory.mean,
            "accepted_per_step_without": self.without.mean,
            "steps_with": round(self.with_memory.steps),
            "steps_without": round(self.without.steps),
            "switches": self.switches,
        }
