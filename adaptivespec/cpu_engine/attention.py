"""Attention over SGLang's paged cache in torch: decode, prefill, draft steps of a tree, verify and draft-extend.

One rule serves all of them: a row at position ``p`` sees the keys at positions up to ``p``; under a tree mask a drafted
row sees the whole prefix and its own ancestors. What a forward pass needs of that - cache slots and mask - is built
once in ``init_forward_metadata`` and shared by all layers. Scores are computed in float32 whatever the cache's dtype.

Batches whose requests all bring the same number of rows (everything but prefill) run as one padded batch; prefill runs
request by request, since padding would cost a square of the longest prompt.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from torch import Tensor

from adaptivespec.cpu_engine.install import BACKEND_NAME
from adaptivespec.errors import RefusedError

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True)
class KeyPlan:
    """Which keys a group of rows reads.

    Attributes:
        rows: ``slice`` of the query rows, ``B * L`` of them.
        slots: ``[B, T]`` int64 cache slots, padded with the request's own last one: what nobody sees is read all the
            same, and NaN in another request's slot would come through a weight of zero.
        bias: ``[B, 1, L, T]`` float32, 0 where a row sees a key and -inf elsewhere, or None where all see all.
    """

    rows: slice
    slots: Tensor
    bias: Tensor | None


def plan_uniform(slots: Tensor, total_lens: Tensor, num_rows: int, tree_mask: Tensor | None = None) -> list[KeyPlan]:
    """The plan of a batch in which every request brings ``num_rows`` rows, the last ones of its keys.

    Args:
        slots: ``[B, T]`` cache slots by position; entries past a request's length may be anything valid.
        total_lens: ``[B]`` keys of each request, its own rows included.
        num_rows: ``L``.
        tree_mask: ``[B, L, L]`` bool over the rows' own keys; None for a chain.

    Host sync: reads ``total_lens`` (host memory on CPU).
    """
    if num_rows == 1 and bool((total_lens == slots.shape[1]).all()):
        return [KeyPlan(slice(None), slots, None)]
    positions = torch.arange(slots.shape[1])
    slots = slots.gather(1, torch.minimum(positions, total_lens.view(-1, 1) - 1))
    first_own = (total_lens - num_rows).view(-1, 1, 1)
    if tree_mask is not None:
        own_columns = (first_own + torch.arange(num_rows)).expand(-1, num_rows, -1)
        visible = (positions < first_own).repeat(1, num_rows, 1).scatter_(2, own_columns, tree_mask)
    else:
        visible = positions <= first_own + torch.arange(num_rows).view(1, -1, 1)
    return [KeyPlan(slice(None), slots, _additive(visible))]


def plan_ragged(req_to_token: Tensor, req_pool_indices: Tensor, total_lens: Tensor, row_lens: Tensor) -> list[KeyPlan]:
    """One plan a request, causal; for prefill, where lengths differ widely."""
    plans = []
    start = 0
    for request, total, rows in zip(req_pool_indices.tolist(), total_lens.tolist(), row_lens.tolist(), strict=True):
        if rows:
            slots = req_to_token[request, :total].long().unsqueeze(0)
            visible = torch.ones(1, rows, total, dtype=torch.bool).tril_(total - rows)
            plans.append(KeyPlan(slice(start, start + rows), slots, _additive(visible) if rows > 1 else None))
        start += rows
    return plans


def attend(query: Tensor, keys: Tensor, values: Tensor, plan: KeyPlan, scaling: float) -> Tensor:
    """Scaled dot-product attention of one plan's rows, grouped heads folded into rows so that keys are not repeated.

    Args:
        query: ``[B * L, num_heads, head_dim]``.
        keys, values: ``[slots, num_kv_heads, head_dim]``, the layer's whole cache.
        plan: which slots and which of them are seen.
        scaling: factor on the scores.

    Returns:
        ``[B * L, num_heads * head_dim]`` in the dtype of ``query``.
    """
    batch, num_keys = plan.slots.shape
    num_kv_heads, head_dim = keys.shape[1:]
    rows = query.shape[0] // batch
    group = query.shape[1] // num_kv_heads
    flat = plan.slots.reshape(-1)
    k = keys.index_select(0, flat).view(batch, num_keys, num_kv_heads, head_dim).transpose(1, 2).float()
    v = values.index_select(0, flat).view(batch, num_keys, num_kv_heads, head_dim).transpose(1, 2).float()
    q = query.float().view(batch, rows, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch, num_kv_heads, group * rows, head_dim)
    bias = None if plan.bias is None else plan.bias.repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling)
    out = out.view(batch, num_kv_heads, group, rows, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(query.shape[0], -1).to(query.dtype)


def _keeps_rows_as_they_are(pool: Any) -> bool:
    """Whether ``set_kv_buffer`` would do nothing but copy rows into the layer's two buffers."""
    is_plain = type(pool) is MHATokenToKVPool and pool.kv_cache_layout == "nhd"
    return is_plain and pool.store_dtype == pool.dtype and not pool.is_quantized_kv_cache


