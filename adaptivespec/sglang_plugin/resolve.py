"""Server arguments of ADAPTIVE: checks, refusals, and the envelope of all shapes, at SGLang's own resolution steps.

Two steps are wrapped. Before anything is decided, the shapes are known and their envelope is declared as the three
speculative fields, because SGLang chooses attention backends and sizes memory by them. In the speculative step the
algorithm is called EAGLE3 for the moment, so that all of EAGLE3's defaults and checks apply.
"""

import importlib.metadata
import logging
from dataclasses import dataclass
from typing import Any

from adaptivespec.config import AdaptiveConfig, resolve_start, selectable_shapes
from adaptivespec.errors import ConfigError, RefusedError
from adaptivespec.sglang_plugin import contract, refusals
from adaptivespec.sglang_plugin.draft_check import check_draft
from adaptivespec.sglang_plugin.drift_check import check_memory
from adaptivespec.shapes import TreeShape, envelope

logger = logging.getLogger(__name__)

NAME = "ADAPTIVE"
_SOURCE = "adaptivespec"
_SHAPE_FLAGS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


@dataclass(frozen=True)
class Settings:
    """What ADAPTIVE runs with: the config, the start shape, every selectable shape and their envelope."""

    config: AdaptiveConfig
    start: TreeShape
    shapes: tuple[TreeShape, ...]
    envelope: TreeShape


def effective_settings(config_path: str | None, raw_flags: Any, device: str) -> Settings:
    """The settings that a config file and the user's three shape flags give.

    Args:
        config_path: ``--speculative-adaptive-config``, or None.
        raw_flags: SGLang's raw server arguments, whose shape fields still are what the user wrote.
        device: that SGLang runs on.

    Raises:
        ConfigError: a bad config file, or shape flags that are partial, illegal or contradict the config.
    """
    config = AdaptiveConfig.from_json_file(config_path).on(device)
    start = resolve_start(config, _flags_shape(raw_flags))
    shapes = selectable_shapes(config, start)
    return Settings(config, start, shapes, envelope(shapes))


def register() -> None:
    """Wrap the two resolution steps. Once a process; they act on ADAPTIVE only."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_missing_default_values")(_declare_envelope)
    register_resolution_hook("handle_speculative_decoding")(_resolve_as_eagle3)


def _declare_envelope(server_args: Any, previous: Any) -> None:
    previous(server_args)
    view = _view(server_args)
    if not is_adaptive(view):
        return
    _check_version()
    contract.check()
    refusals.check_environment()
    refusals.check_device(view.device)
    settings = effective_settings(view.speculative_adaptive_config, server_args, view.device)
    declared = dict(zip(_SHAPE_FLAGS, settings.envelope.to_list(), strict=True))
    _declare(server_args, **declared)
    logger.info(
        "ADAPTIVE: policy %s, start shape %s, shapes %s; memory is sized for their envelope %s",
        settings.config.policy,
        settings.start,
        " ".join(map(str, settings.shapes)),
        settings.envelope,
    )


def _resolve_as_eagle3(server_args: Any, previous: Any) -> None:
    view = _view(server_args)
    if not is_adaptive(view):
        previous(server_args)
        return
    if view.speculative_draft_model_path is None:
        raise RefusedError(
            reason="draft",
            where="--speculative-draft-model-path",
            found="nothing",
            expected="an EAGLE-3 draft of the target",
            fix="give its folder or hub name",
        )
    refusals.check_options(view)
    # SGLang leaves a hook out, saying nothing, where its function is not there.
    contract.check(contract.TOKENIZER)
    from sglang.srt.arg_groups.overrides import model_config_of

    model_config = model_config_of(server_args)
    refusals.check_target(model_config)
    draft, revision = view.speculative_draft_model_path, view.speculative_draft_model_revision
    check_draft(draft, model_config.hidden_size, model_config.vocab_size, revision, view.download_dir)
    config = AdaptiveConfig.from_json_file(view.speculative_adaptive_config)
    check_memory(config.drift, draft)
    _declare(server_args, speculative_algorithm="EAGLE3")
    previous(server_args)
    _declare(server_args, speculative_algorithm=NAME)
    refusals.check_options(_view(server_args))  # once more, on what the step decided


def _flags_shape(raw_flags: Any) -> TreeShape | None:
    values = {name: getattr(raw_flags, name) for name in _SHAPE_FLAGS}
    given = {name: value for name, value in values.items() if value is not None}
    if not given:
        return None
    if len(given) < len(values):
        raise ConfigError(
            where="start shape",
            found=", ".join(f"--{name.replace('_', '-')} {value}" for name, value in given.items()),
            expected="all three shape flags or none: num_steps, eagle_topk and num_draft_tokens (the root counted)",
            fix="add --" + ", --".join(name.replace("_", "-") for name in values if name not in given),
        )
    return TreeShape.parse(list(values.values()), where="the server's three shape flags")


def _check_version() -> None:
    version = importlib.metadata.version("sglang")
    if version != refusals.SGLANG_VERSION:
        raise RefusedError(
            reason="sglang_version",
            where="sglang",
            found=version,
            expected=refusals.SGLANG_VERSION,
            fix=f"pip install sglang=={refusals.SGLANG_VERSION}",
        )


def is_adaptive(view: Any) -> bool:
    """Whether a view of the server arguments, or SGLang's speculative configuration, names ADAPTIVE."""
    return (view.speculative_algorithm or "").upper() == NAME


def _view(server_args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def _declare(server_args: Any, **fields: Any) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(server_args, _SOURCE, **fields)
