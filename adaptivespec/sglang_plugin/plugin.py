"""The entry point in ``sglang.srt.plugins``: what every SGLang process runs before anything else of ours."""

import functools


@functools.cache
def register() -> None:
    """Register the algorithm, its argument steps, the checks and details of requests, the CPU engine.

    Light and idempotent: SGLang calls it in each of its processes. Nothing is refused here, since SGLang swallows a
    plugin's exceptions; see `resolve`.
    """
    from adaptivespec.cpu_engine import install
    from adaptivespec.sglang_plugin import algorithm, report, request_checks, resolve, start_errors

    install.register()
    algorithm.register()
    resolve.register()
    report.install_in_tokenizer()
    request_checks.register()
    start_errors.say_in_one_line()
