"""Drawing tokens from target distributions with coins that depend on nothing but seed, position and token.

SGLang's verification on CPU commits the argmax whatever the temperature, and its CUDA kernel spends coins in an order
that depends on the tree. Here every row of a tree draws its token from its own target distribution first, and the tree
is then walked as in greedy decoding. A row's coin belongs to (seed, absolute position): the same request draws the same
tokens whatever its neighbours and whatever the shapes. The probability that a child is accepted is the target's
probability of its token, exactly as with SGLang's kernel.
"""

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF


def draw_tokens(
    probs: Tensor, seeds: Tensor, positions: Tensor, top_ks: Tensor | None, top_ps: Tensor | None, min_ps: Tensor | None
) -> Tensor:
    """One token a row, drawn from ``probs`` after top-k, top-p and min-p.

    The filters are SGLang's joint ones: each looks at ``probs`` as given, in descending order; the most probable token
    always stays. Among equal probabilities the sort decides. A row with ``top_k`` 1 gets its most probable token.

    Args:
        probs: ``[R, V]`` float32, rows summing to one.
        seeds: ``[R]`` int64.
        positions: ``[R]`` integer position of the token that the row follows.
        top_ks: ``[R]`` integer; ``V`` or more keeps all; None where no row filters.
        top_ps: ``[R]`` in (0, 1], or None where no row filters.
        min_ps: ``[R]`` in [0, 1), or None where no row filters.

    Returns:
        ``[R]`` int64.

    Host sync: none. Graph-safe: yes. Source: this project (an exponential race, which is the Gumbel-max trick).
    """
    kept = filter_probs(probs, top_ks, top_ps, min_ps)
    return (kept / exponential_noise(seeds, positions, probs.shape[1])).argmax(dim=1)


def filter_probs(probs: Tensor, top_ks: Tensor | None, top_ps: Tensor | None, min_ps: Tensor | None) -> Tensor:
    """``probs`` with everything set to zero that top-k, top-p or min-p excludes; not renormalised. Rows that filter nothing are
    left as they are, whatever their neighbours do.

    Args, source: see `draw_tokens`. Host sync: none. Graph-safe: yes.
    """
    if top_ks is None and top_ps is None and min_ps is None:
        return probs
    ordered, index = probs.sort(dim=1, descending=True, stable=True)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if top_ks is not None:
        keep &= torch.arange(probs.shape[1], device=probs.device) < top_ks.view(-1, 1)
    if top_ps is not None:
        # The sum may pass 1 by rounding.
        keep &= ((ordered.cumsum(dim=1) - ordered) <= top_ps.view(-1, 1)) | (top_ps.view(-1, 1) >= 1)
    if min_ps is not None:
        keep &= ordered >= ordered[:, :1] * min_ps.view(-1, 1)
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter_(1, index, ordered * keep)


def exponential_noise(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Standard exponential variates, a pure function of (seed, position, token).

    Args:
        seeds: ``[R]`` int64.
        positions: ``[R]`` integer.
        num_tokens: ``V``.

    Returns:
        ``[R, V]`` float32, above zero. Small values, which decide the race, keep full relative precision.

    Host sync: none. Graph-safe: yes. Source: MurmurHash3's 32-bit finaliser, public domain.
    """
    tokens = torch.arange(num_tokens, device=seeds.device)
    low, high = seeds & _MASK32, (seeds >> 32) & _MASK32
    row = _mix32(_mix32(_mix32(low) ^ high) ^ (positions.to(torch.int64) & _MASK32))
    hashed = _mix32(_mix32(row.view(-1, 1) ^ _mix32(tokens + 0x9E3779B9)))
    return -torch.log1p(-((hashed.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24))


def _mix32(x: Tensor) -> Tensor:
    """MurmurHash3's ``fmix32`` on int64 tensors that hold 32-bit values."""
    x = x & _MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK32
    return x ^ (x >> 16)
