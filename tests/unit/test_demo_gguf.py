"""The GGUF converter, against transformers' own model and an independent formula."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from adaptivespec.demo.gguf_llama import LAYER_NAMES, GgufError, hf_name, interleaved_to_half_split, read_gguf


@given(heads=st.integers(1, 4), half=st.integers(1, 4))
def test_rows_2i_and_2i_plus_1_of_each_head_end_half_a_head_apart(heads: int, half: int) -> None:
    rows = torch.arange(heads * 2 * half)[:, None] * torch.ones(1, 3)
    moved = interleaved_to_half_split(rows, heads)
    for head in range(heads):
        for i in range(half):
            start = head * 2 * half
            assert moved[start + i, 0] == start + 2 * i
            assert moved[start + half + i, 0] == start + 2 * i + 1


def rotate_side_by_side(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding as GGUF's runtime applies it: numbers 2i and 2i+1 form a pair."""
    a, b = x[..., 0::2], x[..., 1::2]
    turned = (a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin())
    return torch.stack(turned, dim=-1).flatten(-2)


def rotate_half_apart(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


def test_reordered_projections_give_the_same_attention_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    heads, dim, hidden = 2, 8, 12
    q, k = (torch.randn(heads * dim, hidden, generator=generator) for _ in range(2))
    x, y = (torch.randn(hidden, generator=generator) for _ in range(2))
    speeds = 0.3 ** torch.arange(dim // 2)
    gguf_q = rotate_side_by_side((q @ x).view(heads, dim), 5 * speeds)
    gguf_k = rotate_side_by_side((k @ y).view(heads, dim), 2 * speeds)
    hf_q = rotate_half_apart((interleaved_to_half_split(q, heads) @ x).view(heads, dim), 5 * speeds)
    hf_k = rotate_half_apart((interleaved_to_half_split(k, heads) @ y).view(heads, dim), 2 * speeds)
    torch.testing.assert_close((gguf_q * gguf_k).sum(-1), (hf_q * hf_k).sum(-1))


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, rope_theta=1000.0, rms_norm_eps=1e-5,
        max_position_embeddings=64, pad_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def half_split_to_interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row by row, as the GGUF layout is described."""
    out, dim = np.empty_like(weight), len(weight) // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = weight[head * dim + i]
            out[head * dim + 2 * i + 1] = weight[head * dim + dim // 2 + i]
    return out


def write_gguf(model: LlamaForCausalLM, path: Path, architecture: str = "llama") -> None:
    config, heads = model.config, {"attn_q": 4, "attn_k": 2}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1000.0)
    writer.add_context_length(config.max_position_embeddings)
    weights = {name: value.float().numpy() for name, value in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(config.num_hidden_layers):
        for short, long in LAYER_NAMES.items():
            weight = weights[f"model.layers.{layer}.{long}.weight"]
            if short in heads:
                weight = half_split_to_interleaved(weight, heads[short])
            writer.add_tensor(f"blk.{layer}.{short}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_converted_model_computes_what_the_original_computes(tmp_path: Path) -> None:
    model = tiny_llama()
    write_gguf(model, tmp_path / "tiny.gguf")
    config, weights = read_gguf(tmp_path / "tiny.gguf")
    assert config.tie_word_embeddings
    read = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    read.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 35]])
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, model(tokens).logits, rtol=0, atol=0)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tiny_llama(), tmp_path / "tiny.gguf", architecture="gpt2")
    with pytest.raises(GgufError, match="found architecture 'gpt2'; expected 'llama'"):
        read_gguf(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.ssm_in.weight", "rope_freqs.weight"])
def test_unknown_tensor_names_are_errors(name: str) -> None:
    with pytest.raises(GgufError, match="found tensor"):
        hf_name(name)
