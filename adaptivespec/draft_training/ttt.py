"""Training-time test: the loss and the agreement of a draft whose steps run on its own hidden states."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptivespec.draft_training.attention import Context
from adaptivespec.draft_training.model import Eagle3Draft


@dataclass(frozen=True)
class Batch:
    """Right-padded rows with the target's states.

    Attributes:
        tokens: int64 [B, T].
        states: float32 [B, T, NUM_AUX + 1, H], the last of them after the target's final norm.
        prompt_lens, lens: int64 [B], tokens of the prompt and of prompt plus answer.
    """

    tokens: Tensor
    states: Tensor
    prompt_lens: Tensor
    lens: Tensor


@dataclass(frozen=True)
class LossOptions:
    """How the loss is put together.

    Attributes:
        num_steps: draft steps, each on the states of the one before.
        step_decay: step k weighs step_decay**k.
        row_share: share of the rows that the steps after the first are trained on.
        feature_weight: weight of the squared distance to the target's own last state, relative to that state's square.
        head_top: the softmax runs over the union of each position's head_top likeliest draft tokens and over
            head_random others, weighted up to stand for the rest; 0 for the whole draft vocabulary.
        dropout: share of the elements that attention and MLP add to the residual that are dropped.
    """

    num_steps: int = 5
    step_decay: float = 0.8
    row_share: float = 0.25
    feature_weight: float = 0.0
    head_top: int = 8
    head_random: int = 512
    dropout: float = 0.1


def unroll(
    draft: Eagle3Draft,
    embed: Tensor,
    batch: Batch,
    step_rows: list[Tensor],
    dropout: Callable[[Tensor], Tensor] = lambda branch: branch,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run the draft's steps teacher-forced on the text, each on the hidden states of the step before.

    Args:
        embed: the target's embedding table, [V, H].
        step_rows: per step, int64 [B, R_k]: the rows (token index each chain starts from) of that step. Step 0 may
            have others than the steps after it; those of the steps from 1 on are all the same and among step 0's.
        dropout: see `Eagle3Draft.step`.

    Yields:
        per step k: hidden state before the final norm, [B, R_k, H], and the index of the token whose target
        prediction it imitates, row + 1 + k, int64 [B, R_k]. Indices beyond the text are the caller's to mask.
    """
    tokens, num_tokens = batch.tokens, batch.tokens.shape[1]
    fused = draft.fc(batch.states[:, :, :-1].flatten(2))
    next_embeds = embed[torch.cat((tokens[:, 1:], tokens[:, :1] * 0), dim=1)]
    x = draft.layer_input(next_embeds, fused)
    keys, values = draft.keys_values(x, torch.arange(num_tokens)[None])
    hidden = _gather(fused, step_rows[0])
    context = Context(keys, values, step_rows[0])
    for k, rows in enumerate(step_rows):
        if k == 0:
            row_x = _gather(x, rows)
        else:
            if k == 1 and rows is not step_rows[0]:
                hidden = _gather(hidden, torch.searchsorted(step_rows[0], rows))
                context = Context(keys, values, rows)
            row_x = draft.layer_input(embed[tokens.gather(1, (rows + 1 + k).clamp(max=num_tokens - 1))], hidden)
            context.append_step(*draft.keys_values(row_x, rows + k))
        hidden = draft.step(row_x, hidden, rows + k, context, dropout)
        yield hidden, rows + 1 + k


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


def sample_rows(batch: Batch, options: LossOptions, generator: torch.Generator) -> list[Tensor]:
    """All rows that serving would draft from for step 0, and a random share of them for the later steps.

    A row's steps resemble each other, so a share of the rows at the later steps teaches nearly as much for less time.
    """
    num_rows = int((batch.lens - batch.prompt_lens).max()) - 1
    rows = (batch.prompt_lens[:, None] - 1 + torch.arange(num_rows)).clamp(max=batch.tokens.shape[1] - 2)
    if options.row_share >= 1:
        return [rows] * options.num_steps
    kept = torch.randperm(num_rows, generator=generator)[: max(1, round(num_rows * options.row_share))].sort().values
    return [rows] + [rows[:, kept].contiguous()] * (options.num_steps - 1)


