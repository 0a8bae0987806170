"""The ``*_cpu`` kernels that SGLang 0.5.23 imports from ``sgl_kernel``, in torch.

Names, argument order and in-place effects are SGLang's (``sglang/kernels/ops/...``); the bodies are this project's.
None loops over requests or nodes.
"""

import ctypes

import torch
from torch import Tensor

from adaptivespec.verify.tree import (
    accept_path,
    ancestor_mask,
    links_from_parents,
    parents_from_candidates,
    parents_from_links,
)

_QLEN_ONLY = 1  # TreeMaskMode.QLEN_ONLY: the mask covers the tree alone, the prefix is visible anyway


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Write ``out_cache_loc``, request after request, into the table rows' columns ``start..end``. In place."""
    rows, columns = _ranges(req_pool_indices, start, end)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Read the table rows' columns ``start..end``, request after request, into ``out_cache_loc``. In place."""
    rows, columns = _ranges(req_pool_indices, start, end)
    out_cache_loc[: rows.numel()] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the ``topk * num_steps`` slots after each request's ``seq_lens`` into ``out_cache_loc``. In place."""
    columns = seq_lens.unsqueeze(1) + torch.arange(topk * num_steps, device=seq_lens.device)
    slots = req_to_token[req_pool_indices.long().unsqueeze(1), columns.long()]
    out_cache_loc.copy_(slots.flatten())


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, stride: int) -> None:
    """Pick each request's last accepted token out of its block of ``stride`` tokens. In place."""
    last = torch.arange(accept_lens.numel(), device=accept_lens.device) * stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Gather the cache slots of accepted nodes (``accept_index`` other than -1) to the front. In place."""
    accepted = accept_index.flatten()
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy cache rows ``src_loc`` to ``tgt_loc`` in every layer's buffer, as if all were read before any is written.

    Args:
        data_ptrs: ``[2 * layers]`` addresses of the K and V buffers.
        strides: bytes of one row in each.
        tgt_loc, src_loc: ``[n]`` row numbers.
    """
    if tgt_loc.numel() == 0:
        return
    num_rows = int(torch.maximum(tgt_loc.max(), src_loc.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (num_rows * stride)).from_address(address)
        rows = torch.frombuffer(memory, dtype=torch.uint8).view(num_rows, stride)
        rows[tgt_loc] = rows[src_loc]


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    num_draft_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Fill mask, positions and links of the trees that EAGLE drafted. In place.

    Args:
        parent_list, selected_index: see `parents_from_candidates`.
        seq_lens: ``[B]`` committed tokens: the root's position.
        tree_mask: ``[B * N * N]`` bool out.
        positions: ``[B * N]`` int64 out.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: ``[B, N]`` int64 out.

    Raises:
        NotImplementedError: a mask layout other than QLEN_ONLY, which SGLang does not use on CPU.
    """
    if int(tree_mask_mode) != _QLEN_ONLY:
        raise NotImplementedError(f"tree mask mode {tree_mask_mode}: the CPU engine reads QLEN_ONLY masks")
    batch = seq_lens.numel()
    parent = parents_from_candidates(parent_list, selected_index, topk)
    mask = ancestor_mask(parent, depth)
    tree_mask.view(mask.shape).copy_(mask)
    positions.view(batch, num_draft_tokens).copy_(mask.sum(dim=2) - 1 + seq_lens.unsqueeze(1))
    retrieve_index.copy_(torch.arange(batch * num_draft_tokens).view(batch, num_draft_tokens))
    next_token, next_sibling = links_from_parents(parent)
    retrieve_next_token.copy_(next_token)
    retrieve_next_sibling.copy_(next_sibling)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept the longest path whose tokens are the target's. In place; the spelling ``retrive`` is SGLang's.

    Args:
        predicts: ``[B * N]`` int32 out: the target's token after each accepted node, bonus included.
        accept_index: ``[B, depth + 1]`` int32 out, -1 padded: ``retrive_index`` of the accepted nodes, root first.
        accept_token_num: ``[B]`` int32 out: accepted drafts, root and bonus not counted.
        candidates, target_predict: ``[B, N]`` tokens of the tree and of the target after each node.
    """
    parent = parents_from_links(retrive_next_token, retrive_next_sibling)
    path = accept_path(parent, candidates, target_predict, accept_index.shape[1])
    index = retrive_index.gather(1, path.nodes.clamp(min=0)).masked_fill_(path.nodes < 0, -1)
    accept_index.copy_(index)
    accept_token_num.copy_(path.num_accepted)
    accepted = retrive_index[path.is_accepted]
    predicts[accepted] = target_predict[path.is_accepted].to(predicts.dtype)


def rotate_input_ids_cpu(*_args: object, **_kwargs: object) -> None:
    """Belongs to multi-layer EAGLE, which this engine does not run.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "multi-layer EAGLE does not run on adaptivespec's CPU engine; use --speculative-algorithm EAGLE3"
    )


def _ranges(req_pool_indices: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every element of ``rows[i], start[i]..end[i]``, concatenated."""
    start = start.long()
    lens = end.long() - start
    rows = torch.repeat_interleave(req_pool_indices.long(), lens)
    first = lens.cumsum(0) - lens  # where each request's run begins in the concatenation
    columns = torch.arange(rows.numel(), device=rows.device) + torch.repeat_interleave(start - first, lens)
    return rows, columns
