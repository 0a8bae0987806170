"""Models that no one ships: a draft that is always wrong, and a tiny random pair."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM


def make_poison_draft(draft: Path, folder: Path) -> None:
    """A copy of a draft whose head is negated: what it thinks least likely it proposes first."""
    shutil.copytree(draft, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = -weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def make_tiny_pair(folder: Path, tokenizer_folder: Path) -> tuple[Path, Path]:
    """A random Qwen3 of six small layers, and a random one-layer EAGLE-3 draft for it with a vocabulary of 512."""
    target, draft = folder / "tiny-target", folder / "tiny-draft"
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        # Larger than usual, so that the likeliest token wins by far and depends on the context.
        initializer_range=0.3,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_folder / name, target / name)
    _write_random_draft(config, draft, draft_vocab_size=512)
    return target, draft


def _write_random_draft(config: Qwen3Config, folder: Path, draft_vocab_size: int) -> None:
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * heads, config.num_key_value_heads * heads
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (q, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, q),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (draft_vocab_size, hidden),
    }
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    weights = {name: 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    # d2t holds target id minus draft id: every 96th token of the target's vocabulary.
    stride = config.vocab_size // draft_vocab_size
    weights["d2t"] = torch.arange(draft_vocab_size) * (stride - 1)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    draft_config = {name: getattr(config, name) for name in names} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": draft_vocab_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(draft_config))
