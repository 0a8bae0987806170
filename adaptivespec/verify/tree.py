"""Token trees as tensors: parents, ancestors, links between siblings, and the path that verification accepts.

A tree has ``N`` nodes, node 0 is the root (the last committed token), and a parent's index is smaller than its
children's. Trees come in batches ``[B, N]``; ``-1`` says "none". Every function is free of host reads and of loops over
rows or nodes (loops run over log2 of the depth), so all are graph-safe.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class AcceptedPath(NamedTuple):
    """What a verification accepted, per tree of the batch.

    Attributes:
        nodes: ``[B, max_path]`` int64, node indices from the root down, ``-1`` after the last.
        num_accepted: ``[B]`` int64, accepted drafted nodes; the root is not counted.
        is_accepted: ``[B, N]`` bool, the root included.
    """

    nodes: Tensor
    num_accepted: Tensor
    is_accepted: Tensor


def parents_from_candidates(parent_list: Tensor, selected: Tensor, topk: int) -> Tensor:
    """The parent of every node of trees in the form that EAGLE's drafting leaves behind.

    Candidate ``c`` belongs to block ``c // topk``: block 0 holds the root's children, block ``t`` the children of the
    candidate ``parent_list[b, t]``. ``selected`` are the candidates that became nodes ``1..N-1``, ascending.

    Args:
        parent_list: ``[B, T]`` int64 candidate ids; entry 0 is the root's and is not read. ``T`` may be 0 for a tree
            of depth one.
        selected: ``[B, N-1]`` int64 candidate ids.
        topk: children kept per expanded node.

    Returns:
        ``[B, N]`` int64; ``-1`` for the root, and for a node whose parent was not selected: where scores tie exactly, a
        child may be selected before its parent.

    Host sync: none. Graph-safe: yes. Source: SGLang 0.5.23, ``organize_draft_results`` and ``build_tree``.
    """
    root = torch.full_like(selected[:, :1], -1)
    block = selected // topk
    if parent_list.shape[1] == 0:
        return torch.cat([root, torch.zeros_like(selected)], dim=1)
    parent_candidate = parent_list.gather(1, block)
    parent = _first_true(parent_candidate.unsqueeze(2) == selected.unsqueeze(1))
    parent = torch.where(parent < 0, parent, parent + 1)
    return torch.cat([root, parent.masked_fill_(block == 0, 0)], dim=1)


def parents_from_links(next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """The parent of every node of trees given as first-child and next-sibling links.

    Args:
        next_token: ``[B, N]`` int64, first child or ``-1``.
        next_sibling: ``[B, N]`` int64, next child of the same parent or ``-1``.

    Returns:
        ``[B, N]`` int64; ``-1`` for the root and for nodes that no link reaches.

    Host sync: none. Graph-safe: yes. Source: this project (pointer doubling along the sibling lists).
    """
    num_nodes = next_token.shape[1]
    nodes = torch.arange(num_nodes, device=next_token.device).expand_as(next_token)
    first_of = _scatter_sources(next_token, nodes)  # parent, at each first child
    head = _scatter_sources(next_sibling, nodes)  # previous sibling ...
    head = torch.where(head < 0, nodes, head)
    for _ in range(max(num_nodes - 1, 1).bit_length()):  # ... doubled until it is the first one
        head = head.gather(1, head)
    return first_of.gather(1, head)


def links_from_parents(parent: Tensor) -> tuple[Tensor, Tensor]:
    """First-child and next-sibling links, both in order of node index; no link leads to a node without a parent.

    Args:
        parent: ``[B, N]`` int64, ``-1`` for the root and for nodes that are not reached.

    Returns:
        ``(next_token, next_sibling)``, each ``[B, N]`` int64 with ``-1`` for none.

    Host sync: none. Graph-safe: yes. Source: SGLang's ``retrieve_next_token`` and ``retrieve_next_sibling``.
    """
    nodes = torch.arange(parent.shape[1], device=parent.device)
    is_child = parent.unsqueeze(1) == nodes.view(1, -1, 1)  # [b, i, j]: j is a child of i
    is_sibling = (parent.unsqueeze(1) == parent.unsqueeze(2)) & (parent >= 0).unsqueeze(1)
    is_later_sibling = is_sibling & (nodes.view(1, 1, -1) > nodes.view(1, -1, 1))
    return _first_true(is_child), _first_true(is_later_sibling)


def ancestor_mask(parent: Tensor, max_depth: int) -> Tensor:
    """Which nodes each node may attend to: itself and its ancestors.

    Args:
        parent: ``[B, N]`` int64, ``-1`` for the root.
        max_depth: depth of the deepest possible node.

    Returns:
        ``[B, N, N]`` bool; ``[b, i, j]`` says that ``j`` is ``i`` or above it. The depth of a node is the number of
        true entries in its row less one.

    Host sync: none. Graph-safe: yes. Source: this project.
    """
    nodes = torch.arange(parent.shape[1], device=parent.device)
    step = (parent.unsqueeze(2) == nodes) | (nodes.unsqueeze(1) == nodes)
    reach = step.float()
    for _ in range(max(max_depth - 1, 0).bit_length()):
        reach = (reach @ reach).clamp_(max=1.0)
    return reach > 0


def accept_path(parent: Tensor, tokens: Tensor, target_tokens: Tensor, max_path: int) -> AcceptedPath:
    """Walk down each tree as long as the target's token is among the children.

    A child is accepted when its parent is and it holds the token that the target chose after the parent. Of siblings
    with the same token (a draft vocabulary may map two ids to one token) the first is taken.

    Args:
        parent: ``[B, N]`` int64, ``-1`` for the root; nodes other than the root with ``-1`` are never accepted.
        tokens: ``[B, N]`` the token at each node.
        target_tokens: ``[B, N]`` the target's choice after each node.
        max_path: columns of ``nodes``: depth of the tree plus one.

    Returns:
        `AcceptedPath`. The bonus token is ``target_tokens`` at the last accepted node.

    Host sync: none. Graph-safe: yes. Source: SGLang's ``verify_tree_greedy``; this form is this project's.
    """
    num_nodes = parent.shape[1]
    nodes = torch.arange(num_nodes, device=parent.device)
    above = parent.clamp(min=0)
    is_twin = (parent.unsqueeze(1) == parent.unsqueeze(2)) & (tokens.unsqueeze(1) == tokens.unsqueeze(2))
    has_earlier_twin = (is_twin & (nodes.view(1, 1, -1) < nodes.view(1, -1, 1))).any(dim=2)
    accepted = (tokens == target_tokens.gather(1, above)) & (parent >= 0) & ~has_earlier_twin
    accepted[:, 0] = True
    for _ in range(max(max_path - 1, 1).bit_length()):  # a node counts if its whole line of ancestors does
        accepted = accepted & accepted.gather(1, above)
        above = above.gather(1, above)
    # Parents come before children, so the path in order is the accepted indices sorted.
    path = torch.where(accepted, nodes, num_nodes).sort(dim=1).values[:, :max_path]
    if path.shape[1] < max_path:
        path = torch.nn.functional.pad(path, (0, max_path - path.shape[1]), value=num_nodes)
    return AcceptedPath(path.masked_fill(path == num_nodes, -1), accepted.sum(dim=1) - 1, accepted)


def nodes_of_rows(rows: Tensor, num_nodes: int) -> Tensor:
    """Node in its own tree of each row of the flattened batch, node 0 for "none".

    Args:
        rows: ``[B, P]`` integer, ``b * num_nodes + node`` or ``-1``.

    Returns:
        ``[B, P]`` int64.

    Host sync: none. Graph-safe: yes. Source: SGLang's ``accept_index`` counts through the batch.
    """
    first = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1) * num_nodes
    return (rows.long() - first).clamp(min=0)


def _first_true(mask: Tensor) -> Tensor:
    found, index = mask.to(torch.int8).max(dim=-1)
    return index.masked_fill_(found == 0, -1)


def _scatter_sources(links: Tensor, sources: Tensor) -> Tensor:
    """``out[b, links[b, i]] = sources[b, i]`` where a link exists, ``-1`` elsewhere."""
    batch, num_nodes = links.shape
    out = torch.full((batch, num_nodes + 1), -1, dtype=links.dtype, device=links.device)
    slot = torch.where(links < 0, num_nodes, links)  # the extra column swallows "none"
    return out.scatter_(1, slot, sources.to(links.dtype))[:, :num_nodes]
