"""Near misses: at a mismatch, a drafted token that the target finds nearly as likely as its own is taken instead.

A mismatch is a node whose target token is not among its drafted children. Its likeliest child ``c`` is a near miss where
``p(c) / p(top1) >= kappa``. A rule substitutes target tokens at every node in one pass; the tree is then walked as always,
and verification goes on below a promoted child with that child's own target row. Two rules: `promote`, the margin rule,
and `defer`, FLy.

All functions: no host sync, graph-safe, a few bytes of memory a score.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Limits(NamedTuple):
    """What a batch allows, by request.

    Attributes:
        log_kappa: ``[B]`` float32, log of the least ratio; infinity for a request that is verified strictly.
        stops: ``[B, S]`` int64 tokens that end the request, padded with -1: never promoted, and nothing in their place.
    """

    log_kappa: Tensor
    stops: Tensor


class Promotions(NamedTuple):
    """What a rule made of a batch of trees.

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


class NearMisses(NamedTuple):
    """Every node's likeliest child, and whether it may be taken.

    Attributes:
        may: ``[B, N]`` bool, the node is a mismatch and its likeliest child a near miss.
        child, token, score: ``[B, N]`` that child's index, token and score; meaningless for a leaf.
        top_score: ``[B, N]`` the highest score of the node's row.
    """

    may: Tensor
    child: Tensor
    token: Tensor
    score: Tensor
    top_score: Tensor


def log_kappa(kappa: float | None) -> float:
    """The logarithm that `Limits` wants; None, which is strict, gives infinity, and 0 minus infinity."""
    if kappa is None:
        return math.inf
    return math.log(kappa) if kappa else -math.inf


def find_near_misses(
    parent: Tensor, tokens: Tensor, target_tokens: Tensor, scores: Tensor, limits: Limits
) -> NearMisses:
    """See `NearMisses`. A row whose scores are not all finite or -inf, and one whose finite scores are all equal, has none.

    Args:
        parent: ``[B, N]`` int64, -1 for the root and for nodes that are not reached.
        tokens: ``[B, N]`` int64, the token at each node.
        target_tokens: ``[B, N]`` int64, the target's choice after each node: argmax, or drawn.
        scores: ``[B, N, V]`` float32, logits or log-probabilities after penalties, bias and grammar; -inf is forbidden.
        limits: see `Limits`.
    """
    token_scores = scores.gather(2, tokens.unsqueeze(1).expand(-1, tokens.shape[1], -1))
    child_scores = token_scores.masked_fill(~_is_child(parent), -math.inf)
    score, child = child_scores.max(dim=2)
    token = tokens.gather(1, child)
    # Of twins, which hold the same token, the walk takes the first.
    child = _is_child_with(parent, tokens, token).to(torch.int8).max(dim=2).indices
    top_score = scores.amax(dim=2)  # NaN where the row holds one
    lowest = scores.masked_fill(scores == -math.inf, math.inf).amin(dim=2)
    hit = _is_child_with(parent, tokens, target_tokens).any(dim=2)
    may = (score - top_score >= limits.log_kappa.view(-1, 1)) & (score > -math.inf) & ~hit
    may &= top_score.isfinite() & (lowest < top_score)
    may &= ~_is_stop(token, limits.stops) & ~_is_stop(target_tokens, limits.stops)
    return NearMisses(may, child, token, score, top_score)


def promote(
    parent: Tensor,
    tokens: Tensor,
    target_tokens: Tensor,
    scores: Tensor,
    limits: Limits,
    max_promotions: int = 1,
    top_k_guard: int = 0,
) -> Promotions:
    """The margin rule: take near misses. Where ``kappa`` is 1, exact ties alone.

    Args:
        parent, tokens, target_tokens, scores, limits: as in `find_near_misses`.
        max_promotions: on one path; 0 for no limit. The published rule is 1.
        top_k_guard: take only tokens among the target's ``top_k_guard`` likeliest; 0 for no guard.

    Source: AdaptiveSpec paper; more than one promotion a step, the guards and this form: this project.
    """
    misses = find_near_misses(parent, tokens, target_tokens, scores, limits)
    may = misses.may
    if top_k_guard:
        may = may & ((scores > misses.score.unsqueeze(2)).sum(dim=2) < top_k_guard)
    return _substitute(parent, tokens, target_tokens, misses._replace(may=may), scores, max_promotions)


