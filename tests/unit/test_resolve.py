"""ADAPTIVE in SGLang's own argument resolution, on the CPU engine; no model is loaded."""

import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from adaptivespec.config import AdaptiveConfig
from adaptivespec.cpu_engine.activate import is_standin_active
from adaptivespec.errors import AdaptiveSpecError, ConfigError, RefusedError
from adaptivespec.sglang_plugin import refusals
from adaptivespec.shapes import PRESETS, TreeShape, envelope
from tests.unit.models import write_draft, write_target

SHAPE_FLAGS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
DEFAULT_ENVELOPE = envelope(PRESETS["short"].reachable())


class Resolver:
    """Runs SGLang's resolution for a tiny pair of models."""

    def __init__(self, folder):
        self.folder = folder
        self.pair = {
            "model_path": str(write_target(folder / "target")),
            "speculative_draft_model_path": str(write_draft(folder / "draft")),
        }

    def __call__(self, algorithm: str | None = "ADAPTIVE", **options: Any) -> dict[str, Any]:
        return self.record(algorithm, **options).resolved_dict()

    def record(self, algorithm: str | None = "ADAPTIVE", **options: Any) -> Any:
        from sglang.srt.server_args import ServerArgs

        pair = self.pair if algorithm else {"model_path": self.pair["model_path"]}
        record = ServerArgs(**{**pair, "speculative_algorithm": algorithm, "random_seed": 0, **options})
        record.resolve_once()
        return record

    def config(self, data: Any) -> str:
        path = self.folder / "adaptive.json"
        path.write_text(json.dumps(data))
        return str(path)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """A resolver, and what it gave for the other algorithms before the plugin was registered."""
    import sglang.srt.server_args  # noqa: F401, resolves the platform, which activates the CPU engine
    from sglang.srt.speculative.spec_registry import _REGISTRY

    if not is_standin_active():
        pytest.skip("the CPU engine is not in use here: torch sees an accelerator")
    assert "ADAPTIVE" not in _REGISTRY
    from adaptivespec.cpu_engine import install
    from adaptivespec.sglang_plugin import plugin

    with pytest.MonkeyPatch.context() as patch:
        for name in refusals.ENVIRONMENT:
            patch.delenv(name, raising=False)
        patch.setattr(sys, "excepthook", sys.excepthook)
        install.register()  # EAGLE3 needs the CPU engine with or without ADAPTIVE
        patch.setattr(install, "register", lambda: None)
        resolve = Resolver(tmp_path_factory.mktemp("models"))
        before = {algorithm: resolve(algorithm) for algorithm in (None, "EAGLE3")}
        plugin.register()
        plugin.register()  # as SGLang does in some processes
        yield SimpleNamespace(resolve=resolve, before=before)


@pytest.fixture
def resolve(world) -> Resolver:
    return world.resolve


def refused(call: Callable, *args: Any, error: type = RefusedError, **options: Any) -> AdaptiveSpecError:
    with pytest.raises(error) as caught:
        call(*args, **options)
    assert "; expected " in str(caught.value)
    assert "; fix: " in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("algorithm", [None, "EAGLE3"])
def test_other_algorithms_resolve_as_without_the_plugin(world, algorithm):
    assert world.resolve(algorithm) == world.before[algorithm]
    assert world.before["EAGLE3"]["attention_backend"] == "cpu_tree"


def test_adaptive_resolves_like_eagle3_but_for_name_and_shape(world, resolve):
    adaptive, eagle3 = resolve(), world.before["EAGLE3"]
    assert adaptive["speculative_algorithm"] == "ADAPTIVE"
    different = {name for name, value in adaptive.items() if value != eagle3[name]}
    assert different <= {"speculative_algorithm", *SHAPE_FLAGS}
    assert adaptive["max_running_requests"] == 48
    assert adaptive["disable_overlap_schedule"] is True  # on CPU
    assert adaptive["attention_backend"] == "cpu_tree"
    assert adaptive["page_size"] == 1


def test_the_envelope_of_all_shapes_is_declared(resolve):
    assert [resolve()[name] for name in SHAPE_FLAGS] == DEFAULT_ENVELOPE.to_list()
    config = resolve.config({"shape": {"range": "paper"}})
    assert [resolve(speculative_adaptive_config=config)[name] for name in SHAPE_FLAGS] == [7, 4, 8]


