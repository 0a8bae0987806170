"""What training does about drift: the draft tuned on text of the new domain, before it serves or while it does.

The references that the DRIFT memory, which trains nothing, is held against.
"""

import copy
import random
from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from adaptivespec.draft_training.model import Eagle3Draft
from adaptivespec.draft_training.ttt import Batch, LossOptions, ttt_loss


class Tuner:
    """Trains a copy of a draft by AdamW with the loss that made it.

    Args:
        draft: is left as it is.
        embed: the target's embedding table, ``[V, H]``.
        learning_rate: constant.
        num_steps: draft steps of the loss.
        seed: of the draws of the loss.

    Attributes:
        draft: the copy.
    """

    def __init__(self, draft: Eagle3Draft, embed: Tensor, learning_rate: float, num_steps: int, seed: int = 0) -> None:
        self.draft = copy.deepcopy(draft).requires_grad_(True)
        self._embed = embed
        self._options = LossOptions(num_steps=num_steps, row_share=1.0, dropout=0.0)
        self._generator = torch.Generator().manual_seed(seed)
        self._optimizer = torch.optim.AdamW(self.draft.parameters(), lr=learning_rate, weight_decay=0.0)

    def step(self, batches: Sequence[Batch]) -> float:
        """One optimizer step on the mean loss of some batches; gives that loss."""
        self._optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss = ttt_loss(self.draft, self._embed, batch, self._options, self._generator) / len(batches)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        self._optimizer.step()
        return total


def tuned_draft(
    draft: Eagle3Draft,
    embed: Tensor,
    answers: Sequence[Batch],
    optimizer_steps: int,
    learning_rate: float = 3e-4,
    num_steps: int = 3,
    batch_size: int = 4,
) -> Eagle3Draft:
    """A copy of the draft, trained on answers of the new domain: what one would do who knew the domain beforehand.

    Args:
        answers: one row each.
    """
    tuner, rng = Tuner(draft, embed, learning_rate, num_steps), random.Random(0)
    for _ in tqdm(range(optimizer_steps), desc="tuning"):
        tuner.step(rng.sample(answers, min(batch_size, len(answers))))
    return tuner.draft.requires_grad_(False)
