"""The memory: prototypes of draft hidden states, each with what the target said otherwise there.

Source: DRIFT paper, as in the project's design; what it leaves open is marked.
"""

import torch
from torch import Tensor

from drift.params import DriftParams
from drift.spare import OUT, SpareTokens

NO_BANK = -1
"""The bank of a row that is neither corrected nor teaches, and the owner of a free slot."""
_NOBODY = -2  # owns no slot
_NOTHING = -2.0  # below every cosine
_NEVER = 2**62
_STRIDE = 256  # slots
_LONG_AGO = 2**30  # calls; slots unused for longer count as equally old


class DriftMemory:
    """A bounded set of prototypes in which each belongs to one bank, and a row sees those of its own bank only.

    All tensors are allocated here and written in place, so that a captured graph may read them. Nothing reads a device
    value on the host. The same calls give the same contents on every device of a kind: where several rows want one slot,
    the first of them wins, and sums run in a fixed order.

    Args:
        params: sizes and rates.
        hidden_size: H, of the keys.
        vocab_size: V, of the draft's logits.
        device: where the tensors lie.
        vocabulary: ``[V]`` int64, the target's id of each draft token, where the draft's vocabulary is a part of the target's;
            `params.num_spare` says nothing otherwise.
        target_vocab_size: ids of the target, with a vocabulary.

    Attributes:
        spare: the target's other tokens that this memory can propose, or None. Their columns lie behind the draft's own, C in
            all.
        keys: ``[N, H]`` float32, unit length.
        token_ids: ``[N, m]`` int64, columns; bias: ``[N, m]`` float32, nats. A pair that says nothing has bias 0.
        owner: ``[N]`` int64, the bank of each slot, or `NO_BANK`.
        last_used: ``[N]`` int64, clock of the last correction or lesson.
        clock: ``[]`` int64, calls of `apply` and `learn` so far. With both counted, which of a bank's prototypes is the oldest
            depends on its own rows alone.
        counters: ``[num_banks, 4]`` int64, see `COUNTERS`; they only grow, whoever has the bank.
        gain_applied: ``[num_banks]`` float64, what the corrections of each bank were multiplied with, summed over its hits.
    """

    COUNTERS = ("lookups", "hits", "allocations", "evictions")

    def __init__(
        self,
        params: DriftParams,
        hidden_size: int,
        vocab_size: int,
        device: torch.device | str,
        vocabulary: Tensor | None = None,
        target_vocab_size: int = 0,
    ) -> None:
        if params.num_tokens > vocab_size:
            raise ValueError(f"num_tokens: found {params.num_tokens}; expected at most the {vocab_size} draft tokens")
        self.params = params
        self.vocab_size = vocab_size
        self.spare: SpareTokens | None = None
        if vocabulary is not None and vocab_size < target_vocab_size and params.num_spare:
            self.spare = SpareTokens(vocabulary.to(device), target_vocab_size, params.num_banks, params.num_spare)
        self.num_columns = vocab_size if self.spare is None else len(self.spare.vocabulary)
        # One row more than there are slots: where rows that teach nothing write to.
        rows = params.num_slots + 1
        self._rows = {
            "keys": torch.zeros(rows, hidden_size, device=device),
            "token_ids": torch.zeros(rows, params.num_tokens, dtype=torch.int64, device=device),
            "bias": torch.zeros(rows, params.num_tokens, device=device),
            "owner": torch.full((rows,), NO_BANK, device=device),
            "last_used": torch.zeros(rows, dtype=torch.int64, device=device),
        }
        self.keys, self.token_ids, self.bias, self.owner, self.last_used = (
            tensor[: params.num_slots] for tensor in self._rows.values()
        )
        self.clock = torch.zeros((), dtype=torch.int64, device=device)
        self.counters = torch.zeros(params.num_banks, len(self.COUNTERS), dtype=torch.int64, device=device)
        self._counted_before = torch.zeros_like(self.counters)
        self.gain_applied = torch.zeros(params.num_banks, dtype=torch.float64, device=device)

    def apply(self, hidden: Tensor, logits: Tensor, banks: Tensor, fallback: Tensor | None = None) -> None:
        """Correct draft logits, in place. Host sync: none. Graph-safe: yes.

        The weight of a neighbour falls with its cosine distance as a Gaussian whose standard deviation is the distance
        at the threshold. (Width: this project.)

        Args:
            hidden: ``[R, H]``, states that the logits were made from.
            logits: ``[R, C]`` floating point, contiguous or not; `OUT` in the spare columns, as `widen` makes them.
            banks: ``[R]`` int64; rows of `NO_BANK` are left as they are.
            fallback: ``[R]`` int64, banks that are asked where a row's own has no prototype within the threshold.
        """
        params = self.params
        is_asked, answering = banks != NO_BANK, banks
        if _is_known_empty(is_asked):
            return
        product = self._product(_unit(hidden), self._reach())
        cosine = self._in_bank(product, banks)
        if fallback is not None:
            asks_on = is_asked & (fallback != NO_BANK) & (cosine.amax(dim=1) < params.threshold)
            cosine = torch.where(asks_on.unsqueeze(1), self._in_bank(product, fallback), cosine)
            answering = torch.where(asks_on, fallback, banks)
            self._count(fallback, lookups=asks_on)
        self._count(banks, lookups=is_asked)
        if _is_known_empty(cosine >= params.threshold):
            self.clock += 1
            return
        near, slots = cosine.topk(min(params.num_neighbours, cosine.shape[1]), dim=1)
        is_near = near >= params.threshold
        weights = torch.exp(-0.5 * ((1 - near) / (1 - params.threshold)).square()).masked_fill(~is_near, 0.0)
        weights = params.gain * weights / weights.sum(dim=1, keepdim=True).clamp(min=1.0)
        biases = (weights.unsqueeze(2) * self.bias[slots]).to(logits.dtype)
        tokens = self.token_ids[slots]
        own, spare = logits.tensor_split((self.vocab_size,), dim=1)
        if self.spare is not None:
            floor = self._floor(own)
            spare.copy_(floor.expand_as(spare))
        if logits.is_cuda:  # one neighbour at a time: the ids of one slot differ, so that no sum has a race
            for neighbour in range(slots.shape[1]):
                logits.scatter_add_(1, tokens[:, neighbour], biases[:, neighbour])
        else:
            logits.scatter_add_(1, tokens.flatten(1), biases.flatten(1))
        if self.spare is not None:
            spare.masked_fill_(spare <= floor, OUT)
        self._touch(slots, is_near)
        self._count(answering, hits=is_near[:, 0])
        self.gain_applied.scatter_add_(0, answering.clamp(min=0), weights.sum(dim=1, dtype=torch.float64))
        self.clock += 1

    def widen(self, logits: Tensor) -> Tensor:
        """Draft logits ``[R, V]`` with the spare columns, in which nothing is proposed: ``[R, C]``. Host sync: none."""
        if self.spare is None:
            return logits
        return torch.nn.functional.pad(logits, (0, self.num_columns - self.vocab_size), value=OUT)

    def take_in(self, chosen: Tensor, banks: Tensor) -> None:
        """Have columns for what the target chose, before a lesson about it. Host sync: none. Graph-safe: yes.

        Args:
            chosen: ``[R]`` int64, ids of the target.
            banks: ``[R]`` int64.
        """
        if self.spare is None:
            return
        is_changed = self.spare.take_in(chosen, banks, self.clock + 1)
        if not _is_known_empty(is_changed):  # what was learnt of the token that went is not about the one that came
            self.bias.masked_fill_(is_changed[self.token_ids], 0.0)

    @torch.no_grad()
    def learn(self, hidden: Tensor, draft_logits: Tensor, target_logits: Tensor, banks: Tensor) -> None:
        """Teach the memory what the target said at some draft states. Host sync: none. Graph-safe: yes.

        A row whose nearest prototype lies within the threshold teaches that one; another row founds a prototype, unless
        an earlier row of the call does so within the threshold of it.

        Args:
            hidden: ``[R, H]``.
            draft_logits: ``[R, V]``, without correction.
            target_logits: ``[R, C]``, of the tokens of each column.
            banks: ``[R]`` int64; rows of `NO_BANK` and rows with values that are not finite teach nothing.
        """
        params = self.params
        key = _unit(hidden)
        if self.spare is not None:
            own, spare = target_logits.tensor_split((self.vocab_size,), dim=1)
            draft_logits = self.spare.widened(draft_logits, banks, self._floor(draft_logits))
            target_logits = self.spare.widened(own, banks, spare)
        tokens, residual = residuals(draft_logits, target_logits, params.num_tokens, params.clip)
        is_sound = residual.isfinite().all(dim=1) & key.isfinite().all(dim=1)
        banks = banks.masked_fill(~is_sound, NO_BANK)
        key = key.nan_to_num(0.0, 0.0, 0.0)
        residual = residual.nan_to_num(0.0, 0.0, 0.0)

        reach = self._reach()
        cosine, slot = self._in_bank(self._product(key, reach), banks).max(dim=1)
        is_within = cosine >= params.threshold
        is_met = _is_first(slot.unsqueeze(1) == slot, is_within)
        alike = ((key @ key.T) >= params.threshold) & (banks.unsqueeze(1) == banks)
        is_new = _is_first(alike, (banks != NO_BANK) & ~is_within)
        self._touch(slot, is_within)
        new_slot = slot
        if not _is_known_empty(is_new):
            new_slot, is_new = self._claim(banks, is_new, reach)
            # A slot that is both the oldest and met now stays with those who met it.
            is_new &= ~((new_slot.unsqueeze(1) == slot) & is_met).any(dim=1)
            self._count(banks, allocations=is_new)
            evicted = self.owner[new_slot]
            self._count(evicted, evictions=is_new & (evicted != NO_BANK))

        old_key, old_tokens, old_bias = self.keys[slot], self.token_ids[slot], self.bias[slot]
        met_tokens, met_bias = _merge(old_tokens, old_bias * (1 - params.rate), tokens, residual * params.rate)
        met_key = _unit(old_key * (1 - params.rate) + key * params.rate)
        self._write(
            torch.where(is_new, new_slot, slot),
            is_met | is_new,
            torch.where(is_new.unsqueeze(1), key, met_key),
            torch.where(is_new.unsqueeze(1), tokens, met_tokens),
            torch.where(is_new.unsqueeze(1), residual, met_bias),
            banks,
        )
        self.clock += 1

    def reset(self, bank: int | None = None) -> None:
        """Forget one bank, or all. Host sync: none."""
        if self.spare is not None:
            self.spare.reset(bank)
        if bank is None:
            self.owner.fill_(NO_BANK)
            self.bias.zero_()
            self.last_used.zero_()
            return
        is_own = self.owner == bank
        self.owner.masked_fill_(is_own, NO_BANK)
        self.bias.masked_fill_(is_own.unsqueeze(1), 0.0)
        self.last_used.masked_fill_(is_own, 0)
        self._counted_before[bank] = self.counters[bank]
        self.gain_applied[bank] = 0.0

    def bank_counts(self) -> list[list[int]]:
        """Each bank's `counters` since it was emptied for its tenant. Host sync: one."""
        counts: list[list[int]] = (self.counters - self._counted_before).tolist()
        return counts

    def occupancy(self) -> list[int]:
        """Slots of each bank. Host sync: one."""
        used = self.owner[self.owner != NO_BANK]
        counts: list[int] = torch.bincount(used, minlength=self.params.num_banks).tolist()
        return counts

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        rest = self.clock, self.counters, self._counted_before, self.gain_applied
        spare = 0 if self.spare is None else self.spare.num_bytes
        return sum(tensor.nbytes for tensor in (*self._rows.values(), *rest)) + spare

    def _floor(self, logits: Tensor) -> Tensor:
        """What spare tokens are corrected from: so far below all draft tokens together that a full correction makes up for it.

        Args:
            logits: ``[R, V]``.

        Returns:
            ``[R, 1]``, of their type.
        """
        return logits.logsumexp(dim=1, keepdim=True) - self.params.clip

    def _product(self, key: Tensor, reach: int) -> Tensor:
        """``[R, reach]`` cosine to each prototype, also of other banks and to free slots."""
        # The long side first: on CPUs several times as fast as `key @ keys.T` for a few rows.
        return (self.keys[:reach] @ key.T).T

    def _reach(self) -> int:
        """Slots behind which none is in use, in steps of `_STRIDE`; all where looking would be a host sync."""
        if not _is_on_host(self.owner):
            return self.params.num_slots
        used = (self.owner != NO_BANK).nonzero()
        # In steps, so that the product is not of another shape, and may round otherwise, with every new prototype.
        strides = int(used[-1]) // _STRIDE + 1 if len(used) else 1
        return min(strides * _STRIDE, self.params.num_slots)

    def _in_bank(self, product: Tensor, banks: Tensor) -> Tensor:
        """The cosines to prototypes of the row's bank, less than any cosine in the place of others; NaN of NaN."""
        asked = banks.masked_fill(banks == NO_BANK, _NOBODY)
        return product.masked_fill(self.owner[: product.shape[1]] != asked.unsqueeze(1), _NOTHING)

    def _claim(self, banks: Tensor, is_new: Tensor, reach: int) -> tuple[Tensor, Tensor]:
        """A slot for each new row: free ones, then the oldest of banks beyond their share, then its own bank's oldest.

        Rows of banks below their share come first: free slots and surplus are always enough for them.

        Returns:
            ``[R]`` int64 slots, all different where claimed; ``[R]`` bool, which rows got one.
        """
        size, num_banks = self.params.num_slots, self.params.num_banks
        count = min(len(banks), size)
        slots = slice(min(reach + count, size))  # of the free slots behind, no more can be needed
        # Free slots are a bank of their own, the last.
        owner = self.owner[slots].masked_fill(self.owner[slots] == NO_BANK, num_banks)
        sizes = torch.zeros(num_banks + 1, dtype=torch.int64, device=owner.device)
        sizes.scatter_add_(0, owner, torch.ones_like(owner))
        # Ascending from the oldest slot on; of slots used at once, the first is the oldest.
        age = (self.last_used[slots] - self.clock).clamp(min=-_LONG_AGO) * size
        age += torch.arange(len(age), device=owner.device)
        everyone = torch.arange(num_banks + 1, device=owner.device).unsqueeze(1)
        ages, oldest = age.masked_fill(owner != everyone, _NEVER).topk(count, largest=False, sorted=True)

        surplus = (sizes - size // num_banks).clamp(min=0)
        surplus[-1] = sizes[-1]
        ages[-1] -= 2 * _LONG_AGO * size  # free ones first
        is_pool = torch.arange(count, device=owner.device) < surplus.unsqueeze(1)
        place = ages.masked_fill(~is_pool, _NEVER).flatten().topk(count, largest=False, sorted=True).indices
        pool = oldest.flatten()[place]

        bank = banks.clamp(min=0)
        before = (banks.unsqueeze(1) == banks).tril(diagonal=-1)
        is_due = is_new & (sizes[bank] + (before & is_new).sum(dim=1) < size // num_banks)
        is_late = is_new & ~is_due
        rank = torch.where(is_due, is_due.cumsum(0), is_due.sum() + is_late.cumsum(0)) - 1
        from_pool = is_new & (rank < is_pool.sum().clamp(max=count))
        rest = is_new & ~from_pool
        own_rank = (before & rest).sum(dim=1) + surplus[bank]  # where there is a rest, the pool is used up
        from_own = rest & (own_rank < sizes[bank])
        own_slot = oldest[bank, own_rank.clamp(max=count - 1)]
        slot = torch.where(from_pool, pool[rank.clamp(0, count - 1)], own_slot)
        return slot, from_pool | from_own

    def _write(self, slot: Tensor, mask: Tensor, *values: Tensor) -> None:
        """Set the slots of masked rows, all different, to key, token ids, bias and owner."""
        slot = torch.where(mask, slot, self.params.num_slots)
        for tensor, value in zip(self._rows.values(), (*values, (self.clock + 1).expand_as(slot)), strict=True):
            tensor[slot] = value

    def _touch(self, slots: Tensor, mask: Tensor) -> None:
        now = torch.where(mask, self.clock, 0).flatten()
        self.last_used.scatter_reduce_(0, slots.flatten(), now, "amax")

    def _count(self, banks: Tensor, **masks: Tensor) -> None:
        """Add one to each named counter of a row's bank where its mask holds; rows of `NO_BANK` must be out of them."""
        banks = banks.clamp(min=0)
        for name, mask in masks.items():
            self.counters[:, self.COUNTERS.index(name)].scatter_add_(0, banks, mask.to(torch.int64))


def residuals(draft_logits: Tensor, target_logits: Tensor, num_tokens: int, clip: float) -> tuple[Tensor, Tensor]:
    """What a lesson holds: target minus draft, on the likeliest tokens of either, both renormalised there.

    Args:
        draft_logits, target_logits: ``[R, V]``.

    Returns:
        ``[R, num_tokens]`` int64 ids, and nats, at most `clip` either way.
    """
    draft, target = draft_logits.float().log_softmax(dim=1), target_logits.float().log_softmax(dim=1)
    tokens = torch.maximum(draft, target).topk(num_tokens, dim=1).indices
    draft = draft.gather(1, tokens).log_softmax(dim=1)
    target = target.gather(1, tokens).log_softmax(dim=1)
    return tokens, (target - draft).clamp(-clip, clip)


def _unit(vectors: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vectors.float(), dim=-1)


def _is_on_host(tensor: Tensor) -> bool:
    """Whether its values can be read at no cost."""
    return tensor.device.type == "cpu"


def _is_known_empty(mask: Tensor) -> bool:
    """Whether a mask is seen to hold nowhere: looking saves the rest, where it costs nothing."""
    return _is_on_host(mask) and not bool(mask.any())


def _is_first(alike: Tensor, mask: Tensor) -> Tensor:
    """Rows of the mask that resemble no earlier row of it. ``alike`` ``[R, R]``, ``mask`` ``[R]``."""
    earlier = torch.ones_like(alike).tril(diagonal=-1)
    return mask & ~(alike & earlier & mask).any(dim=1)


def _merge(old_tokens: Tensor, old_bias: Tensor, tokens: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The union of two lists of (token, bias), ``[R, m]`` each, summed where both have one; the m largest are kept."""
    is_same = old_tokens.unsqueeze(2) == tokens.unsqueeze(1)  # old by new
    all_bias = torch.cat((old_bias + (is_same * bias.unsqueeze(1)).sum(dim=2), bias), dim=1)
    # A token of both lists is kept once, so that the ids of a slot stay different.
    size = torch.cat((all_bias[:, : old_bias.shape[1]].abs(), bias.abs().masked_fill(is_same.any(dim=1), -1.0)), dim=1)
    kept = size.sort(dim=1, descending=True, stable=True).indices[:, : tokens.shape[1]]
    return torch.cat((old_tokens, tokens), dim=1).gather(1, kept), all_bias.gather(1, kept)
