"""What the target knows about each corpus token, computed once and kept on disk."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from adaptivespec.draft_training.attention import Context
from adaptivespec.draft_training.corpus import CorpusError, Row

NUM_AUX = 3


def aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers whose inputs EAGLE-3 fuses, as SGLang picks them: 2, L/2, L-3."""
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True)
class Prefix:
    """Tokens that every row begins with (the chat template's system turn), worked out once.

    Attributes:
        states: [P, NUM_AUX + 1, H]; keys, values: per layer, [1, kv_heads, P, head_dim], rotated.
    """

    states: Tensor
    keys: list[Tensor]
    values: list[Tensor]


@torch.no_grad()
def target_forward(model: Any, tokens: Tensor, prefix: Prefix | None = None) -> tuple[Tensor, Prefix]:
    """Hidden states of a Llama target on right-padded rows; the causal mask alone keeps padding out of real tokens.

    The layers are spelled out for the shared prefix, and since hooks would not be safe from two threads.

    Args:
        model: the target's `LlamaModel` (no head).
        tokens: int64 [B, T], what follows the prefix.

    Returns:
        [B, T, NUM_AUX + 1, H]: the inputs of the aux layers, then the last state after the final norm; for B = 1
        what makes these tokens the prefix of further calls.
    """
    hidden = model.embed_tokens(tokens)
    start = len(prefix.states) if prefix else 0
    positions = torch.arange(start, start + tokens.shape[1])[None]
    cos, sin = model.rotary_emb(hidden, positions)
    kept, all_keys, all_values = [], [], []
    for index, layer in enumerate(model.layers):
        if index in aux_layers(len(model.layers)):
            kept.append(hidden)
        attn, x = layer.self_attn, layer.input_layernorm(hidden)
        queries, keys, values = (
            project(x).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
            for project in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
        if prefix:
            keys = torch.cat((prefix.keys[index].expand(len(tokens), -1, -1, -1), keys), dim=2)
            values = torch.cat((prefix.values[index].expand(len(tokens), -1, -1, -1), values), dim=2)
        all_keys.append(keys)
        all_values.append(values)
        hidden = hidden + attn.o_proj(Context(keys, values, positions).attend(queries))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    states = torch.stack([*kept, model.norm(hidden)], dim=2)
    return states, Prefix(states[0], all_keys, all_values)


def common_prefix(rows: list[Row]) -> tuple[int, ...]:
    """The tokens that all prompts begin with."""
    lowest, highest = min(row.prompt_ids for row in rows), max(row.prompt_ids for row in rows)
    same = [a == b for a, b in zip(lowest, highest, strict=False)]
    return lowest[: [*same, False].index(False)]


class TargetStates:
    """Target states of the corpus rows, bf16, in a file that fills as rows are asked for and survives restarts.

    About 4.6 kB a token at hidden size 576. Rows asked for by two threads at once must be different rows.
    """

    def __init__(self, folder: Path, model: Any, rows: list[Row], fingerprint: str) -> None:
        """
        Args:
            folder: where the file lies or will lie.
            model: the target's `LlamaModel`, float32.
            rows: the corpus, in the order that the file follows.
            fingerprint: says which target and corpus the states belong to; a folder of another one is refused.
        """
        self.model, self.rows = model, rows
        self.starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
        folder.mkdir(parents=True, exist_ok=True)
        _check_owner(folder / "owner.json", {"fingerprint": fingerprint, "num_tokens": int(self.starts[-1])})
        shape = (int(self.starts[-1]), NUM_AUX + 1, model.config.hidden_size)
        self._states = torch.from_numpy(_open_map(folder / "states.bin", np.int16, shape)).view(torch.bfloat16)
        _, self._prefix = target_forward(model, torch.tensor([common_prefix(rows)]))
        self._done = _open_map(folder / "done.bin", np.bool_, (len(rows),))

    def get(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Tokens and states of some rows, right-padded with zeros to the longest of them.

        Returns:
            tokens int64 [B, T]; states float32 [B, T, NUM_AUX + 1, H].
        """
        longest = max(len(self.rows[i]) for i in indices)
        tokens = torch.zeros(len(indices), longest, dtype=torch.long)
        for slot, i in enumerate(indices):
            tokens[slot, : len(self.rows[i])] = torch.tensor(self.rows[i].token_ids)
        if not self._done[indices].all():
            self._fill(indices, tokens)
        states = torch.zeros(len(indices), longest, *self._states.shape[1:])
        for slot, i in enumerate(indices):
            states[slot, : len(self.rows[i])] = self._states[self.starts[i] : self.starts[i + 1]]
        return tokens, states

    def _fill(self, indices: list[int], tokens: Tensor) -> None:
        shared = len(self._prefix.states)
        states, _ = target_forward(self.model, tokens[:, shared:], self._prefix)
        for slot, i in enumerate(indices):
            start, end = self.starts[i : i + 2]
            self._states[start : start + shared] = self._prefix.states.to(torch.bfloat16)
            self._states[start + shared : end] = states[slot, : end - start - shared].to(torch.bfloat16)
        self._done[indices] = True


def _check_owner(path: Path, owner: dict[str, Any]) -> None:
    if not path.exists():
        path.write_text(json.dumps(owner))
    elif (found := json.loads(path.read_text())) != owner:
        raise CorpusError(
            where=f"target states in {path.parent}",
            found=f"those of {found}",
            expected=f"those of {owner}",
            fix="delete that folder or name another",
        )


def _open_map(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    return np.memmap(path, dtype=dtype, mode="r+" if path.exists() else "w+", shape=shape)
