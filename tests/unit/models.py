"""Folders of tiny models: what SGLang's argument resolution and our draft check look at."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN_SIZE = 32
VOCAB_SIZE = 64
DRAFT_VOCAB_SIZE = 16

_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DRAFT_CONFIG = {
    **_CONFIG,
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": DRAFT_VOCAB_SIZE,
}


def write_target(folder: Path, **changes: Any) -> Path:
    """The config of a Llama; no weights, which nothing reads before a model is loaded."""
    folder.mkdir(exist_ok=True)
    config = {**_CONFIG, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def draft_weights() -> dict[str, torch.Tensor]:
    """The tensors of an EAGLE-3 draft that the check looks at; draft ids stand for every fourth target id."""
    return {
        "lm_head.weight": torch.zeros(DRAFT_VOCAB_SIZE, HIDDEN_SIZE),
        "d2t": torch.arange(DRAFT_VOCAB_SIZE) * 3,
        "fc.weight": torch.zeros(HIDDEN_SIZE, 3 * HIDDEN_SIZE),
    }


def write_draft(folder: Path, config: Any = DRAFT_CONFIG, weights: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(draft_weights() if weights is None else weights, folder / "model.safetensors")
    return folder
