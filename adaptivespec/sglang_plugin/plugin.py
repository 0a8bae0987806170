"""The entry point in ``sglang.srt.plugins``: what every SGLang process runs before anything else of ours."""

import functools
import sys
from types import TracebackType
from typing import Any

from adaptivespec.errors import AdaptiveSpecError


@functools.cache
def register() -> None:
    """Register the algorithm, its argument steps, the checks and details of requests, the CPU engine.

    Light and idempotent: SGLang calls it in each of its processes. Nothing is refused here, since SGLang swallows a
    plugin's exceptions; see `resolve`.
    """
    from adaptivespec.cpu_engine import install
    from adaptivespec.sglang_plugin import algorithm, report, request_checks, resolve

    install.register()
    algorithm.register()
    resolve.register()
    report.install_in_tokenizer()
    request_checks.register()
    sys.excepthook = functools.partial(_one_line, sys.excepthook)


def _one_line(previous: Any, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Our errors say all a user needs in one line; a traceback would only hide it."""
    if isinstance(error, AdaptiveSpecError):
        print(f"adaptivespec: {error}", file=sys.stderr)
    else:
        previous(kind, error, traceback)
