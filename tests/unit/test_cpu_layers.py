"""`adaptivespec.cpu_engine.layers`: the lean norm and rotary embedding against SGLang's own torch forms."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

from adaptivespec.cpu_engine.layers import Rotation, add_rms_norm, lighten

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
DTYPES = st.sampled_from(list(TOLERANCE))


def assert_close(found, wanted):
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    scale = wanted.double().abs().max().clamp(min=1e-30)
    assert float((found.double() - wanted.double()).abs().max() / scale) <= TOLERANCE[found.dtype]


def make_norm(size, dtype):
    norm = RMSNorm(size, eps=1e-5).to(dtype)
    norm.weight.data.uniform_(0.2, 2)
    return norm


def make_rotary(dtype=torch.float32, **options):
    options = dict(head_size=16, rotary_dim=16, max_position_embeddings=64, base=10000, is_neox_style=True) | options
    return RotaryEmbedding(**options, dtype=dtype)


@given(
    rows=st.integers(1, 9),
    size=st.sampled_from([8, 24, 576]),
    dtype=DTYPES,
    scale=st.sampled_from([0.0, 1e-3, 1.0, 1e3]),
    with_residual=st.booleans(),
)
def test_norm_is_sglangs(rows, size, dtype, scale, with_residual):
    norm = make_norm(size, dtype)
    x = (torch.randn(rows, size) * scale).to(dtype)
    residual = torch.randn(rows, size).to(dtype) if with_residual else None
    with torch.no_grad():
        found, wanted = add_rms_norm(norm, x, residual), norm.forward_native(x, residual)
    if with_residual:
        assert found[1].equal(wanted[1])
        found, wanted = found[0], wanted[0]
    assert_close(found, wanted)


def test_norm_of_a_row_does_not_depend_on_its_neighbours():
    norm = make_norm(576, torch.float32)
    x = torch.randn(8, 576)
    with torch.no_grad():
        assert all(add_rms_norm(norm, x[i : i + 1]).equal(add_rms_norm(norm, x)[i : i + 1]) for i in range(8))


@given(rows=st.integers(1, 9), query_heads=st.integers(1, 6), key_heads=st.integers(1, 3), dtype=DTYPES)
def test_rotation_is_sglangs(rows, query_heads, key_heads, dtype):
    rotary = make_rotary(dtype)
    rotation = Rotation(rotary)
    for _ in range(2):  # the second time from the kept angles, or past them
        positions = torch.randint(0, 64, (rows,))
        qkv = torch.randn(rows, (query_heads + 2 * key_heads) * 16).to(dtype)
        query, key, _ = qkv.split([query_heads * 16, key_heads * 16, key_heads * 16], -1)
        for found, wanted in zip(
            rotation(positions, query, key), rotary.forward_native(positions, query, key), strict=True
        ):
            assert_close(found, wanted)


def test_rotation_sees_positions_that_moved_in_place():
    rotary = make_rotary()
    rotation, positions = Rotation(rotary), torch.tensor([3, 9])
    query, key = torch.randn(2, 32), torch.randn(2, 16)
    rotation(positions, query, key)
    positions.add_(1)
    assert_close(rotation(positions, query, key)[0], rotary.forward_native(positions, query, key)[0])


@pytest.mark.parametrize("special", [{"is_neox_style": False}, {"rotary_dim": 8}])
def test_special_rotary_embeddings_are_left_alone(special):
    rotary = make_rotary(**special)
    before = rotary._forward_method
    lighten(rotary, is_single_rank=True)
    assert rotary._forward_method is before


def test_special_norms_are_left_alone():
    plain, special = make_norm(8, torch.float32), RMSNorm(8, var_hidden_size=4)
    before = special._forward_method
    lighten(torch.nn.ModuleList([plain, special]), is_single_rank=True)
    assert special._forward_method is before
    assert plain._forward_method.__func__ is add_rms_norm
    x = torch.randn(2, 8)
    with torch.no_grad():
        assert_close(plain(x), plain.forward_native(x))
