"""What ADAPTIVE does not run with, each with the reason: one table for server options, one for environment variables.

Checked at start, before any model is loaded. An entry is refused when its test says so of the resolved options.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adaptivespec.errors import RefusedError

SGLANG_VERSION = "0.5.23"


@dataclass(frozen=True)
class Refusal:
    """One refused option.

    Args:
        reason: slug for the refusal counter.
        option: SGLang's field; its value is shown as found.
        is_refused: test on the field's value and on all options.
        why: what stands in the way.
        fix: what to write instead.
    """

    reason: str
    option: str
    is_refused: Callable[[Any, Any], bool]
    why: str
    fix: str

    @property
    def flag(self) -> str:
        """The command-line spelling."""
        return "--" + self.option.replace("_", "-")


def _above_one(value: Any, _: Any) -> bool:
    return value is not None and value > 1


def _is_set(value: Any, _: Any) -> bool:
    return bool(value)


def _not_one(value: Any, _: Any) -> bool:
    return value != 1.0


_TREE_BACKENDS = ("flashinfer", "fa3", "fa4", "triton", "cpu_tree")
_PAGED_TREE_BACKENDS = ("flashinfer", "fa3", "triton")


def _backend_without_trees(value: Any, _: Any) -> bool:
    return value is not None and value not in _TREE_BACKENDS


def _paged_tree_without_backend(value: Any, options: Any) -> bool:
    return (
        _above_one(value, options)
        and (options.speculative_eagle_topk or 1) > 1
        and (options.attention_backend not in _PAGED_TREE_BACKENDS)
    )


_NO_TREES = "its kernels cannot verify draft trees"
_ONE_RANK = "the shape must be the same on every rank, which is not tested yet"
PREFILL_GRAPH = "a full prefill graph belongs to one attention backend, and each state has its own"
_POOL = "its memory pool is laid out for one draft width"

OPTIONS: tuple[Refusal, ...] = (
    Refusal("tp", "tp_size", _above_one, _ONE_RANK, "leave it at 1"),
    Refusal("pp", "pp_size", _above_one, "only the last stage hosts the draft", "leave it at 1"),
    Refusal("dp", "dp_size", _above_one, _ONE_RANK, "start one server for each replica behind a router"),
    Refusal(
        "dp_attention",
        "attn_dp_size",  # what --enable-dp-attention resolves to
        _above_one,
        "ranks would choose different shapes",
        "leave it at 1, and leave out --enable-dp-attention",
    ),
    Refusal("context_parallel", "attn_cp_size", _above_one, _ONE_RANK, "leave it at 1"),
    Refusal("context_parallel", "dcp_size", _above_one, _ONE_RANK, "leave it at 1"),
    Refusal(
        "disaggregation",
        "disaggregation_mode",
        lambda value, _: value not in (None, "null"),
        "the two sides agree on one draft width",
        "leave it out",
    ),
    Refusal(
        "two_batch_overlap", "enable_two_batch_overlap", _is_set, "two batches would need two shapes", "leave it out"
    ),
    Refusal("pdmux", "enable_pdmux", _is_set, "two batches would need two shapes", "leave it out"),
    Refusal("multi_layer_eagle", "enable_multi_layer_eagle", _is_set, "it has a worker of its own", "leave it out"),
    Refusal(
        "sglang_adaptive",
        "speculative_adaptive",
        _is_set,
        "SGLang's own controller would change the shape as well",
        "leave it out; --speculative-adaptive-config belongs to ADAPTIVE here",
    ),
    Refusal(
        "rejection_sampling",
        "speculative_use_rejection_sampling",
        _is_set,
        "ADAPTIVE draws tokens by seed and position instead",
        "leave it out",
    ),
    Refusal(
        "block_verification",
        "speculative_use_block_verification",
        _is_set,
        "ADAPTIVE draws tokens by seed and position instead",
        "leave it out",
    ),
    Refusal(
        "accept_threshold",
        "speculative_accept_threshold_single",
        _not_one,
        "ADAPTIVE verifies without thresholds",
        "leave it at 1.0",
    ),
    Refusal(
        "accept_threshold",
        "speculative_accept_threshold_acc",
        _not_one,
        "ADAPTIVE verifies without thresholds",
        "leave it at 1.0",
    ),
    Refusal(
        "mixed_chunk",
        "enable_mixed_chunk",
        _is_set,
        "penalties of requests that decode within a prefill would advance once a step",
        "leave it out",
    ),
    Refusal(
        "prefill_graph",
        "cuda_graph_backend_prefill",
        lambda value, _: value == "full",
        PREFILL_GRAPH,
        "leave it out",
    ),
    Refusal("watermark", "enable_watermark", _is_set, "SGLang has no watermark for this algorithm", "leave it out"),
    Refusal("lora", "enable_lora", _is_set, "the draft does not follow adapters", "leave it out"),
    Refusal("lora", "lora_paths", _is_set, "the draft does not follow adapters", "leave it out"),
    Refusal("hicache", "enable_hierarchical_cache", _is_set, _POOL, "leave it out"),
    Refusal("lmcache", "enable_lmcache", _is_set, _POOL, "leave it out"),
    Refusal("unified_memory", "enable_unified_memory", _is_set, _POOL, "leave it out"),
    Refusal("unified_memory", "enable_unified_cache_external_linker", _is_set, _POOL, "leave it out"),
    Refusal("page_major", "enable_page_major_kv_layout", _is_set, _POOL, "leave it out"),
    Refusal("hisparse", "enable_hisparse", _is_set, _POOL, "leave it out"),
    Refusal(
        "aux_hidden_state_capture", "aux_hidden_state_capture", _is_set, "it needs the name EAGLE3", "leave it out"
    ),
    Refusal(
        "attn_tp_input_scattered",
        "enable_attn_tp_input_scattered",
        _is_set,
        "the draft would read scattered hidden states",
        "leave it out",
    ),
    Refusal("dllm", "dllm_algorithm", _is_set, "diffusion models have no next-token draft", "leave it out"),
    Refusal("memory_saver", "enable_memory_saver", _is_set, "captured states cannot be paused", "leave it out"),
    Refusal(
        "attention_backend", "attention_backend", _backend_without_trees, _NO_TREES, "use fa3, flashinfer or triton"
    ),
    Refusal(
        "attention_backend",
        "decode_attention_backend",
        _backend_without_trees,
        _NO_TREES,
        "use fa3, flashinfer or triton",
    ),
    Refusal(
        "attention_backend",
        "prefill_attention_backend",  # which verifies, where the two differ
        _backend_without_trees,
        _NO_TREES,
        "use fa3, flashinfer or triton",
    ),
    Refusal(
        "attention_backend",
        "speculative_draft_attention_backend",
        _backend_without_trees,
        _NO_TREES,
        "use fa3, flashinfer or triton",
    ),
    Refusal(
        "paged_tree",
        "page_size",
        _paged_tree_without_backend,
        "trees on larger pages run on flashinfer, fa3 and triton only",
        "use --page-size 1, one of those backends, or a shape range of chains (topk 1)",
    ),
)

# SGLang's experimental switches that change the path this worker extends.
ENVIRONMENT: dict[str, str] = {
    "SGLANG_SIMULATE_ACC_LEN": "accepted lengths would be invented",
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "its metadata is captured for one shape",
    "SGLANG_ENABLE_METADATA_GLUE_GRAPH": "its metadata is captured for one shape",
    "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND": "the draft would go on from stale states",
    "SGLANG_RUST_SERVER": "its output path carries no per-request details",
}
_OFF = ("", "0", "-1", "false", "no", "off")


def check_options(options: Any) -> None:
    """Raise for the first refused option.

    Args:
        options: SGLang's resolved view of the server arguments.

    Raises:
        RefusedError: names option, value, reason and fix.
    """
    for refusal in OPTIONS:
        value = getattr(options, refusal.option)
        if refusal.is_refused(value, options):
            raise RefusedError(
                reason=refusal.reason,
                where=refusal.flag,
                found=repr(value),
                expected=f"ADAPTIVE without it, since {refusal.why}",
                fix=refusal.fix,
            )


def check_environment(environment: Any = os.environ) -> None:
    """Raise for the first refused environment variable.

    Raises:
        RefusedError: names variable, value, reason and fix.
    """
    for name, why in ENVIRONMENT.items():
        value = environment.get(name, "")
        if value.lower() not in _OFF:
            raise RefusedError(
                reason=name.lower(),
                where=name,
                found=repr(value),
                expected=f"ADAPTIVE without it, since {why}",
                fix=f"unset {name}",
            )


def check_device(device: str) -> None:
    """Raise unless ADAPTIVE runs on this kind of device.

    Raises:
        RefusedError: neither CPU nor NVIDIA GPU.
    """
    import torch

    if device not in ("cpu", "cuda") or torch.version.hip is not None:
        raise RefusedError(
            reason="device",
            where="--device",
            found=f"{device!r}" + (" (HIP)" if torch.version.hip is not None else ""),
            expected="'cuda' on an NVIDIA GPU, or 'cpu'",
            fix="run EAGLE3 on this device",
        )


def check_target(model_config: Any) -> None:
    """Raise unless the target is a plain attention model.

    Raises:
        RefusedError: MLA, linear or mamba layers, or sliding windows that alternate with full attention.
    """
    found = None
    if model_config.attention_arch.name != "MHA":
        found = f"{model_config.attention_arch.name} attention"
    elif model_config.linear_attn_registry_result is not None:
        found = "linear attention or mamba layers"
    elif model_config.is_hybrid_swa:
        found = "sliding-window layers between full ones"
    if found:
        raise RefusedError(
            reason="target",
            where="--model-path",
            found=found,
            expected="multi-head or grouped-query attention in every layer: other caches are laid out for one draft width",
            fix="run EAGLE3 with this target",
        )
