"""Errors of ours that end a start are said in one line: a traceback would only hide what the user needs."""

import functools
import sys
from types import TracebackType
from typing import Any

from adaptivespec.errors import AdaptiveSpecError
from cuda_graphs.errors import RegistryError


def say_in_one_line() -> None:
    """In the process of the launch command, where such an error is raised to the top. Once a process."""
    sys.excepthook = functools.partial(_print, sys.excepthook)


@functools.cache
def say_in_one_line_in_scheduler() -> None:
    """In the scheduler's process, where SGLang logs the traceback and ends the server. Idempotent a process."""
    from sglang.srt.managers import scheduler

    traceback_of_sglang = scheduler.get_exception_traceback

    @functools.wraps(traceback_of_sglang)
    def one_line_or_traceback() -> str:
        error = sys.exception()
        return _line(error) if _is_ours(error) else traceback_of_sglang()

    scheduler.get_exception_traceback = one_line_or_traceback


def _print(previous: Any, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if _is_ours(error):
        print(_line(error), file=sys.stderr)
    else:
        previous(kind, error, traceback)


def _is_ours(error: BaseException | None) -> bool:
    return isinstance(error, AdaptiveSpecError | RegistryError)


def _line(error: BaseException | None) -> str:
    return f"adaptivespec: {' '.join(str(error).split())}"