def ttt_loss(
    draft: Eagle3Draft, embed: Tensor, batch: Batch, options: LossOptions, generator: torch.Generator
) -> Tensor:
    """Weighted sum over the steps of the mean cross-entropy against the target's distribution on the draft vocabulary.

    Positions whose next token in the text lies outside the draft vocabulary are left out, as no draft can hit them.

    Args:
        embed: the target's embedding table, [V, H], which is also its head.
        generator: draws the rows of the later steps, the random part of the softmax and what is dropped.

    Returns:
        scalar, differentiable.
    """
    last, max_index = batch.states[:, :, -1], batch.tokens.shape[1] - 1
    token_index = torch.arange(batch.tokens.shape[1])
    labelled = (token_index >= batch.prompt_lens[:, None]) & (token_index < batch.lens[:, None] - 1)
    labelled[:, :-1] &= draft.t2d[batch.tokens[:, 1:]]
    label_slot = labelled.flatten().cumsum(0).view(labelled.shape) - 1
    logits = last[labelled] @ embed[draft.draft_token_ids].T
    kept, shift = head_tokens(logits, options, generator)
    target_probs = (logits[:, kept] + shift).softmax(-1)
    head = draft.lm_head.weight[kept]
    total = last.new_zeros(())

    def dropout(branch: Tensor) -> Tensor:
        if not options.dropout:
            return branch
        share = 1 - options.dropout
        return branch * torch.empty_like(branch).bernoulli_(share, generator=generator).div_(share)

    step_rows = sample_rows(batch, options, generator)
    for k, (hidden, positions) in enumerate(unroll(draft, embed, batch, step_rows, dropout)):
        clamped = positions.clamp(max=max_index)
        mask = (positions <= max_index) & labelled.gather(1, clamped)
        normed = draft.norm(hidden[mask])
        log_probs = torch.addmm(shift, normed, head.T).log_softmax(-1)
        loss = -(target_probs[label_slot.gather(1, clamped)[mask]] * log_probs).sum(-1).mean()
        if options.feature_weight:
            wanted = _gather(last, clamped)[mask]
            loss = loss + options.feature_weight * (normed - wanted).square().mean() / wanted.square().mean()
        total = total + loss * options.step_decay**k
    return total


def head_tokens(logits: Tensor, options: LossOptions, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draft tokens that the loss is over, int64 [S], and what to add to their logits: each random one stands for many."""
    size = logits.shape[1]
    wanted = torch.full((size,), not options.head_top, dtype=torch.bool)
    if options.head_top:
        wanted[logits.topk(options.head_top, dim=-1).indices.unique()] = True
    others = (~wanted).nonzero().flatten()
    drawn = others[torch.randperm(len(others), generator=generator)[: options.head_random]]
    kept = torch.cat((wanted.nonzero().flatten(), drawn))
    shift = torch.zeros(len(kept))
    if len(drawn):
        shift[-len(drawn) :] = math.log(len(others) / len(drawn))
    return kept, shift


@torch.no_grad()
def count_agreement(draft: Eagle3Draft, embed: Tensor, batch: Batch, num_steps: int) -> tuple[Tensor, int]:
    """Teacher-forced top-1 hits against the target's argmax over its whole vocabulary, at the answer positions.

    Every answer token is counted once at every step, also where its chain starts inside the prompt; a target argmax
    outside the draft vocabulary is a miss.

    Returns:
        hits int64 [num_steps]; the number of answer positions.
    """
    longest = int((batch.lens - batch.prompt_lens).max()) + num_steps
    rows = (batch.prompt_lens[:, None] - 1 - num_steps + torch.arange(longest)).clamp(0, batch.tokens.shape[1] - 1)
    is_answer = torch.arange(batch.tokens.shape[1]) >= batch.prompt_lens[:, None] - 1
    is_answer &= torch.arange(batch.tokens.shape[1]) < batch.lens[:, None] - 1
    best = torch.full_like(batch.tokens, -1)
    best[is_answer] = (batch.states[:, :, -1][is_answer] @ embed.T).argmax(-1)
    ids = draft.draft_token_ids
    hits = torch.zeros(num_steps, dtype=torch.long)
    for k, (hidden, positions) in enumerate(unroll(draft, embed, batch, [rows] * num_steps)):
        mask = (positions < batch.lens[:, None] - 1) & (positions >= batch.prompt_lens[:, None] - 1)
        # Clamping at the text's start repeats row 0; count it once.
        mask[:, 1:] &= rows[:, 1:] > rows[:, :-1]
        mask &= positions < batch.tokens.shape[1]
        proposed = ids[draft.lm_head(draft.norm(hidden[mask])).argmax(-1)]
        hits[k] = (proposed == best.gather(1, positions.clamp(max=batch.tokens.shape[1] - 1))[mask]).sum()
    return hits, int(is_answer.sum())