class CpuTreeBackend(AttentionBackend):
    """SGLang attention backend ``cpu_tree``: any dtype, grouped heads, page size 1, trees of any shape.

    One instance serves every tree shape: widths are read from the batch, never from the server's settings.
    """

    def __init__(self, model_runner: "ModelRunner"):
        super().__init__()
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.has_plain_pool = _keeps_rows_as_they_are(self.token_to_kv_pool)
        self.plans: list[KeyPlan] = []

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        mode = forward_batch.forward_mode
        requests, lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        if mode.is_idle():
            self.plans = []
        elif mode.is_decode():
            self.plans = plan_uniform(self._slots(requests, lens), lens, 1)
        elif mode.is_target_verify():
            spec = forward_batch.spec_info
            width = spec.draft_token_num
            mask = None if spec.tree_topk == 1 else spec.custom_mask.view(-1, width, width)
            total = lens + width
            self.plans = plan_uniform(self._slots(requests, total), total, width, mask)
        elif mode.is_draft_extend_v2():
            width = forward_batch.input_ids.numel() // lens.numel()
            self.plans = plan_uniform(self._slots(requests, lens), lens, width)
        else:
            self.plans = plan_ragged(self.req_to_token, requests, lens, forward_batch.extend_seq_lens)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    forward_extend = forward_decode

    def support_triton(self) -> bool:
        return False

    def _forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool,
        extras: dict[str, Any],
    ) -> Tensor:
        _refuse_unsupported(layer, extras)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        if save_kv_cache and k is not None and v is not None:
            if self.has_plain_pool and k.dtype == keys.dtype:
                keys.index_copy_(0, forward_batch.out_cache_loc, k)
                values.index_copy_(0, forward_batch.out_cache_loc, v)
            else:
                loc = KVWriteLoc(forward_batch.out_cache_loc, None)
                self.token_to_kv_pool.set_kv_buffer(layer, loc, k, v)
        query = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        outs = [attend(query[plan.rows], keys, values, plan, layer.scaling) for plan in self.plans]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _slots(self, requests: Tensor, total_lens: Tensor) -> Tensor:
        return self.req_to_token[requests.long(), : int(total_lens.max())].long()


class CpuTreeMultiStepDraftBackend:
    """The draft's decode steps of a tree: ``topk`` branches a request, one child backend for each step but the last.

    Branch ``j`` of a request with ``s`` committed tokens keeps its own keys in the ``num_steps`` slots from
    ``s + j * num_steps`` on. (The layout is SGLang's.)
    """

    def __init__(self, model_runner: "ModelRunner", topk: int, num_steps: int):
        self.topk = topk
        self.num_steps = num_steps
        self.attn_backends = [CpuTreeBackend(model_runner) for _ in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        lens = forward_batch.seq_lens.view(-1, 1, 1)
        branch = torch.arange(self.topk).view(1, -1, 1)
        positions = torch.arange(int(lens.max()) + self.num_steps - 1).view(1, 1, -1)
        columns = positions + (positions >= lens) * branch * self.num_steps
        req_to_token = self.attn_backends[0].req_to_token
        columns.clamp_(max=req_to_token.shape[1] - 1)  # only past the end of shorter requests, where nothing is read
        requests = forward_batch.req_pool_indices.long().view(-1, 1, 1)
        slots = req_to_token[requests, columns].long().flatten(0, 1)
        branch_lens = forward_batch.seq_lens.repeat_interleave(self.topk)
        longest = int(branch_lens.max())
        for step, child in enumerate(self.attn_backends):
            child.plans = plan_uniform(slots[:, : longest + step + 1], branch_lens + step + 1, 1)


def _additive(visible: Tensor) -> Tensor:
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf")).unsqueeze(1)


def _refuse_unsupported(layer: "RadixAttention", extras: dict[str, Any]) -> None:
    found = None
    if layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY:
        found = "cross or encoder-only attention"
    elif layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        found = f"a sliding window of {layer.sliding_window_size}"
    elif layer.logit_cap:
        found = f"a logit cap of {layer.logit_cap}"
    elif extras.get("sinks") is not None:
        found = "attention sinks"
    elif layer.qk_head_dim != layer.v_head_dim:
        found = f"key heads of {layer.qk_head_dim} and value heads of {layer.v_head_dim}"
    if found:
        raise RefusedError(
            reason="attention",
            where=f"attention backend {BACKEND_NAME}",
            found=f"{found} in layer {layer.layer_id}",
            expected="causal self-attention over the whole context",
            fix="use --attention-backend torch_native without speculation",
        )
