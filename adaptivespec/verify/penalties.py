"""Frequency, presence and repetition penalties and the minimum length, exact at every node of a draft tree.

SGLang's verification applies one state to all nodes of a tree, and moves it on once a step instead of once a token. Here a
node's state is the request's output so far and the drafted tokens on the path down to it: what plain decoding would have.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from adaptivespec.verify.tree import ancestor_mask


class Penalties(NamedTuple):
    """The penalties of a batch.

    Attributes:
        counts: ``[B, V]`` float32, how often each token is in the request's output, the last committed one included.
        lengths: ``[B]`` int64, tokens in that output.
        frequency, presence: ``[B]`` float32, subtracted a time and once; 0 for none.
        repetition: ``[B]`` float32, divides positive logits and multiplies negative ones; 1 for none.
        min_lengths: ``[B]`` int64, length before which no stop token may come; 0 for none.
        stops: ``[B, S]`` int64 tokens that end the request, padded with -1.
    """

    counts: Tensor
    lengths: Tensor
    frequency: Tensor
    presence: Tensor
    repetition: Tensor
    min_lengths: Tensor
    stops: Tensor


def apply_penalties(logits: Tensor, parent: Tensor, tokens: Tensor, penalties: Penalties) -> None:
    """Penalise the target's logits after every node. In place.

    Args:
        logits: ``[B, N, V]`` float32.
        parent: ``[B, N]`` int64, -1 for the root, whose token is the last committed one.
        tokens: ``[B, N]`` int64.
        penalties: see `Penalties`.

    Host sync: none. Graph-safe: yes. Memory: 9 bytes a logit. Source: SGLang's penalizers, additive ones first.
    """
    num_nodes = tokens.shape[1]
    on_path = ancestor_mask(parent, num_nodes - 1)
    on_path[:, :, 0] = False
    counts = penalties.counts.unsqueeze(1).repeat(1, num_nodes, 1)
    counts.scatter_add_(2, tokens.unsqueeze(1).expand_as(on_path), on_path.to(counts.dtype))
    seen = counts > 0
    logits -= counts.mul_(_per_request(penalties.frequency))
    logits -= seen * _per_request(penalties.presence)
    lengths = penalties.lengths.view(-1, 1) + on_path.sum(dim=2)
    is_short = lengths < penalties.min_lengths.view(-1, 1)
    stops = penalties.stops.unsqueeze(1).expand(-1, num_nodes, -1)
    is_forbidden = is_short.unsqueeze(2) & (stops >= 0)
    logits.scatter_add_(
        2, stops.clamp(min=0), torch.zeros_like(stops, dtype=logits.dtype).masked_fill_(is_forbidden, -math.inf)
    )
    repetition = torch.where(seen, _per_request(penalties.repetition), 1.0)
    logits.copy_(torch.where(logits < 0, logits * repetition, logits / repetition))


def _per_request(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1)
