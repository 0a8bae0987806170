"""`adaptivespec.sglang_plugin.refusals`: every entry of its tables fires, and nothing else does."""

from types import SimpleNamespace

import pytest
import torch

from adaptivespec.errors import RefusedError
from adaptivespec.sglang_plugin import refusals

DEFAULTS = {refusal.option: None for refusal in refusals.OPTIONS} | {
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "attn_dp_size": 1,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "disaggregation_mode": "null",
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
    "attention_backend": "fa3",
    "page_size": 1,
    "speculative_eagle_topk": 4,
}
# What a user would have to write to be refused, for each option of the table.
REFUSED_VALUES = {
    "tp_size": [2, 8],
    "pp_size": [2],
    "dp_size": [2],
    "attn_dp_size": [2],
    "attn_cp_size": [2],
    "dcp_size": [2],
    "disaggregation_mode": ["prefill", "decode"],
    "speculative_accept_threshold_single": [0.9],
    "speculative_accept_threshold_acc": [0.5],
    "attention_backend": ["trtllm_mha", "flashmla", "torch_native", "intel_amx"],
    "decode_attention_backend": ["trtllm_mha", "flashmla"],
    "prefill_attention_backend": ["trtllm_mha", "torch_native"],
    "speculative_draft_attention_backend": ["trtllm_mha", "torch_native"],
    "cuda_graph_backend_prefill": ["full"],
    "lora_paths": [["adapter"]],
    "aux_hidden_state_capture": ["{}"],
    "dllm_algorithm": ["LowConfidence"],
}
SWITCHES = [refusal.option for refusal in refusals.OPTIONS if refusal.option not in {*REFUSED_VALUES, "page_size"}]


def options(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{**DEFAULTS, **changes})


def refusal(check, *args) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        check(*args)
    assert "; fix: " in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def test_plain_options_pass():
    refusals.check_options(options())
    refusals.check_options(options(attention_backend="cpu_tree", page_size=None, disaggregation_mode=None))


@pytest.mark.parametrize(
    ("option", "value"),
    [(option, value) for option, values in REFUSED_VALUES.items() for value in values]
    + [(option, True) for option in SWITCHES],
)
def test_each_option_is_refused_by_its_flag(option, value):
    error = refusal(refusals.check_options, options(**{option: value}))
    assert error.where == "--" + option.replace("_", "-")
    assert error.found == repr(value)
    assert error.expected.startswith("ADAPTIVE without it, since ")


def test_switches_that_are_off_pass():
    refusals.check_options(options(**dict.fromkeys(SWITCHES, False)))


@pytest.mark.parametrize("backend", ["flashinfer", "fa3", "triton"])
def test_trees_on_large_pages_run_on_three_backends(backend):
    refusals.check_options(options(page_size=64, attention_backend=backend))


@pytest.mark.parametrize("backend", ["cpu_tree", "fa4", None])
def test_trees_on_large_pages_are_refused_elsewhere(backend):
    assert refusal(refusals.check_options, options(page_size=16, attention_backend=backend)).reason == "paged_tree"


def test_chains_run_on_large_pages_anywhere():
    refusals.check_options(options(page_size=16, attention_backend="cpu_tree", speculative_eagle_topk=1))


@pytest.mark.parametrize("name", refusals.ENVIRONMENT)
def test_each_environment_variable_is_refused_unless_off(name):
    assert refusal(refusals.check_environment, {name: "1"}).where == name
    assert refusal(refusals.check_environment, {name: "True"}).reason == name.lower()
    for value in ("", "0", "-1", "False", "no", "off"):
        refusals.check_environment({name: value})


def test_the_process_environment_is_the_default(monkeypatch):
    for name in refusals.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    refusals.check_environment()
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3.5")
    refusal(refusals.check_environment)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_devices_that_run(device, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    refusals.check_device(device)


@pytest.mark.parametrize("device", ["npu", "xpu", "mps", "hpu"])
def test_devices_that_do_not(device):
    assert refusal(refusals.check_device, device).where == "--device"


def test_amd_gpus_call_themselves_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "HIP" in refusal(refusals.check_device, "cuda").found


PLAIN = {
    "attention_arch": SimpleNamespace(name="MHA"),
    "linear_attn_registry_result": None,
    "is_hybrid_swa": False,
}


def test_a_plain_target_passes():
    refusals.check_target(SimpleNamespace(**PLAIN))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"attention_arch": SimpleNamespace(name="MLA")}, "MLA attention"),
        ({"linear_attn_registry_result": ("mamba",)}, "linear attention or mamba layers"),
        ({"is_hybrid_swa": True}, "sliding-window layers between full ones"),
    ],
)
def test_targets_with_other_caches_are_refused(change, found):
    assert refusal(refusals.check_target, SimpleNamespace(**{**PLAIN, **change})).found == found
