"""Tokens outside the draft's vocabulary: each bank has some columns behind the draft's logits for those it has met.

Source: this project. A draft with a vocabulary of its own cannot propose the target's other tokens, whatever corrects its
logits. Here a token that the target chose takes a column of the bank, and prototypes can want it like any other.
"""

import torch
from torch import Tensor

OUT = -1e4
"""The logit of a column that proposes nothing: its probability is exactly 0, in half precision too."""


class SpareTokens:
    """Which target token each spare column stands for. Columns belong to one bank, so that no other bank's traffic moves
    them; in a bank, the token that the target has not chosen for longest gives its column away.

    Args:
        draft_vocabulary: ``[V]`` int64, the target's id of each draft token.
        target_vocab_size: F, ids of the target.
        num_banks: B.
        num_columns: S, of each bank.

    Attributes:
        vocabulary: ``[V + B * S]`` int64, the target's id of each column; the draft's own stay, the spare ones change.
        tokens: ``[B, S]``, the spare columns of it.
        last_used: ``[B, S]`` int64, clock of the last time the target chose the token; 0 for a free column.
    """

    def __init__(self, draft_vocabulary: Tensor, target_vocab_size: int, num_banks: int, num_columns: int) -> None:
        device, size = draft_vocabulary.device, len(draft_vocabulary)
        self.target_vocab_size = target_vocab_size
        self._size = size
        self._is_draft_token = torch.zeros(target_vocab_size, dtype=torch.bool, device=device)
        self._is_draft_token[draft_vocabulary.long()] = True
        # One column more than there are: where rows that bring no new token write to.
        spare = torch.zeros(num_banks * num_columns + 1, dtype=torch.int64, device=device)
        self._vocabulary = torch.cat((draft_vocabulary.long(), spare))
        self._last_used = torch.zeros_like(spare)
        self.vocabulary = self._vocabulary[:-1]
        self.tokens = self.vocabulary[size:].view(num_banks, num_columns)
        self.last_used = self._last_used[:-1].view(num_banks, num_columns)

    def take_in(self, chosen: Tensor, banks: Tensor, now: Tensor) -> Tensor:
        """Give a column to a token of each bank at most, the first that has none. Host sync: none. Graph-safe: yes.

        In a verify step of one request only the last token can be new to it: those before were drafted.

        Args:
            chosen: ``[R]`` int64, what the target chose.
            banks: ``[R]`` int64, whose traffic it was; negative for nobody's.
            now: ``[]`` int64, above 0.

        Returns:
            ``[V + B * S]`` bool, the columns that stood for another token before.
        """
        bank, num_columns = banks.clamp(min=0), self.tokens.shape[1]
        is_outside = (banks >= 0) & ~self._is_draft_token[chosen]
        is_met = (self.tokens[bank] == chosen.unsqueeze(1)) & (self.last_used[bank] > 0) & is_outside.unsqueeze(1)
        is_known = is_met.any(dim=1)
        waste = self.tokens.numel()
        self._last_used[torch.where(is_known, bank * num_columns + is_met.int().argmax(dim=1), waste)] = now
        asks = is_outside & ~is_known
        earlier = (banks.unsqueeze(1) == banks).tril(diagonal=-1)
        is_new = asks & ~(earlier & asks).any(dim=1)
        oldest = bank * num_columns + self.last_used.argmin(dim=1)[bank]
        place = torch.where(is_new, oldest, waste)
        is_changed = torch.zeros_like(self._vocabulary, dtype=torch.bool)
        is_changed[self._size + place] = self._last_used[place] > 0
        self._vocabulary[self._size + place] = chosen
        self._last_used[place] = now
        return is_changed[:-1]

    def widened(self, logits: Tensor, banks: Tensor, value: Tensor) -> Tensor:
        """Draft logits with a value for the tokens that a row's bank has met, `OUT` for all other spare columns.

        Args:
            logits: ``[R, V]``; banks: ``[R]``; value: ``[R, 1]`` or ``[R, B * S]``.

        Returns:
            ``[R, V + B * S]``.
        """
        own = self.of_bank(banks)
        return torch.cat((logits, torch.where(own, value, OUT)), dim=1)

    def of_bank(self, banks: Tensor) -> Tensor:
        """``[R, B * S]`` bool, the spare columns in use of each row's bank. ``banks`` ``[R]``."""
        every = torch.arange(len(self.tokens), device=banks.device)
        is_own = (every == banks.unsqueeze(1)).unsqueeze(2) & (self.last_used > 0)
        return is_own.flatten(1)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self._is_draft_token.nbytes + self._vocabulary.nbytes + self._last_used.nbytes

    def reset(self, bank: int | None = None) -> None:
        """Free the columns of one bank, or all. Host sync: none."""
        self.last_used[slice(None) if bank is None else bank] = 0
