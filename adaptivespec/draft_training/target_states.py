"""What the target knows about each corpus token, computed once and kept on disk."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adaptivespec.draft_training.corpus import CorpusError, Row

NUM_AUX = 3


def aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers whose inputs EAGLE-3 fuses, as SGLang picks them: 2, L/2, L-3."""
    return 2, num_layers // 2, num_layers - 3


@torch.no_grad()
def target_forward(model: Any, tokens: Tensor) -> Tensor:
    """Hidden states of the target on right-padded rows; the causal mask alone keeps the padding out of real tokens.

    Layers are called one by one, since a hook or `output_hidden_states` would not be safe from two threads.

    Args:
        model: the target's `LlamaModel` (no head).
        tokens: int64 [B, T].

    Returns:
        [B, T, NUM_AUX + 1, H]: the inputs of the aux layers, then the last state after the final norm.
    """
    hidden = model.embed_tokens(tokens)
    positions = torch.arange(tokens.shape[1])[None]
    rotary = model.rotary_emb(hidden, positions)
    kept = []
    for index, layer in enumerate(model.layers):
        if index in aux_layers(len(model.layers)):
            kept.append(hidden)
        hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    return torch.stack([*kept, model.norm(hidden)], dim=2)


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
        states = target_forward(self.model, tokens)
        for slot, i in enumerate(indices):
            self._states[self.starts[i] : self.starts[i + 1]] = states[slot, : len(self.rows[i])].to(torch.bfloat16)
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
