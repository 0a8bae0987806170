"""Matrix products of a few rows with half-precision weights, the way decoding needs them.

FBGEMM's kernels (part of torch) read fp16 weights, widen them in registers and accumulate in float32. For up to some 16
rows that takes half the time of torch's own bfloat16 product on a processor with bfloat16 instructions; on one without,
where each further row costs torch as much as the first and verifying a tree could never pay, any number of rows is
faster so. A bfloat16 weight fits fp16 exactly when its magnitude lies between 2^-14 and 65504, and to within 2^-25
below; so the result differs from torch's own only in the order of summation.

Cost: the packed copy adds 2 bytes a weight to the model's own 2.
"""

import functools
import logging

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_FP16_MAX = 65504.0
_HALF_DTYPES = (torch.bfloat16, torch.float16)
_MOST_ROWS = 16  # at which this is not slower than torch's product by the processor's own instructions; measured
_generation = 0  # of the model's weights; a packed copy of an older one is stale


def is_available() -> bool:
    """Whether this build of torch has FBGEMM's kernels."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def is_faster(x: Tensor) -> bool:
    """Whether to multiply ``x``, ``[..., in]`` of half precision, by `linear` and not by torch."""
    return x.numel() <= _MOST_ROWS * x.shape[-1] or not _has_instructions(x.dtype)


@functools.cache
def _has_instructions(dtype: torch.dtype) -> bool:
    """Whether the processor has products of this dtype. (oneDNN also says yes where it emulates them by AVX-512.)"""
    names = ("avx512_bf16", "amx_bf16") if dtype == torch.bfloat16 else ("avx512_fp16", "amx_fp16")
    return any(torch.cpu.get_capabilities().get(name) for name in names)


def invalidate() -> None:
    """Forget every packed copy, since weights have been changed in place."""
    global _generation
    _generation += 1


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """``x @ weight.T + bias`` through a packed copy of ``weight``, made at the first call and kept on the tensor.

    Args:
        x: ``[..., in]`` in the dtype of ``weight``.
        weight: ``[out, in]`` bfloat16 or float16.
        bias: ``[out]`` or None.

    Returns:
        ``[..., out]`` in the dtype of ``x``, or None where this form does not apply: another dtype, or weights beyond
        fp16's range (said once in the log).
    """
    if weight.dtype not in _HALF_DTYPES or x.dtype != weight.dtype or x.numel() == 0:
        return None
    packed = _packed(weight)
    if packed is None:
        return None
    out = torch.ops.quantized.linear_dynamic_fp16.default(x.float(), packed)  # .default: no search for the overload
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def _packed(weight: Tensor) -> "torch.ScriptObject | None":
    kept = getattr(weight, "_adaptivespec_packed", None)
    if kept is not None and kept[0] == _generation:
        return kept[1]
    packed = None
    values = weight.detach()
    if float(values.abs().max()) <= _FP16_MAX:
        packed = torch.ops.quantized.linear_prepack_fp16(values.float(), None)
    else:
        logger.warning(
            "a weight of shape %s exceeds fp16's range; it is multiplied by torch's own kernel", tuple(weight.shape)
        )
    weight._adaptivespec_packed = (_generation, packed)  # type: ignore[attr-defined]
    return packed
