"""A Llama GGUF file as a Hugging Face folder: config, bf16 weights, tokenizer with chat template."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig

from adaptivespec.errors import AdaptiveSpecError

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufError(AdaptiveSpecError, ValueError):
    """The GGUF file is not the kind that the converter knows."""


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a Llama GGUF file, of any quantisation that `gguf` reads, as a folder that Hugging Face and SGLang load.

    Args:
        gguf: the file; its metadata must hold the tokenizer.
        folder: an existing folder, which receives config.json, model.safetensors (bf16) and the tokenizer's files.

    Raises:
        GgufError: another architecture than llama, or a tensor with an unknown name.
    """
    config, weights = read_gguf(gguf)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def read_gguf(gguf: Path) -> tuple[LlamaConfig, dict[str, Tensor]]:
    """Config and dequantised bf16 weights of a Llama GGUF file, named and laid out as Hugging Face does."""
    reader = GGUFReader(gguf)
    fields = {
        name: field.contents() for name, field in reader.fields.items() if name.startswith(("general.", "llama."))
    }
    if fields["general.architecture"] != "llama":
        raise GgufError(
            where=gguf.name,
            found=f"architecture {fields['general.architecture']!r}",
            expected="'llama'",
            fix="use a GGUF file of a Llama model",
        )
    rotary_heads = {"q_proj": fields["llama.attention.head_count"], "k_proj": fields["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in tqdm(reader.tensors, desc="dequantising", unit="tensor"):
        name = hf_name(tensor.name)
        shape = [int(size) for size in reversed(tensor.shape)]
        weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)).view(shape)
        if num_heads := rotary_heads.get(name.split(".")[-2]):
            weight = interleaved_to_half_split(weight, num_heads)
        weights[name] = weight.to(torch.bfloat16).contiguous()
    vocab_size = len(weights["model.embed_tokens.weight"])
    return _config(fields, vocab_size, tied="lm_head.weight" not in weights), weights


def hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; GgufError for a name that a Llama model does not have."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    raise GgufError(found=f"tensor {name!r}", expected="the tensors of a Llama model", fix="use another GGUF file")


def interleaved_to_half_split(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of a q or k projection from GGUF's rotary layout to Hugging Face's.

    In each head GGUF keeps the two numbers that rotate together side by side (2i, 2i+1); Hugging Face keeps them half
    a head apart (i, i + head_dim/2).

    Args:
        weight: [num_heads * head_dim, ...].
    """
    rows, *rest = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, *rest).swapaxes(1, 2).reshape(weight.shape)


def _config(fields: dict[str, Any], vocab_size: int, *, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=vocab_size,
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_theta": fields["llama.rope.freq_base"], "rope_type": "default"},
        max_position_embeddings=fields["llama.context_length"],
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
