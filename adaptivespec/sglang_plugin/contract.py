"""Every SGLang internal that this project touches: path, expected signature, why. Checked at start.

All of it is private to SGLang, so the pin on 0.5.23 is strict, and a mismatch - a patched SGLang, another plugin that
replaced a function - refuses at start and names what differs, instead of failing somewhere in the middle of a batch.
"""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from adaptivespec.errors import RefusedError


@dataclass(frozen=True)
class Touch:
    """One name in SGLang.

    Args:
        path: ``module:attribute.path`` below ``sglang.``.
        parameters: parameter names in order, ``self`` left out; None where only existence counts.
        how: what is done with it: subclass, call, read, wrap (replaced by a function that calls it), bind (replaced).
        why: what for.
    """

    path: str
    parameters: str | None
    how: str
    why: str


def _names(module: str, names: str, why: str) -> tuple[Touch, ...]:
    """Names of one module that are only read or called as its own code does."""
    return tuple(Touch(f"{module}:{name}", None, "call", why) for name in names.split())


# Looked at in every process at start: light modules only.
LIGHT: tuple[Touch, ...] = (
    *_names("srt.plugins.hook_registry", "HookRegistry HookType", "hooks in the tokenizer's process"),
    *_names("srt.runtime_context", "get_spec get_observability", "SGLang's configuration"),
    Touch("srt.arg_groups.overrides:model_config_of", None, "call", "the target's sizes"),
    Touch("srt.arg_groups.resolution_hooks:register_resolution_hook", "name", "call", "argument steps"),
    Touch("srt.arg_groups.overrides:declare_resolution", "server_args source fields", "call", "declare arguments"),
    Touch("srt.arg_groups.overrides:resolving_view", None, "call", "read arguments while they are being resolved"),
    Touch("srt.arg_groups.choices:add_attention_backend_choices", None, "call", "attention backend of the CPU engine"),
    Touch("srt.speculative.spec_info:SpeculativeAlgorithm.register", None, "call", "the algorithm's name"),
    Touch("srt.speculative.spec_registry:CustomSpecAlgo", None, "subclass", "the algorithm object"),
)

_EAGLE_SAMPLE = "verify_input batch logits_output grammar_mask uno_target_max_top_k watermark_state watermark_full_mask"
_WALK = (
    "predicts accept_index accept_token_num candidates retrieve_index retrieve_next_token retrieve_next_sibling "
    "target_predict topk"
)
_LM_HEAD = "hidden_states lm_head embedding_bias out"
_EXTEND_PREFILL = "batch target_hidden_states next_token_ids mm_input_embeds kv_loc_plan"

# Of `WeightUpdater`, by name: what changes weights that are being served.
WEIGHT_UPDATES = {
    "update_weights_from_disk": "model_path load_format weight_name_filter recapture_cuda_graph",
    "load_weights_from_distributed": "named_tensors",
    "update_weights_from_tensor": "named_tensors load_format",
    "update_weights_from_ipc": "recv_req",
}
_NEW_WEIGHTS = tuple(
    Touch(
        f"srt.model_executor.model_runner_components.weight_updater:WeightUpdater.{name}",
        parameters,
        "wrap",
        "new weights empty the memory, and what the CPU engine made of the old ones",
    )
    for name, parameters in WEIGHT_UPDATES.items()
)

_ONE_LINE = Touch("srt.managers.scheduler:get_exception_traceback", "", "wrap", "a refused start says why in one line")

