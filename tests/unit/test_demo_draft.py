"""The draft that ships with the package: what SGLang loads, complete and consistent."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from adaptivespec.demo.draft import draft_folder
from adaptivespec.draft_training.model import load_draft

LAYER = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
LAYER += tuple(f"self_attn.{name}_proj" for name in "qkvo") + tuple(
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
)
# What SGLang 0.5.23's llama_eagle3 loader maps onto its parameters; it skips names it does not know without a word.
SGLANG_NAMES = {f"midlayer.{name}.weight" for name in LAYER} | {
    "fc.weight",
    "norm.weight",
    "lm_head.weight",
    "d2t",
    "t2d",
}


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return load_file(draft_folder() / "model.safetensors")


def test_names_and_types_are_those_that_sglang_loads(state: dict[str, Tensor]) -> None:
    assert state.keys() == SGLANG_NAMES
    assert {value.dtype for name, value in state.items() if name.endswith("weight")} == {torch.bfloat16}
    assert (state["d2t"].dtype, state["t2d"].dtype) == (torch.int64, torch.bool)


def test_d2t_and_t2d_name_the_same_tokens(state: dict[str, Tensor]) -> None:
    config = json.loads((draft_folder() / "config.json").read_text())
    target_ids = torch.arange(config["draft_vocab_size"]) + state["d2t"]
    assert len(state["t2d"]) == config["vocab_size"]
    assert (target_ids[1:] > target_ids[:-1]).all()
    torch.testing.assert_close(state["t2d"].nonzero().flatten(), target_ids)


def test_weights_are_finite_and_fit_the_config(state: dict[str, Tensor]) -> None:
    draft = load_draft(draft_folder())
    assert all(value.isfinite().all() for value in draft.parameters())
    assert draft.config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert draft.lm_head.out_features == draft.config["draft_vocab_size"]
