"""Speculative decoding of one request with chains of drafts, replayed offline, token for token as a server would do it.

Strict verification accepts exactly the target's own tokens. So where its greedy answer is known, the draft's states along
every accepted path are known too: they are those of a draft that was fed the answer. One pass over the answer gives them
for every root and depth, and what is left of decoding is to walk: draft, compare, learn, move on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptivespec.draft_training.model import Eagle3Draft
from adaptivespec.draft_training.ttt import Batch, unroll
from drift.memory import DriftMemory, residuals
from drift.params import DriftParams


@dataclass(frozen=True)
class Trace:
    """One answer as the draft sees it. ``A`` tokens, ``S`` draft steps, ``V`` draft tokens, ``F`` of the target.

    Attributes:
        hidden: ``[A, S, H]``: of the chain whose root follows answer token a, the state that drafts token a + 1 + s.
        draft_logits: ``[A, S, V]`` made of them.
        target_logits: ``[A + S, F]`` that the target gave for token a + 1.
        tokens: ``[A + S + 1]`` the answer in the target's ids; -1 past the end.
        vocabulary: ``[V]`` the target's id of each draft token.
    """

    hidden: Tensor
    draft_logits: Tensor
    target_logits: Tensor
    tokens: Tensor
    vocabulary: Tensor

    @property
    def num_tokens(self) -> int:
        """A, tokens of the answer."""
        return self.hidden.shape[0]


@torch.inference_mode()
def trace_answer(
    draft: Eagle3Draft, embed: Tensor, token_ids: Sequence[int], states: Tensor, prompt_len: int, num_steps: int
) -> Trace:
    """Run the draft over an answer.

    Args:
        embed: the target's embedding table, ``[V, H]``, which is also its head.
        token_ids: prompt and answer.
        states: ``[T, NUM_AUX + 1, H]``, the target's, as `draft_training.target_states` gives them.
        prompt_len: tokens of the prompt.
        num_steps: S.
    """
    tokens = torch.tensor(token_ids)
    num_answer = len(tokens) - prompt_len
    # The chain after token p starts from the fused state of the token before it.
    rows = torch.arange(prompt_len - 1, prompt_len - 1 + num_answer)[None]
    batch = Batch(tokens[None], states[None], torch.tensor([prompt_len]), torch.tensor([len(tokens)]))
    steps = [hidden[0] for hidden, _ in unroll(draft, embed, batch, [rows] * num_steps)]
    hidden = torch.stack(steps, dim=1)
    answer = torch.full((num_answer + num_steps + 1,), -1)
    answer[:num_answer] = tokens[prompt_len:]
    target = torch.zeros(num_answer + num_steps, len(embed))
    target[:num_answer] = states[prompt_len:, -1] @ embed.T
    return Trace(hidden, draft.lm_head(draft.norm(hidden)), target, answer, draft.draft_token_ids)


@torch.inference_mode()
def decode(trace: Trace, memory: DriftMemory | None = None) -> list[int]:
    """Walk through the answer; gives the accepted drafts of each step. The first token comes from the prefill.

    A memory corrects every draft and learns from every verified one, as on a server.
    """
    num_steps = trace.hidden.shape[1]
    vocabulary = trace.vocabulary if memory is None or memory.spare is None else memory.spare.vocabulary
    depths = torch.arange(num_steps)
    banks = torch.zeros(num_steps, dtype=torch.int64)
    accepted = []
    at = 0  # the last token that is committed
    while at < trace.num_tokens - 1:
        hidden, logits = trace.hidden[at], trace.draft_logits[at]
        wanted = trace.tokens[at + 1 : at + 1 + num_steps]
        if memory is not None:
            logits = memory.widen(logits.clone())
            memory.apply(hidden, logits, banks)
        count = int((vocabulary[logits.argmax(dim=-1)] == wanted).long().cumprod(-1).sum())
        accepted.append(count)
        if memory is not None:
            verified = (depths <= count) & (at + depths < trace.num_tokens)
            target = trace.target_logits[at : at + num_steps][verified]
            memory.take_in(target.argmax(dim=1), banks[verified])
            target = target[:, vocabulary]
            memory.learn(hidden[verified], trace.draft_logits[at][verified], target, banks[verified])
        at += count + 1
    return accepted


@torch.inference_mode()
def rejected_residuals(trace: Trace, params: DriftParams) -> Tensor:
    """What a memory would be taught where decoding without one rejects a draft.

    Returns:
        ``[rejections, V]``.
    """
    num_steps = trace.hidden.shape[1]
    found, at = [trace.draft_logits.new_zeros(0, trace.draft_logits.shape[2])], 0
    for count in decode(trace):
        if count < num_steps and at + count < trace.num_tokens:
            target, draft = trace.target_logits[at + count, None, trace.vocabulary], trace.draft_logits[at, count, None]
            tokens, nats = residuals(draft, target, params.num_tokens, params.clip)
            found.append(torch.zeros_like(target).scatter_(1, tokens, nats))
        at += count + 1
    return torch.cat(found)