def defer(
    parent: Tensor,
    tokens: Tensor,
    target_tokens: Tensor,
    scores: Tensor,
    limits: Limits,
    top: int = 3,
    min_entropy: float = 0.3,
    window: int = 6,
) -> Promotions:
    """FLy: take a miss where the target is undecided, and where the tokens after it are the target's own.

    Args:
        parent, tokens, target_tokens, scores, limits: as in `find_near_misses`.
        top: the entropy is that of the target's ``top`` likeliest tokens, renormalised.
        min_entropy: nats; a row below is decided.
        window: positions that the decision waits for, the mismatch included: of the promoted child's descendants a line
            of ``window - 1`` must be the target's own choice. Where the tree is not that deep, nothing is promoted.

    Source: FLy (training-free loosely speculative decoding) and its published code's values, on a single draft; for trees,
    and with the guards: this project.
    """
    misses = find_near_misses(parent, tokens, target_tokens, scores, limits)
    likeliest = scores.topk(top, dim=2).values.log_softmax(dim=2)
    entropy = -torch.xlogy(likeliest.exp(), likeliest.exp()).sum(dim=2)
    found, following = _is_child_with(parent, tokens, target_tokens).to(torch.int8).max(dim=2)
    runs = torch.ones_like(misses.may)  # of the target's own choices below each node, one longer in every round
    for _ in range(window - 1):
        runs = (found > 0) & runs.gather(1, following)
    may = misses.may & (entropy >= min_entropy) & runs.gather(1, misses.child)
    return _substitute(parent, tokens, target_tokens, misses._replace(may=may), scores, 0)


def _substitute(
    parent: Tensor, tokens: Tensor, target_tokens: Tensor, misses: NearMisses, scores: Tensor, max_promotions: int
) -> Promotions:
    above, may = parent.clamp(min=0), misses.may
    has_parent = parent >= 0
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    promoted = may.gather(1, above) & (misses.child.gather(1, above) == nodes) & has_parent
    if max_promotions:
        may = may & (_count_on_path(promoted, above) < max_promotions)
        promoted &= may.gather(1, above)
    top_score = misses.top_score.gather(1, above)
    score = scores.flatten(1).gather(1, above * scores.shape[2] + tokens).masked_fill(~has_parent, -math.inf)
    return Promotions(torch.where(may, misses.token, target_tokens), promoted, score, top_score)


def _is_child(parent: Tensor) -> Tensor:
    """``[B, N, N]`` bool, ``[b, u, c]``: node ``c`` is a child of ``u``."""
    return parent.unsqueeze(1) == torch.arange(parent.shape[1], device=parent.device).view(1, -1, 1)


def _is_child_with(parent: Tensor, tokens: Tensor, wanted: Tensor) -> Tensor:
    """``[B, N, N]`` bool, ``[b, u, c]``: node ``c`` is a child of ``u`` and holds the token ``wanted[b, u]``."""
    return _is_child(parent) & (tokens.unsqueeze(1) == wanted.unsqueeze(2))


def _is_stop(tokens: Tensor, stops: Tensor) -> Tensor:
    return (tokens.unsqueeze(2) == stops.unsqueeze(1)).any(dim=2)


def _count_on_path(marked: Tensor, above: Tensor) -> Tensor:
    """``[B, N]`` marked nodes from the root, which is never marked, down to each node, that node included."""
    count = marked.long()
    for _ in range(max(marked.shape[1] - 1, 1).bit_length()):  # every round doubles the stretch of path that is counted
        count = count + count.gather(1, above)
        above = above.gather(1, above)
    return count
