"""What the measuring commands share: exit codes, an end on SIGTERM that takes the servers along, and argument types."""

import argparse
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from adaptivespec.errors import AdaptiveSpecError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does: servers lead groups of their own and would outlive it."""
    signal.signal(signal.SIGTERM, _interrupt)


def run_main(command: Callable[[], int]) -> int:
    """Run a script's main; an error that the user can act on ends it with its one line and `EXIT_FAILED`, Ctrl-C with
    `EXIT_INTERRUPTED`."""
    end_on_sigterm()
    try:
        return command()
    except (AdaptiveSpecError, OSError) as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def not_negative(text: str) -> int:
    """For argparse: a whole number of 0 or more."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"found {text}; expected a whole number of 0 or more")
    return value


def positive(text: str) -> int:
    """For argparse: a whole number of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"found {text}; expected a whole number of 1 or more")
    return value


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