# Looked at by the worker, in the scheduler's process, before it uses them.
WORKER: tuple[Touch, ...] = (
    _ONE_LINE,
    *_names("srt.runtime_context", "get_exec", "SGLang's configuration"),
    *_names(
        "srt.model_executor.cuda_graph_config",
        "Backend Phase check_cuda_graph_backend with_phase",
        "capture batch sizes of a state",
    ),
    *_names(
        "srt.layers.moe.utils",
        "speculative_moe_backend_context speculative_moe_a2a_backend_context",
        "experts' kernels of the draft",
    ),
    Touch("srt.speculative.spec_utils:draft_tp_context", None, "call", "parallel layout of the draft"),
    Touch("srt.managers.overlap_utils:FutureMap", None, "call", "relay between overlapping steps"),
    Touch(
        "srt.speculative.eagle_worker_v2:EAGLEWorkerV2.__init__",
        "server_args gpu_id nccl_port target_worker",
        "subclass",
        "the worker",
    ),
    Touch(
        "srt.speculative.eagle_worker_v2:EAGLEWorkerV2.forward_batch_generation",
        "batch on_publish grammar_barrier pp_proxy_tensors",
        "subclass",
        "choose a shape before, read signals after",
    ),
    Touch("srt.speculative.eagle_worker_v2:EAGLEWorkerV2.init_cuda_graphs", "", "subclass", "build the states"),
    Touch(
        "srt.speculative.eagle_worker_v2:EagleDraftWorker.draft",
        "batch with_topology",
        "subclass",
        "narrow the candidates",
    ),
    Touch(
        "srt.speculative.eagle_worker_v2:EagleDraftWorker.draft_forward",
        "forward_batch",
        "subclass",
        "record what the memory learns from",
    ),
    Touch(
        "srt.layers.logits_processor:LogitsProcessor.forward",
        "input_ids hidden_states lm_head logits_metadata aux_hidden_states hidden_states_before_norm",
        "wrap",
        "correct the draft's logits",
    ),
    Touch(
        "srt.layers.logits_processor:LogitsProcessor._compute_lm_head",
        _LM_HEAD,
        "call",
        "the draft's logits without correction",
    ),
    Touch(
        "srt.speculative.base_spec_worker:BaseSpecWorker.clear_cache_pool",
        "",
        "subclass",
        "/flush_cache empties the memory",
    ),
    *_NEW_WEIGHTS,
    Touch(
        "srt.speculative.eagle_worker_v2:EagleDraftWorker._draft_extend_for_prefill",
        _EXTEND_PREFILL,
        "subclass",
        "relay width",
    ),
    Touch(
        "srt.speculative.eagle_worker_v2:EagleDraftWorker._draft_extend_for_decode",
        "batch batch_result kv_loc_plan",
        "subclass",
        "relay width",
    ),
    Touch("srt.speculative.eagle_worker_v2:EagleDraftWorker._capture_cuda_graphs", "", "subclass", "capture by state"),
    Touch(
        "srt.speculative.eagle_worker_v2:EagleDraftWorker.init_attention_backend", "", "subclass", "backends by state"
    ),
    Touch(
        "srt.speculative.base_spec_worker:BaseSpecWorker.note_request_finished",
        "rid natural_stop",
        "subclass",
        "forget a request",
    ),
    Touch(
        "srt.speculative.base_spec_worker:EagleDraftWorkerBase._rebuild_topk1_chain_buffers",
        "",
        "call",
        "chain tensors by state",
    ),
    Touch(
        "srt.speculative.draft_utils:DraftBackendFactory.create_decode_backend", "", "call", "draft backend by state"
    ),
    Touch(
        "srt.speculative.draft_utils:DraftBackendFactory.create_draft_extend_backend",
        "",
        "call",
        "extend backend by state",
    ),
    Touch("srt.speculative.eagle_worker_common:eagle_sample", _EAGLE_SAMPLE, "wrap", "see the logits of the step"),
    Touch("srt.speculative.eagle_utils:verify_tree_greedy_func", _WALK, "wrap", "draw the tokens of sampled rows"),
    Touch("srt.speculative.eagle_utils:_verify_uses_greedy", None, "bind", "always walk the tree with chosen tokens"),
    Touch(
        "srt.layers.sampler:Sampler._sample_from_probs",
        "probs sampling_info positions simple_sampling_case",
        "wrap",
        "seeds for the first token",
    ),
    Touch(
        "srt.managers.scheduler:Scheduler.is_disable_overlap_for_batch",
        "batch last_batch",
        "wrap",
        "penalties need every token",
    ),
    Touch("srt.managers.auxiliary_output:append_auxiliary_output", "current output", "call", "signals without a sync"),
    Touch(
        "srt.model_executor.model_runner:ModelRunner._get_attention_backend", None, "call", "verify backend by state"
    ),
    Touch("srt.model_executor.runner:DecodeCudaGraphRunner", None, "call", "verify graphs by state"),
    Touch("srt.runtime_context:get_context", "", "call", "configuration while a state is being built"),
    Touch(
        "srt.managers.scheduler_components.internal_state:SchedulerInternalStateController._add_speculative",
        "state",
        "wrap",
        "/server_info",
    ),
    Touch(
        "srt.managers.scheduler_components.internal_state:SchedulerInternalStateController._update_handlers",
        "",
        "wrap",
        "/set_internal_state",
    ),
    Touch(
        "srt.managers.scheduler_components.internal_state:_UpdateHandler",
        "validate apply",
        "call",
        "/set_internal_state",
    ),
    Touch("srt.managers.scheduler_components.internal_state:UpdateRejected", None, "call", "/set_internal_state"),
    Touch(
        "srt.managers.scheduler_components.output_streamer:SchedulerOutputStreamer.build_additional_customized_info",
        "reqs",
        "wrap",
        "shape histogram of a response",
    ),
    Touch(
        "srt.managers.scheduler_components.output_streamer:SchedulerOutputStreamer.is_request_level_customized_info_key",
        "key",
        "bind",
        "shape histogram of a response",
    ),
    Touch(
        "srt.managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter.report_decode_stats",
        "can_run_cuda_graph running_batch num_generated_tokens",
        "wrap",
        "accept rate by what was really proposed",
    ),
    Touch(
        "srt.managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter.update_spec_metrics",
        "bs num_correct_drafts num_accept_tokens num_block_accept_tokens num_cap_tokens",
        "read",
        "accept rate by what was really proposed",
    ),
    Touch(
        "srt.model_executor.model_runner:ModelRunner.init_weight_updater",
        "",
        "read",
        "no graphs of the envelope after a weight update",
    ),
    Touch(
        "srt.managers.tp_worker:TpModelWorker.init_cuda_graphs",
        "capture_decode_cuda_graph",
        "bind",
        "each state captures the target's graphs for its own width",
    ),
)

