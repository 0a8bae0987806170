"""Where something that takes long tells what it does."""

from typing import Protocol


class Progress(Protocol):
    """A bar with lines above it, or only the lines."""

    def say(self, text: str) -> None:
        """A line that stays."""

    def doing(self, text: str) -> None:
        """What goes on from now."""

    def advance(self) -> None:
        """One more piece of the work is done."""
