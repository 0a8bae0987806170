"""The EAGLE-3 draft: one decoder layer on the fused target states, with the names that SGLang's llama_eagle3 loads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from adaptivespec.draft_training.attention import Context
from adaptivespec.draft_training.target_states import NUM_AUX


class Attention(nn.Module):
    """Projections of the draft's attention; the input is twice as wide as the hidden state."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, dim = config["hidden_size"], config["head_dim"]
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
            dim,
        )
        self.q_proj = nn.Linear(2 * hidden, self.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden, self.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden, self.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * dim, hidden, bias=False)


class Mlp(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MidLayer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)


class Eagle3Draft(nn.Module):
    """One draft, in float32, as training sees it: many rows advance together, each along its own chain of steps.

    Row t of a sequence starts from the fused target state of token t and, at step k, embeds token t+1+k and
    predicts the token after it. It attends to the target-made keys of tokens 0..t and to its own steps before.
    """

    d2t: Tensor
    t2d: Tensor
    inv_freq: Tensor

    def __init__(self, config: dict[str, Any], draft_token_ids: Tensor) -> None:
        """
        Args:
            config: the content of the draft's config.json.
            draft_token_ids: int64 [draft_vocab_size], the target id of each draft token, ascending.
        """
        super().__init__()
        self.config = config
        hidden = config["hidden_size"]
        self.fc = nn.Linear(NUM_AUX * hidden, hidden, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = nn.RMSNorm(hidden, config["rms_norm_eps"])
        self.lm_head = nn.Linear(hidden, len(draft_token_ids), bias=False)
        # SGLang adds d2t to a draft id to get the target id: differences, not ids.
        self.register_buffer("d2t", draft_token_ids - torch.arange(len(draft_token_ids)))
        in_draft = torch.zeros(config["vocab_size"], dtype=torch.bool)
        in_draft[draft_token_ids] = True
        self.register_buffer("t2d", in_draft)
        half = config["head_dim"] // 2
        self.register_buffer("inv_freq", config["rope_theta"] ** (-torch.arange(half) / half), persistent=False)

    @property
    def draft_token_ids(self) -> Tensor:
        """Target id of each draft token, int64 [draft_vocab_size]."""
        return self.d2t + torch.arange(len(self.d2t))

    def layer_input(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """Normed token embedding beside normed hidden state: [..., H], [..., H] -> [..., 2H]."""
        return torch.cat((self.midlayer.input_layernorm(embeds), self.midlayer.hidden_norm(hidden)), dim=-1)

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values of x [B, N, 2H] at positions [B, N] or [1, N]: both [B, kv_heads, N, head_dim]."""
        attn = self.midlayer.self_attn
        keys = self._rotate(_split_heads(attn.k_proj(x), attn.num_kv_heads), positions)
        return keys, _split_heads(attn.v_proj(x), attn.num_kv_heads)

    def step(
        self,
        x: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: Context,
        dropout: Callable[[Tensor], Tensor] = lambda branch: branch,
    ) -> Tensor:
        """The rows' next hidden state (before the final norm), [B, R, H].

        Args:
            x: layer input of the rows, [B, R, 2H]; hidden: their residual, [B, R, H].
            positions: int64 [B, R].
            context: what the rows attend to.
            dropout: applied to what attention and MLP add to the residual.
        """
        attn = self.midlayer.self_attn
        queries = self._rotate(_split_heads(attn.q_proj(x), attn.num_heads), positions)
        hidden = hidden + dropout(attn.o_proj(context.attend(queries)))
        return hidden + dropout(self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden)))

    def _rotate(self, heads: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None].float() * self.inv_freq
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def draft_config(target_config: Any, draft_vocab_size: int) -> dict[str, Any]:
    """config.json of a draft that fits a Llama target (a transformers config)."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": target_config.bos_token_id,
        "eos_token_id": target_config.eos_token_id,
        "hidden_act": "silu",
        "hidden_size": target_config.hidden_size,
        "intermediate_size": target_config.intermediate_size,
        "max_position_embeddings": target_config.max_position_embeddings,
        "num_attention_heads": target_config.num_attention_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": target_config.num_key_value_heads,
        "head_dim": target_config.hidden_size // target_config.num_attention_heads,
        "rms_norm_eps": target_config.rms_norm_eps,
        "rope_theta": target_config.rope_parameters["rope_theta"],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": target_config.vocab_size,
        "draft_vocab_size": draft_vocab_size,
    }


@torch.no_grad()
def init_from_target(draft: Eagle3Draft, target: Any) -> None:
    """Start the draft as the target's last layer reading the target's late state, in place.

    The embedding half of the wide projections starts small, so that the layer first does what it did in the target.

    Args:
        target: the target's `LlamaModel`, float32, with tied embeddings.
    """
    hidden, last = draft.config["hidden_size"], target.layers[-1]
    attn, source = draft.midlayer.self_attn, last.self_attn
    for wide, narrow in ((attn.q_proj, source.q_proj), (attn.k_proj, source.k_proj), (attn.v_proj, source.v_proj)):
        wide.weight.mul_(0.3)
        wide.weight[:, hidden:] = narrow.weight
    attn.o_proj.weight.copy_(source.o_proj.weight)
    draft.midlayer.mlp.load_state_dict(last.mlp.state_dict())
    draft.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    draft.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    draft.norm.weight.copy_(target.norm.weight)
    draft.lm_head.weight.copy_(target.embed_tokens.weight[draft.draft_token_ids])
    draft.fc.weight.mul_(0.1)
    draft.fc.weight[:, (NUM_AUX - 1) * hidden :] += torch.eye(hidden)


def save_draft(draft: Eagle3Draft, folder: Path) -> None:
    """Write model.safetensors (bf16) and config.json, each complete or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name: (value.to(torch.bfloat16) if value.is_floating_point() else value).contiguous()
        for name, value in draft.state_dict().items()
    }
    save_file(state, folder / "model.safetensors.part", metadata={"format": "pt"})
    (folder / "model.safetensors.part").rename(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(draft.config, indent=2) + "\n")


def load_draft(folder: Path) -> Eagle3Draft:
    """Read a draft folder into a float32 model."""
    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    draft = Eagle3Draft(config, state["d2t"] + torch.arange(len(state["d2t"])))
    draft.load_state_dict(state)
    return draft
