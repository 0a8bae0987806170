"""What a request may not ask of ADAPTIVE, said in the tokenizer's process, before the request reaches a batch.

SGLang answers a ValueError with status 400 and its text, on every route.
"""

import functools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from adaptivespec.config import AdaptiveConfig
from adaptivespec.errors import ConfigError
from adaptivespec.request_options import RequestOptions
from adaptivespec.sglang_plugin.report import refusals_counter
from adaptivespec.sglang_plugin.resolve import is_adaptive

_PROCESSOR = "custom_logit_processor"
_REASONS = {
    _PROCESSOR,
    "custom_params",
    *(f"{RequestOptions.SECTION}.{option.name}" for option in fields(RequestOptions)),
}


def register() -> None:
    """Hook SGLang's own checks of a request. Acts where ADAPTIVE serves."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.sampling.sampling_params.SamplingParams.verify", _check_options, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        _check_logit_processor,
        HookType.AFTER,
    )


def _counted(check: Callable[..., None]) -> Callable[..., None]:
    """Count what a check refuses on ``/metrics``, under the field that is at fault."""

    @functools.wraps(check)
    def counting(*args: Any, **kwargs: Any) -> None:
        try:
            check(*args, **kwargs)
        except ConfigError as error:
            from sglang.srt.runtime_context import get_observability

            if get_observability().enable_metrics:
                # A request may name any field: the unknown ones are counted together.
                refusals_counter().labels(error.where if error.where in _REASONS else RequestOptions.SECTION).inc()
            raise

    return counting


@_counted
def _check_options(result: None, self: Any, *_args: Any, **_kwargs: Any) -> None:
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    if not is_adaptive(spec):
        return
    options = RequestOptions.of(self)
    config = _config_of(spec.speculative_adaptive_config)
    if options.share and not (config.drift.enabled and config.drift.shared):
        raise ConfigError(
            where=f"{RequestOptions.SECTION}.share",
            found="true",
            expected="false: this server has no shared bank",
            fix="leave it out, or start the server with drift.enabled and drift.shared",
        )
    if options.kappa is not None and config.strict_only:
        raise ConfigError(
            where=f"{RequestOptions.SECTION}.kappa",
            found=f"{options.kappa:g}",
            expected="nothing: this server runs with strict_only",
            fix="leave it out",
        )


@_counted
def _check_logit_processor(result: None, self: Any, obj: Any, *_args: Any, **_kwargs: Any) -> None:
    from sglang.srt.runtime_context import get_spec

    if is_adaptive(get_spec()) and getattr(obj, "custom_logit_processor", None):
        raise ConfigError(
            where=_PROCESSOR,
            found="a processor",
            expected="none: SGLang's verification does not apply it to drafted positions",
            fix="leave it out, or ask a server without ADAPTIVE",
        )


@functools.cache
def _config_of(path: str | None) -> AdaptiveConfig:
    return AdaptiveConfig.from_json_file(path)
