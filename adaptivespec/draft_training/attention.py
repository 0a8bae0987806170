"""Attention of rows to shared keys up to their place, and to keys of their own."""

import math

import torch
from torch import Tensor


class Context:
    """Keys and values that the rows of a batch attend to: the shared ones up to each row, and each row's own steps."""

    def __init__(self, keys: Tensor, values: Tensor, row_positions: Tensor) -> None:
        """
        Args:
            keys, values: [B, kv_heads, T, head_dim] of all tokens.
            row_positions: int64 [B, R]; row r sees tokens 0..row_positions[r].
        """
        self.keys, self.values = keys, values
        self.hidden_mask = torch.arange(keys.shape[2]) > row_positions[..., None]
        self.own: list[tuple[Tensor, Tensor]] = []

    def append_step(self, keys: Tensor, values: Tensor) -> None:
        """Add one key and value per row, [B, kv_heads, R, head_dim], seen by that row alone."""
        self.own.append((keys, values))

    def attend(self, queries: Tensor) -> Tensor:
        """Softmax attention of queries [B, heads, R, head_dim]; returns [B, R, heads * head_dim]."""
        batch, heads, rows, dim = queries.shape
        kv_heads = self.keys.shape[1]
        grouped = queries.view(batch, kv_heads, heads // kv_heads, rows, dim) / math.sqrt(dim)
        flat = grouped.reshape(batch, kv_heads, -1, dim)
        scores = (flat @ self.keys.transpose(-1, -2)).view(*grouped.shape[:-1], -1)
        scores = scores.masked_fill(self.hidden_mask[:, None, None], -torch.inf)
        own = [(grouped * keys[:, :, None]).sum(-1, keepdim=True) for keys, _ in self.own]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        shared = weights[..., : self.keys.shape[2]].reshape(batch, kv_heads, -1, self.keys.shape[2])
        out = (shared @ self.values).view(grouped.shape)
        for index, (_, values) in enumerate(self.own):
            out = out + weights[..., self.keys.shape[2] + index, None] * values[:, :, None]
        return out.reshape(batch, heads, rows, dim).transpose(1, 2).reshape(batch, rows, heads * dim)
