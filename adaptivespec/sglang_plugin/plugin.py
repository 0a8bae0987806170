"""The entry point in ``sglang.srt.plugins``: what every SGLang process runs before anything else of ours."""


def register() -> None:
    """Register the CPU engine. Light and idempotent: SGLang calls it in each of its processes.

    Nothing is refused here, since SGLang swallows a plugin's exceptions; see `resolve`.
    """
    from adaptivespec.cpu_engine.install import register as register_cpu_engine

    register_cpu_engine()
