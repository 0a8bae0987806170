"""Makes SGLang use this engine: registers the attention backend, its draft form and the half-precision products.

`register` is light and runs in every SGLang process; `patch_model_modules` runs once, in the process that builds a
model, when the first attention backend is made.
"""

import functools
import logging
from typing import TYPE_CHECKING, Any

from adaptivespec.cpu_engine.activate import is_standin_active
from adaptivespec.sglang_plugin import contract
from adaptivespec.sglang_plugin.start_errors import say_in_one_line_in_scheduler
from adaptivespec.sglang_plugin.weight_updates import after_weight_updates

if TYPE_CHECKING:
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

BACKEND_NAME = "cpu_tree"


def register() -> None:
    """Add ``--attention-backend cpu_tree`` and make it the default of the CPU engine. Idempotent a process.

    Does nothing where the stand-in ``sgl_kernel`` is not in use.
    """
    if not is_standin_active():
        return
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    add_attention_backend_choices([BACKEND_NAME])
    register_attention_backend(BACKEND_NAME)(_make_backend)

    @register_resolution_hook("handle_cpu_backends")
    def _default_backend(server_args: Any, previous: Any) -> None:
        view = resolving_view(server_args)
        if view.device == "cpu" and view.attention_backend is None:
            declare_resolution(server_args, "adaptivespec", attention_backend=BACKEND_NAME)
            logger.info("attention_backend: None -> %s (the CPU engine's own, which knows draft trees)", BACKEND_NAME)
        previous(server_args)


def _make_backend(model_runner: "ModelRunner") -> Any:
    from adaptivespec.cpu_engine.attention import CpuTreeBackend
    from adaptivespec.cpu_engine.layers import lighten

    patch_model_modules()
    lighten(model_runner.model, _is_single_rank())
    return CpuTreeBackend(model_runner)


@functools.cache
def patch_model_modules() -> None:
    """Wrap the few SGLang functions that this engine extends. Once a process.

    Raises:
        RefusedError: one of them is not what this engine was written against.
    """
    say_in_one_line_in_scheduler()
    contract.check(contract.CPU_ENGINE)
    from sglang.srt.layers.layer_boundary.construction import StagePlan
    from sglang.srt.layers.layer_boundary.contracts import BatchVariant
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    if _is_single_rank():
        # Four times a layer SGLang asks how the batch's rows lie on the ranks; on one rank there is one answer.
        StagePlan.variant_for = lambda self, forward_batch: BatchVariant.ORDINARY
    _wrap(DraftBackendFactory, "_create_backend", _with_cpu_tree)

    from adaptivespec.cpu_engine import half_linear

    if half_linear.is_available():
        from sglang.srt.layers.logits_processor import LogitsProcessor
        from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

        _wrap(UnquantizedLinearMethod, "apply", _linear)
        _wrap(LogitsProcessor, "_compute_lm_head", _lm_head)
        after_weight_updates(half_linear.invalidate)
        logger.info("half-precision layers are multiplied by FBGEMM, 2 more bytes a weight")


def _is_single_rank() -> bool:
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().tp_size == 1)


def _wrap(owner: type, name: str, wrapper: Any) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(self, original, *args, **kwargs)

    setattr(owner, name, wrapped)


def _with_cpu_tree(
    self: Any, original: Any, backend_name: str, backend_map: dict, error_template: str, stamps_children: bool = False
) -> Any:
    from adaptivespec.cpu_engine.attention import CpuTreeBackend, CpuTreeMultiStepDraftBackend
    from adaptivespec.cpu_engine.layers import lighten

    def make() -> tuple[str, Any]:
        runner = self.draft_model_runner
        lighten(runner.model, _is_single_rank())
        if stamps_children:
            return BACKEND_NAME, CpuTreeMultiStepDraftBackend(runner, self.topk, self.speculative_num_steps)
        return BACKEND_NAME, CpuTreeBackend(runner)

    return original(self, backend_name, {**backend_map, BACKEND_NAME: make}, error_template, stamps_children)


def _linear(
    self: Any, original: Any, layer: Any, x: "torch.Tensor", bias: "torch.Tensor | None" = None
) -> "torch.Tensor":
    from adaptivespec.cpu_engine import half_linear

    out = half_linear.linear(x, layer.weight, bias) if half_linear.is_faster(x) else None
    return original(self, layer, x, bias) if out is None else out


def _lm_head(
    self: Any, original: Any, hidden_states: "torch.Tensor", lm_head: Any, embedding_bias: Any = None, **kwargs: Any
) -> "torch.Tensor":
    from adaptivespec.cpu_engine import half_linear

    is_plain = not self.use_fp32_lm_head and embedding_bias is None and hasattr(lm_head, "weight")
    if is_plain and half_linear.is_faster(hidden_states):
        out = half_linear.linear(hidden_states, lm_head.weight, None)
        if out is not None:
            return out
    return original(self, hidden_states, lm_head, embedding_bias, **kwargs)