def test_memory_is_sized_for_the_envelope(resolve):
    from sglang.srt.arg_groups.overrides import max_speculative_num_draft_tokens

    assert max_speculative_num_draft_tokens(resolve.record()) == DEFAULT_ENVELOPE.num_draft_tokens


def test_shape_flags_give_the_start_shape(resolve):
    flags = dict(zip(SHAPE_FLAGS, (5, 4, 20), strict=True))
    shapes = (*PRESETS["short"].reachable(), TreeShape(5, 4, 20))
    assert [resolve(**flags)[name] for name in SHAPE_FLAGS] == envelope(shapes).to_list()
    static = resolve(**flags, speculative_adaptive_config=resolve.config({"policy": "static"}))
    assert [static[name] for name in SHAPE_FLAGS] == [5, 4, 20]


def test_a_static_chain_keeps_its_own_numbers(resolve):
    config = resolve.config({"policy": "static", "shape": {"start": [3, 1, 4]}})
    assert [resolve(speculative_adaptive_config=config)[name] for name in SHAPE_FLAGS] == [3, 1, 4]


def test_what_the_user_set_stays(resolve):
    options = {"max_running_requests": 5, "context_length": 64, "mem_fraction_static": 0.5, "page_size": 1}
    resolved = resolve(**options)
    assert {name: resolved[name] for name in options} == options


def test_the_name_may_be_written_in_any_case(resolve):
    assert resolve("adaptive") == resolve()


@pytest.mark.parametrize("given", range(1, 7))
def test_partial_shape_flags_are_refused(resolve, given):
    flags = {name: 4 for bit, name in enumerate(SHAPE_FLAGS) if given >> bit & 1}
    error = refused(resolve, **flags, error=ConfigError)
    for name in SHAPE_FLAGS:
        assert ("--" + name.replace("_", "-") in error.found) == (name in flags)
        assert ("--" + name.replace("_", "-") in error.fix) == (name not in flags)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [((3, 1, 9), "num_draft_tokens = num_steps + 1 = 4"), ((5, 4, 3), "from 6 to 69"), ((0, 4, 4), "num_steps from 1")],
)
def test_illegal_shape_flags_are_refused(resolve, flags, expected):
    error = refused(resolve, **dict(zip(SHAPE_FLAGS, flags, strict=True)), error=ConfigError)
    assert error.where == "the server's three shape flags"
    assert expected in error.expected


def test_flags_and_config_must_agree(resolve):
    config = resolve.config({"shape": {"start": [3, 1, 4]}})
    flags = dict(zip(SHAPE_FLAGS, (3, 1, 4), strict=True))
    resolve(**flags, speculative_adaptive_config=config)
    flags = dict(zip(SHAPE_FLAGS, (4, 1, 5), strict=True))
    assert refused(resolve, **flags, speculative_adaptive_config=config, error=ConfigError).where == "shape.start"


@pytest.mark.parametrize(
    ("data", "where"),
    [({"polcy": "dcs"}, "polcy"), ({"dcs": {"alpha": 2}}, "dcs.alpha"), ([], "config")],
)
def test_a_bad_config_is_refused_by_key(resolve, data, where):
    assert refused(resolve, speculative_adaptive_config=resolve.config(data), error=ConfigError).where == where


def test_a_missing_config_is_refused_by_name(resolve):
    path = str(resolve.folder / "absent.json")
    assert refused(resolve, speculative_adaptive_config=path, error=ConfigError).where == path


REFUSED = {
    "tp_size": 2,
    "pp_size": 2,
    "dp_size": 2,
    "dcp_size": 2,
    "disaggregation_mode": "prefill",
    "enable_two_batch_overlap": True,
    "enable_pdmux": True,
    "enable_multi_layer_eagle": True,
    "speculative_adaptive": True,
    "speculative_use_rejection_sampling": True,
    "speculative_use_block_verification": True,
    "speculative_accept_threshold_single": 0.9,
    "speculative_accept_threshold_acc": 0.9,
    "enable_watermark": True,
    "enable_lora": True,
    "lora_paths": ["name=folder"],
    "enable_hierarchical_cache": True,
    "enable_lmcache": True,
    "enable_unified_memory": True,
    "enable_unified_cache_external_linker": True,
    "enable_page_major_kv_layout": True,
    "enable_hisparse": True,
    "aux_hidden_state_capture": True,
    "enable_attn_tp_input_scattered": True,
    "dllm_algorithm": "LowConfidence",
    "enable_memory_saver": True,
    "attention_backend": "torch_native",
    "decode_attention_backend": "torch_native",
    "speculative_draft_attention_backend": "torch_native",
    "page_size": 16,
    "enable_mixed_chunk": True,
    "cuda_graph_backend_prefill": "full",
    "prefill_attention_backend": "torch_native",
}


