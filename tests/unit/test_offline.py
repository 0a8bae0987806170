"""The offline replay: it walks as verification does, and a memory that was taught the answer drafts it."""

import pytest
import torch

from adaptivespec.offline.chain import Trace, decode
from adaptivespec.offline.statistics import accept_length, gain
from drift.memory import DriftMemory
from drift.params import DriftParams

VOCAB, STEPS = 5, 3


def make_trace(hits: list[list[bool]], tokens: list[int]) -> Trace:
    """A draft that says the answer's token where `hits` is set, and another one elsewhere; a target that is sure."""
    count = len(tokens)
    wanted = torch.tensor(tokens + [-1] * (STEPS + 1))
    logits = torch.zeros(count, STEPS, VOCAB)
    for at in range(count):
        for step in range(STEPS):
            token = int(wanted[at + 1 + step])
            said = token if hits[at][step] and token < VOCAB else (token + 1) % VOCAB
            logits[at, step, said] = 2.0
    target = torch.zeros(count + STEPS, VOCAB + 1)
    for at in range(count - 1):
        target[at, tokens[at + 1]] = 8.0
    hidden = torch.randn(count, STEPS, 16, generator=torch.Generator().manual_seed(0))
    return Trace(hidden, logits, target, wanted, torch.arange(VOCAB))


def test_each_step_accepts_up_to_the_first_miss_and_one_more_token_follows() -> None:
    yes, no = True, False
    #        0               1              2              3              4              5               6
    hits = [[yes, no, yes], [no, no, no], [no, no, no], [yes, yes, yes], [no, no, no], [no, no, no], [no, no, no]]
    # From 0: one accepted, on to 2. From 2: none, on to 3. From 3: three accepted, on to 7, past the end.
    assert decode(make_trace(hits, [0, 1, 2, 3, 4, 0, 1])) == [1, 0, 3]


def test_tokens_outside_the_drafts_vocabulary_are_never_accepted() -> None:
    hits = [[True] * STEPS] * 4
    # From 0: token 1 accepted, token 2 is not the draft's to say and comes from the target. From 2: the last token.
    assert decode(make_trace(hits, [0, 1, VOCAB, 2])) == [1, 1]


def test_a_memory_proposes_what_it_has_met_outside_the_drafts_vocabulary() -> None:
    trace = make_trace([[True] * STEPS] * 4, [0, 1, VOCAB, 2])
    params = DriftParams(num_slots=64, num_tokens=VOCAB, num_banks=1, num_spare=2)
    memory = DriftMemory(params, 16, VOCAB, "cpu", trace.vocabulary, VOCAB + 1)
    assert decode(trace, memory) == [1, 1]  # and learnt of it at the second of its drafts
    assert decode(trace, memory) == [3]


def test_a_memory_learns_the_answer() -> None:
    trace = make_trace([[False] * STEPS] * 12, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1])
    memory = DriftMemory(DriftParams(num_slots=64, num_tokens=VOCAB, gain=1.0, num_banks=1), 16, VOCAB, "cpu")
    first, second = decode(trace, memory), decode(trace, memory)
    assert sum(first) == 0
    assert sum(second) > 0
    assert decode(trace) == first


def test_accept_length_counts_the_bonus_token() -> None:
    assert accept_length([[1, 0], [2]]) == 2.0


def test_the_interval_holds_the_gain_and_is_narrow_where_prompts_agree() -> None:
    alike = gain([[1, 1]] * 20, [[0, 1]] * 20)
    assert alike == pytest.approx((0.5, 0.5, 0.5))
    mixed = gain([[2]] * 10 + [[0]] * 10, [[0]] * 20)
    assert mixed.low < mixed.value == 1.0 < mixed.high
