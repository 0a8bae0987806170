"""What has to follow when SGLang updates weights that are being served."""

import functools
from collections.abc import Callable
from typing import Any

from adaptivespec.sglang_plugin.contract import WEIGHT_UPDATES


def after_weight_updates(then: Callable[[], None]) -> None:
    """Call `then` after every update of any model's weights in this process, whatever its outcome."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    for name in WEIGHT_UPDATES:
        setattr(WeightUpdater, name, _followed(getattr(WeightUpdater, name), then))


def _followed(sglangs: Callable[..., Any], then: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(sglangs)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return sglangs(*args, **kwargs)
        finally:
            then()

    return wrapped