TOKENIZER: tuple[Touch, ...] = (
    Touch("srt.sampling.sampling_params:SamplingParams.verify", "vocab_size", "wrap", "options of a request"),
    Touch(
        "srt.managers.tokenizer_manager:TokenizerManager._validate_one_request",
        "obj input_ids",
        "wrap",
        "refuse custom logit processors",
    ),
    Touch(
        "srt.managers.tokenizer_manager:TokenizerManager.update_request_meta_info",
        "meta_info state customized_info index finish_reason",
        "wrap",
        "details of responses",
    ),
    Touch(
        "srt.managers.tokenizer_manager:TokenizerManager._calculate_spec_decoding_metrics",
        "meta_info recv_obj i",
        "wrap",
        "accept rate by what was really proposed",
    ),
)

_NORM = "x residual post_residual_addition quant_linear"
CPU_ENGINE: tuple[Touch, ...] = (
    _ONE_LINE,
    *_names("srt.runtime_context", "get_parallel", "how many ranks there are"),
    *_names("srt.layers.attention.base_attn_backend", "AttentionBackend", "attention of the CPU engine"),
    *_names("srt.layers.attention.attention_registry", "register_attention_backend", "attention of the CPU engine"),
    *_names("srt.layers.radix_attention", "AttentionType", "attention of the CPU engine"),
    *_names("srt.mem_cache.memory_pool", "KVWriteLoc MHATokenToKVPool", "rows of the cache"),
    *_names("srt.layers.layer_boundary.contracts", "BatchVariant", "one rank has one layout of rows"),
    *_names("srt.layers.linear", "LinearBase MergedColumnParallelLinear QKVParallelLinear", "calls around a product"),
    *_NEW_WEIGHTS,
    Touch(
        "srt.speculative.draft_utils:DraftBackendFactory._create_backend",
        "backend_name backend_map error_template stamps_children",
        "wrap",
        "draft backends of the CPU engine",
    ),
    Touch(
        "srt.layers.quantization.unquant:UnquantizedLinearMethod.apply",
        "layer x bias",
        "wrap",
        "half-precision products",
    ),
    Touch(
        "srt.layers.logits_processor:LogitsProcessor._compute_lm_head",
        _LM_HEAD,
        "wrap",
        "half-precision products",
    ),
    Touch("srt.layers.layernorm:RMSNorm.forward_native", _NORM, "bind", "fewer operators a norm"),
    Touch(
        "srt.layers.rotary_embedding.base:RotaryEmbedding.forward_native",
        "positions query key offsets fused_set_kv_buffer_arg",
        "bind",
        "fewer operators a rotary embedding",
    ),
    Touch("srt.layers.linear:ColumnParallelLinear.forward", "input_", "bind", "fewer calls around a product"),
    Touch(
        "srt.layers.linear:RowParallelLinear.forward",
        "input_ skip_all_reduce forward_batch output_tensor",
        "bind",
        "fewer calls around a product",
    ),
    Touch(
        "srt.layers.layer_boundary.construction:StagePlan.variant_for",
        "forward_batch",
        "bind",
        "one rank has one layout of rows",
    ),
)


def check(touches: tuple[Touch, ...] = LIGHT) -> None:
    """Raise unless every name is there with the parameters that this project was written against.

    Raises:
        RefusedError: names the first one that differs.
    """
    for touch in touches:
        found = _parameters(touch)
        if touch.parameters is not None and found != touch.parameters.split():
            raise _differs(touch, f"parameters ({', '.join(found)})", f"({', '.join(touch.parameters.split())})")


def _parameters(touch: Touch) -> list[str]:
    module_name, attributes = touch.path.split(":")
    try:
        target: Any = importlib.import_module(f"sglang.{module_name}")
        for name in attributes.split("."):
            target = getattr(target, name)
    except (ImportError, AttributeError) as error:
        raise _differs(touch, f"nothing ({error})", "it to exist") from error
    if touch.parameters is None:
        return []
    return [name for name in inspect.signature(target).parameters if name != "self"]


def _differs(touch: Touch, found: str, expected: str) -> RefusedError:
    return RefusedError(
        reason="contract",
        where=f"sglang.{touch.path}",
        found=found,
        expected=f"{expected}, for: {touch.why}",
        fix="install sglang==0.5.23 unmodified from PyPI, without other plugins that replace this function",
    )