@pytest.mark.parametrize(("option", "value"), REFUSED.items(), ids=REFUSED)
def test_each_refused_option_is_named(resolve, option, value):
    trees = resolve.config({"shape": {"range": "paper"}})  # larger pages are refused for trees only
    error = refused(resolve, speculative_adaptive_config=trees, **{option: value})
    assert error.where == "--" + option.replace("_", "-")
    assert error.found == repr(value)


def test_every_refused_option_is_among_them():
    # These two cannot be had without tensor parallelism, at which the start ends before.
    assert {refusal.option for refusal in refusals.OPTIONS} - REFUSED.keys() == {"attn_cp_size", "attn_dp_size"}


@pytest.mark.parametrize("options", [{"attn_cp_size": 2}, {"enable_dp_attention": True, "dp_size": 2}])
def test_what_needs_tensor_parallelism_is_refused_with_it(resolve, options):
    assert refused(resolve, tp_size=2, **options).where == "--tp-size"


@pytest.mark.parametrize("name", refusals.ENVIRONMENT)
def test_each_refused_variable_is_named(resolve, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert refused(resolve).where == name


def test_another_sglang_is_refused(resolve, monkeypatch):
    monkeypatch.setattr(refusals, "SGLANG_VERSION", "0.5.99")
    error = refused(resolve)
    assert (error.where, error.found, error.fix) == ("sglang", "0.5.23", "pip install sglang==0.5.99")


def test_other_algorithms_are_not_refused_anything(world, monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "2")
    monkeypatch.setattr(refusals, "SGLANG_VERSION", "0.5.99")
    assert world.resolve("EAGLE3", enable_memory_saver=False) == world.before["EAGLE3"]


def test_a_draft_is_needed(resolve):
    assert refused(resolve, speculative_draft_model_path=None).where == "--speculative-draft-model-path"


def test_a_draft_of_another_target_is_refused(resolve, tmp_path):
    target = str(write_target(tmp_path, hidden_size=48))
    assert "found hidden size 32; expected 48" in str(refused(resolve, model_path=target))


def test_a_target_with_latent_attention_is_refused(resolve, tmp_path):
    ranks = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    kind = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
    error = refused(resolve, model_path=str(write_target(tmp_path, **kind, **ranks, **experts)))
    assert (error.where, error.found) == ("--model-path", "MLA attention")


def test_the_command_line_takes_it(resolve):
    from sglang.srt.server_args import prepare_server_args

    config = resolve.config({"shape": {"start": [4, 1, 5]}})
    record = prepare_server_args(
        [
            *("--model-path", resolve.pair["model_path"], "--speculative-algorithm", "ADAPTIVE"),
            *("--speculative-draft-model-path", resolve.pair["speculative_draft_model_path"]),
            *("--speculative-adaptive-config", config, "--attention-backend", "cpu_tree"),
        ]
    )
    record.resolve_once()
    resolved = record.resolved_dict()
    assert resolved["speculative_algorithm"] == "ADAPTIVE"
    start = AdaptiveConfig.from_json_file(config).shape.start
    assert [resolved[name] for name in SHAPE_FLAGS] == envelope((*PRESETS["short"].reachable(), start)).to_list()


def test_the_algorithm_answers_like_eagle3(resolve):
    import inspect

    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    ours, theirs = SpeculativeAlgorithm.from_string("adaptive"), SpeculativeAlgorithm.EAGLE3
    methods = [name for name, value in vars(SpeculativeAlgorithm).items() if inspect.isfunction(value)]
    questions = [name for name in methods if not inspect.signature(getattr(theirs, name)).parameters]
    assert {"is_eagle3", "need_topk", "has_draft_kv", "supports_grammar_overlap"} <= {*questions}
    assert {name: getattr(ours, name)() for name in questions} == {name: getattr(theirs, name)() for name in questions}
    assert ours == theirs
    assert theirs == ours
    assert ours in (SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.EAGLE3)
    assert ours != SpeculativeAlgorithm.NONE
    assert hash(ours) == hash(theirs)
    assert ours.supports_overlap
