"""Models that no one ships: a draft that is always wrong, a pair whose draft is always right, and a random pair."""

import json
import shutil
import string
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from adaptivespec.config import DriftConfig
from adaptivespec.offline.pair import Answer, Pair
from adaptivespec.sglang_plugin.drift_check import fingerprint
from drift.memory import DriftMemory
from drift.storage import save_bank
from drift.tenants import Tenants

# SGLang reads EAGLE-3's three states before layers 2, L/2 and L-3, which must differ.
NUM_LAYERS = 8
# What the cyclic pair says, again and again. Letters and signs in turn, so that the tokenizer, too, makes each
# character a token.
CYCLE = "".join(map("".join, zip(string.ascii_letters[-32:], string.punctuation, strict=True)))


def make_poison_draft(draft: Path, folder: Path) -> None:
    """A copy of a draft whose head is negated: what it thinks least likely it proposes first."""
    shutil.copytree(draft, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = -weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def make_poisoned_bank(path: Path, target: Path, draft: Path, prompts: list[list[int]], config: DriftConfig) -> None:
    """A bank file whose tenant "poisoned" knows every state of some answers, forbids what the draft would say there, and
    wants what it would not."""
    pair = Pair(str(target), str(draft))
    ids, hidden_size = pair.draft.draft_token_ids, pair.draft.config["hidden_size"]
    memory = DriftMemory(config.params, hidden_size, len(ids), "cpu", ids, len(pair.embed))
    tenants, half, used = Tenants(config.num_banks), config.num_tokens // 2, 0
    (bank,), _ = tenants.assign(["tenant:poisoned"])
    for ids in prompts:
        out = pair.model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=32)[0].tolist()
        trace = pair.trace(pair.batch(Answer(ids, out[len(ids) :])), num_steps=3)
        states, logits = trace.hidden.flatten(0, 1), trace.draft_logits.flatten(0, 1)
        slots = slice(used, used + len(states))
        memory.keys[slots] = torch.nn.functional.normalize(states, dim=1)
        memory.token_ids[slots] = torch.cat((logits.topk(half).indices, (-logits).topk(half).indices), dim=1)
        memory.bias[slots] = torch.tensor([-100.0] * half + [100.0] * half)
        memory.owner[slots] = bank
        used += len(states)
    save_bank(path, memory, tenants, fingerprint(draft))


def make_random_pair(folder: Path, tokenizer_folder: Path) -> tuple[Path, Path]:
    """A random Qwen3 of eight small layers, and a random EAGLE-3 draft for it with a vocabulary of 512."""
    torch.manual_seed(0)
    # Larger weights than usual, so that the likeliest token wins clearly and depends on the context.
    config = Qwen3Config(**_sizes(hidden_size=64, intermediate_size=96), initializer_range=0.3)
    model = Qwen3ForCausalLM(config)
    weights = {name: 0.1 * torch.randn(shape) for name, shape in _draft_shapes(config, 512).items()}
    # d2t holds target id minus draft id: here every 96th token of the target's vocabulary.
    weights["d2t"] = torch.arange(512) * (config.vocab_size // 512 - 1)
    return _save_pair(folder / "random", model, weights, tokenizer_folder)


def make_cyclic_pair(folder: Path, tokenizer_folder: Path, cycle_ids: list[int]) -> tuple[Path, Path]:
    """A target that says one token after the other of a cycle, and a draft that knows it.

    The hidden state of a token is the unit vector of its place in the cycle. The target's layers add nothing, and its
    head looks one place ahead. The draft's only layer turns a place into the next one, which is what its target would
    have done meanwhile.

    Args:
        cycle_ids: 64 token ids.
    """
    size = len(cycle_ids)
    config = LlamaConfig(**_sizes(hidden_size=size, intermediate_size=size))
    ahead = torch.eye(size).roll(1, dims=0)  # maps place i to place i + 1
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.zero_()[cycle_ids] = torch.eye(size)
        model.lm_head.weight.zero_()[cycle_ids] = 4 * ahead
    weights = {name: torch.zeros(shape) for name, shape in _draft_shapes(config, size).items()}
    weights["fc.weight"][:, :size] = torch.eye(size)
    weights["midlayer.mlp.gate_proj.weight"] = weights["midlayer.mlp.up_proj.weight"] = torch.eye(size)
    # RMSNorm makes the unit vector sqrt(size) long; what silu(x) * x then is, the last matrix takes back.
    length = torch.tensor(size).sqrt()
    weights["midlayer.mlp.down_proj.weight"] = (ahead - torch.eye(size)) / (torch.nn.functional.silu(length) * length)
    weights["lm_head.weight"] = 4 * ahead
    weights["d2t"] = torch.tensor(cycle_ids) - torch.arange(size)
    return _save_pair(folder / "cyclic", model, weights, tokenizer_folder)


def _sizes(*, hidden_size: int, intermediate_size: int) -> dict:
    return {
        "vocab_size": 49152,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }


def _draft_shapes(config: PreTrainedConfig, draft_vocab_size: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {
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


def _save_pair(
    folder: Path, model: PreTrainedModel, draft_weights: dict[str, Tensor], tokenizer_folder: Path
) -> tuple[Path, Path]:
    target, draft = folder / "target", folder / "draft"
    model.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_folder / name, target / name)
    draft.mkdir()
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        draft_weights[f"{name}.weight"] = torch.ones(model.config.hidden_size)
    contiguous = {name: weight.contiguous().clone() for name, weight in draft_weights.items()}
    save_file(contiguous, draft / "model.safetensors", metadata={"format": "pt"})
    size = draft_weights["lm_head.weight"].shape[0]
    sizes = _sizes(hidden_size=model.config.hidden_size, intermediate_size=model.config.intermediate_size)
    config = sizes | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "draft_vocab_size": size,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    }
    del config["dtype"]
    (draft / "config.json").write_text(json.dumps(config))
    return target, draft
