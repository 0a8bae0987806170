"""The margin rule: at a mismatch, a drafted token that the target finds nearly as likely as its own is taken instead.

A mismatch is a node whose target token is not among its drafted children. Its likeliest child ``c`` is promoted where
``p(c) / p(top1) >= kappa``. The rule substitutes target tokens at every node in one pass; the tree is then walked as
always, and verification goes on below a promoted child with that child's own target row.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class MarginLimits(NamedTuple):
    """What a batch allows, by request.

    Attributes:
        log_kappa: ``[B]`` float32, log of the least ratio; infinity for a request that is verified strictly.
        stops: ``[B, S]`` int64 tokens that end the request, padded with -1: never promoted, and nothing in their place.
    """

    log_kappa: Tensor
    stops: Tensor


class Promotions(NamedTuple):
    """What the rule made of a batch of trees.

    Attributes:
        target_tokens: ``[B, N]`` the target's choice after each node, a promoted child's token where there is one.
        promoted: ``[B, N]`` bool, nodes whose token stands in for the target's; only those that a walk accepts count.
        score: ``[B, N]`` float32, the score of every node's token in its parent's row; -inf for the root.
        top_score: ``[B, N]`` float32, the highest of that row.
    """

    target_tokens: Tensor
    promoted: Tensor
    score: Tensor
    top_score: Tensor


def log_kappa(kappa: float | None) -> float:
    """The logarithm that `MarginLimits` wants; None, which is strict, gives infinity."""
    return math.inf if kappa is None else math.log(kappa)


def promote(
    parent: Tensor,
    tokens: Tensor,
    target_tokens: Tensor,
    scores: Tensor,
    limits: MarginLimits,
    max_promotions: int = 1,
    top_k_guard: int = 0,
) -> Promotions:
    """Substitute near misses for the target's tokens.

    A row whose scores are not all finite or -inf, and one whose finite scores are all equal, promotes nothing. Where
    ``kappa`` is 1, exact ties alone are promoted.

    Args:
        parent: ``[B, N]`` int64, -1 for the root and for nodes that are not reached.
        tokens: ``[B, N]`` int64, the token at each node.
        target_tokens: ``[B, N]`` int64, the target's choice after each node: argmax, or drawn.
        scores: ``[B, N, V]`` float32, logits or log-probabilities after penalties, bias and grammar; -inf is forbidden.
        limits: see `MarginLimits`.
        max_promotions: on one path; 0 for no limit. The published rule is 1.
        top_k_guard: promote only tokens among the target's ``top_k_guard`` likeliest; 0 for no guard.

    Host sync: none. Graph-safe: yes. Memory: a few bytes a score. Source: AdaptiveSpec paper; more than one promotion a
    step, the guards and this form: this project.
    """
    num_nodes = tokens.shape[1]
    above = parent.clamp(min=0)
    has_parent = parent >= 0
    is_child = parent.unsqueeze(1) == torch.arange(num_nodes, device=parent.device).view(1, -1, 1)  # [b, u, c]
    child_scores = scores.gather(2, tokens.unsqueeze(1).expand(-1, num_nodes, -1)).masked_fill(~is_child, -math.inf)
    best_score, best_child = child_scores.max(dim=2)
    best_token = tokens.gather(1, best_child)
    top_score = scores.amax(dim=2)  # NaN where the row holds one

    lowest = scores.masked_fill(scores == -math.inf, math.inf).amin(dim=2)
    hit = (is_child & (tokens.unsqueeze(1) == target_tokens.unsqueeze(2))).any(dim=2)
    is_near = best_score - top_score >= limits.log_kappa.view(-1, 1)
    may = is_near & ~hit & top_score.isfinite() & (lowest < top_score)
    may &= ~_is_stop(best_token, limits.stops) & ~_is_stop(target_tokens, limits.stops)
    if top_k_guard:
        may &= (scores > best_score.unsqueeze(2)).sum(dim=2) < top_k_guard

    # By token, not by index: of twins, which hold the same token, the walk takes the first.
    promoted = may.gather(1, above) & (tokens == best_token.gather(1, above)) & has_parent
    if max_promotions:
        may &= _count_on_path(promoted, above) < max_promotions
        promoted &= may.gather(1, above)
    score = child_scores.gather(1, above.unsqueeze(1)).squeeze(1).masked_fill(~has_parent, -math.inf)
    return Promotions(torch.where(may, best_token, target_tokens), promoted, score, top_score.gather(1, above))


def _is_stop(tokens: Tensor, stops: Tensor) -> Tensor:
    return (tokens.unsqueeze(2) == stops.unsqueeze(1)).any(dim=2)


def _count_on_path(marked: Tensor, above: Tensor) -> Tensor:
    """``[B, N]`` marked nodes from the root, which is never marked, down to each node, that node included."""
    count = marked.long()
    for _ in range(max(marked.shape[1] - 1, 1).bit_length()):  # every round doubles the stretch of path that is counted
        count = count + count.gather(1, above)
        above = above.gather(1, above)
    return count
