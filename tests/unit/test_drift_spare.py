"""Tokens outside the draft's vocabulary: who has which column, and that a memory proposes them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drift.memory import NO_BANK, DriftMemory
from drift.params import DriftParams
from drift.spare import OUT, SpareTokens

DRAFT_IDS = torch.tensor([3, 5, 8])
TARGET_VOCAB = 12
PARAMS = DriftParams(num_slots=8, num_tokens=3, threshold=0.9, num_banks=2, num_spare=2)


def make() -> DriftMemory:
    return DriftMemory(PARAMS, 4, len(DRAFT_IDS), "cpu", DRAFT_IDS, TARGET_VOCAB)


def spare_of(memory: DriftMemory) -> SpareTokens:
    assert memory.spare is not None
    return memory.spare


def teach(memory: DriftMemory, state: torch.Tensor, token: int, bank: int = 0) -> None:
    """The target says a token at a state where the draft is undecided."""
    target = torch.zeros(1, TARGET_VOCAB)
    target[0, token] = 9.0
    banks = torch.tensor([bank])
    memory.take_in(target.argmax(dim=1), banks)
    memory.learn(state, torch.zeros(1, 3), target[:, spare_of(memory).vocabulary], banks)


def proposed(memory: DriftMemory, state: torch.Tensor, bank: int = 0) -> int:
    logits = memory.widen(torch.tensor([[0.5, 0.0, 0.0]]))
    memory.apply(state, logits, torch.tensor([bank]))
    return int(spare_of(memory).vocabulary[logits.argmax()])


calls = st.lists(
    st.lists(st.tuples(st.integers(0, TARGET_VOCAB - 1), st.sampled_from([0, 0, 1, NO_BANK])), min_size=1, max_size=4),
    max_size=30,
)


@settings(deadline=None)
@given(calls=calls)
def test_columns_go_as_in_a_model_of_dictionaries(calls: list[list[tuple[int, int]]]) -> None:
    spare = SpareTokens(DRAFT_IDS, TARGET_VOCAB, num_banks=2, num_columns=3)
    model: list[dict[int, tuple[int, int]]] = [{}, {}]  # token: when it was met last, column
    for clock, rows in enumerate(calls, start=1):
        before = spare.vocabulary.clone()
        used = (spare.last_used > 0).flatten()
        chosen, banks = torch.tensor(rows).T
        is_changed = spare.take_in(chosen, banks, torch.tensor(clock))
        for bank, columns in enumerate(model):
            own = [token for token, whose in rows if whose == bank and token not in DRAFT_IDS.tolist()]
            new = [token for token in own if token not in columns][:1]
            columns |= {token: (clock, columns[token][1]) for token in own if token in columns}
            for token in new:
                place = len(columns) if len(columns) < 3 else columns.pop(min(columns, key=columns.__getitem__))[1]
                columns[token] = (clock, place)
            tokens, used_at = spare.tokens[bank].tolist(), spare.last_used[bank].tolist()
            assert {tokens[place]: (used_at[place], place) for place in range(3) if used_at[place]} == columns
        assert torch.equal(is_changed[3:], (spare.vocabulary != before)[3:] & used)
        assert torch.equal(spare.vocabulary[:3], DRAFT_IDS)


def test_a_token_the_draft_does_not_know_is_proposed_once_it_was_met() -> None:
    memory, state = make(), torch.randn(1, 4)
    assert proposed(memory, state) == 3
    teach(memory, state, 7)
    assert proposed(memory, state) == 7
    assert proposed(memory, -state) == 3  # only where it was met
    memory.reset(0)
    assert proposed(memory, state) == 3
    assert not spare_of(memory).last_used.any()


def test_a_memory_that_knows_nothing_adds_columns_of_probability_zero() -> None:
    memory, logits = make(), torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    wide = memory.widen(logits)
    memory.apply(torch.randn(2, 4), wide, torch.tensor([0, NO_BANK]))
    assert torch.equal(wide[:, :3], logits)
    assert (wide[:, 3:] == OUT).all()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(wide.to(dtype).softmax(1)[:, 3:], torch.zeros(2, 4, dtype=dtype))


def test_a_column_that_stands_for_another_token_brings_nothing_of_the_old_one() -> None:
    memory = make()
    states = torch.eye(4)[:3]
    for state, token in zip(states, (7, 9, 11), strict=True):
        teach(memory, state[None], token)
    assert spare_of(memory).tokens[0].tolist() == [11, 9]
    first, *rest = (proposed(memory, state[None]) for state in states)
    assert first in DRAFT_IDS
    assert rest == [9, 11]


def test_no_other_bank_moves_columns_or_proposes_their_tokens() -> None:
    memory, state = make(), torch.randn(1, 4)
    teach(memory, state, 7)
    for token in (0, 1, 2, 4):
        teach(memory, state, token, bank=1)
    assert proposed(memory, state, bank=0) == 7
    assert proposed(memory, state, bank=1) != 7
    memory.reset(1)
    assert proposed(memory, state, bank=0) == 7


@pytest.mark.parametrize(("vocabulary", "num_spare"), [(None, 2), (torch.arange(TARGET_VOCAB), 2), (DRAFT_IDS, 0)])
def test_without_tokens_outside_there_are_no_columns(vocabulary: torch.Tensor | None, num_spare: int) -> None:
    size = TARGET_VOCAB if vocabulary is None else len(vocabulary)
    memory = DriftMemory(DriftParams(num_tokens=2, num_spare=num_spare), 4, size, "cpu", vocabulary, TARGET_VOCAB)
    assert memory.spare is None
    logits = torch.randn(1, size)
    assert memory.widen(logits) is logits
