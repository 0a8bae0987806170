"""Norm, rotary embedding and the way around the products in fewer operators and calls than SGLang's torch forms.

A small model on a CPU spends more time in the dispatch of small operators than in its matrix products: eleven operators
a norm, about thirty a rotary embedding, and in every layer questions about ranks that do not exist. The results differ
from SGLang's in the order of rounding only.
"""

from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

_SIGNS = torch.tensor([[1.0], [-1.0]])


def lighten(model: nn.Module, is_single_rank: bool) -> None:
    """Give the plain norms, rotary embeddings and, on a single rank, linear layers of ``model`` the forms below.

    Idempotent. Subclasses and special settings are left alone.
    """
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    for module in model.modules():
        if type(module) is RMSNorm and _is_plain_norm(module):
            module._forward_method = MethodType(add_rms_norm, module)
        elif type(module) is RotaryEmbedding and module.is_neox_style and module.rotary_dim == module.head_size:
            module._forward_method = Rotation(module)
        elif is_single_rank and isinstance(module, LinearBase) and _is_plain_linear(module):
            module.forward = MethodType(multiply, module)


def _is_plain_linear(layer: "LinearBase") -> bool:
    from sglang.srt.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    if layer.skip_bias_add or type(layer.quant_method) is not UnquantizedLinearMethod:
        return False
    if type(layer) is RowParallelLinear:
        return bool(layer.input_is_parallel)
    is_column = type(layer) in (ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear)
    return is_column and not layer.gather_output


def multiply(
    layer: "LinearBase",
    x: Tensor,
    skip_all_reduce: bool = False,
    forward_batch: Any = None,
    output_tensor: Tensor | None = None,
) -> tuple[Tensor, None]:
    """``x @ weight.T + bias`` as the ``forward`` of SGLang's column- and row-parallel layers on a single rank."""
    if output_tensor is not None:
        return type(layer).forward(layer, x, skip_all_reduce, forward_batch, output_tensor)
    return layer.quant_method.apply(layer, x, layer.bias), None


def _is_plain_norm(norm: "RMSNorm") -> bool:
    special = (
        norm.variance_size_override,
        norm.cast_x_before_out_mul,
        norm.fp32_residual,
        norm.override_orig_dtype,
    )
    return not any(special)


def add_rms_norm(
    norm: "RMSNorm",
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: nn.Module | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMS norm of ``x`` or, with a residual, of their sum, as `RMSNorm.forward_native`.

    The root mean square of ``x`` is the standard deviation of ``(x, -x)``, whose mean is zero: what torch has one fused
    operator for.

    Args:
        x, residual: ``[..., H]`` in the model's dtype.

    Returns:
        The norm ``[..., H]``; with a residual also the sum.
    """
    if post_residual_addition is not None:
        return norm.forward_native(x, residual, post_residual_addition, quant_linear)
    if residual is not None:
        x = residual = x + residual
    pair = x.unsqueeze(-2) * _SIGNS.to(x.dtype)
    out = F.layer_norm(pair, pair.shape[-2:], None, None, norm.variance_epsilon).select(-2, 0) * norm.weight
    return out if residual is None else (out, residual)


class Rotation:
    """Rotates query and key together, with the angles of the last positions at hand: all layers of a pass share them.

    A head's halves ``(a, b)`` become ``(a cos - b sin, b cos + a sin)``.
    """

    def __init__(self, rotary: "RotaryEmbedding"):
        self.rotary = rotary
        self.positions = torch.empty(0, dtype=torch.int64)
        self.cos = self.sin = torch.empty(0)

    def __call__(
        self,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        offsets: Tensor | None = None,
        fused_set_kv_buffer_arg: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """As `RotaryEmbedding.forward_native`: ``positions`` ``[T]``, ``query`` and ``key`` ``[T, heads * head_size]``."""
        if offsets is not None or fused_set_kv_buffer_arg is not None or query.dim() != 2:
            return self.rotary.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)
        self._set_angles(positions, query.dtype)
        size = self.rotary.head_size
        halves = torch.cat((query, key), -1).view(query.shape[0], -1, 2, size // 2)
        out = torch.addcmul(halves * self.cos, halves.flip(2), self.sin).flatten(1)
        return out[:, : query.shape[1]], out[:, query.shape[1] :]

    def _set_angles(self, positions: Tensor, dtype: torch.dtype) -> None:
        # By value: SGLang moves the positions of draft steps on in place.
        if self.cos.dtype == dtype and torch.equal(self.positions, positions):
            return
        cos, sin = self.rotary.cos_sin_cache.index_select(0, positions).to(dtype).unsqueeze(1).unsqueeze(1).chunk(2, -1)
        self.positions = positions.clone()
        self.cos, self.sin = cos, torch.cat((-sin, sin), 2)
