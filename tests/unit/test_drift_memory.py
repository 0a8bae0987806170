"""The memory against a dictionary model, and what must hold of it whatever it holds."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drift.memory import NO_BANK, DriftMemory
from drift.params import DriftParams

SMALL = DriftParams(
    num_slots=6, num_tokens=3, num_neighbours=2, gain=0.6, rate=0.25, threshold=0.8, clip=3.0, num_banks=2
)
HIDDEN, VOCAB = 3, 7


def make(params: DriftParams = SMALL) -> DriftMemory:
    return DriftMemory(params, HIDDEN, VOCAB, "cpu")


def rows(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states in a few clusters, draft and target logits."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0))
    which = torch.randint(4, (count,), generator=generator)
    hidden = centres[which] + 0.25 * torch.randn(count, HIDDEN, generator=generator)
    return hidden, torch.randn(count, VOCAB, generator=generator), torch.randn(count, VOCAB, generator=generator)


@dataclass
class Prototype:
    key: list[float]
    bias: dict[int, float]
    bank: int
    last_used: int


class DictionaryModel:
    """The memory as one would write it with lists and dictionaries."""

    def __init__(self, params: DriftParams) -> None:
        self.params = params
        self.slots: list[Prototype | None] = [None] * params.num_slots
        self.clock = 0

    def near(self, hidden: list[float], bank: int) -> list[tuple[float, int]]:
        """Cosine and slot of the prototypes within the threshold, the nearest first."""
        found = [
            (sum(a * b for a, b in zip(unit(hidden), slot.key, strict=True)), place)
            for place, slot in enumerate(self.slots)
            if slot is not None and slot.bank == bank
        ]
        found.sort(key=lambda item: -item[0])
        return [item for item in found if item[0] >= self.params.threshold]

    def corrected(self, hidden: list[float], logits: list[float], bank: int, fallback: int | None) -> list[float]:
        params, logits = self.params, list(logits)
        near = (self.near(hidden, bank) or self.near(hidden, fallback))[: params.num_neighbours]
        weights = [math.exp(-0.5 * ((1 - cosine) / (1 - params.threshold)) ** 2) for cosine, _ in near]
        for weight, (_, place) in zip(weights, near, strict=True):
            slot = self.slots[place]
            slot.last_used = max(slot.last_used, self.clock)
            for token, bias in slot.bias.items():
                logits[token] += params.gain * weight / max(1.0, sum(weights)) * bias
        return logits

    def learn(
        self, hidden: list[list[float]], draft: list[list[float]], target: list[list[float]], banks: list[int]
    ) -> None:
        params = self.params
        nearest = [self.near(h, bank)[:1] if bank != NO_BANK else [] for h, bank in zip(hidden, banks, strict=True)]
        taught: dict[int, int] = {}
        for row, near in enumerate(nearest):
            for _, place in near:
                taught.setdefault(place, row)
                self.slots[place].last_used = max(self.slots[place].last_used, self.clock)
        founders: list[int] = []
        missing: list[int] = []
        for row, near in enumerate(nearest):
            if not near and banks[row] != NO_BANK:
                missing.append(row)
                alike = [
                    other
                    for other in missing[:-1]
                    if banks[other] == banks[row]
                    and sum(a * b for a, b in zip(unit(hidden[row]), unit(hidden[other]), strict=True))
                    >= params.threshold
                ]
                if not alike:
                    founders.append(row)
        claimed = {row: place for row, place in self.claim(founders, banks).items() if place not in taught}
        for place, row in taught.items():
            slot = self.slots[place]
            fresh = residual(draft[row], target[row], params)
            merged = {token: (1 - params.rate) * bias for token, bias in slot.bias.items()}
            for token, value in fresh.items():
                merged[token] = merged.get(token, 0.0) + params.rate * value
            kept = sorted(merged, key=lambda token: -abs(merged[token]))[: params.num_tokens]
            slot.bias = {token: merged[token] for token in kept}
            slot.key = unit(
                [
                    (1 - params.rate) * old + params.rate * new
                    for old, new in zip(slot.key, unit(hidden[row]), strict=True)
                ]
            )
            slot.last_used = self.clock + 1
        for row, place in claimed.items():
            self.slots[place] = Prototype(
                unit(hidden[row]), residual(draft[row], target[row], params), banks[row], self.clock + 1
            )
        self.clock += 1

    def claim(self, founders: list[int], banks: list[int]) -> dict[int, int]:
        params = self.params
        share = params.num_slots // params.num_banks
        age = sorted(range(params.num_slots), key=lambda place: self.slots[place].last_used if self.slots[place] else 0)
        own = {
            bank: [place for place in age if self.slots[place] is not None and self.slots[place].bank == bank]
            for bank in range(params.num_banks)
        }
        free = [place for place in age if self.slots[place] is None]
        surplus = {place for places in own.values() for place in places[: max(0, len(places) - share)]}
        pool = free + [place for place in age if place in surplus]
        due = [
            row
            for place, row in enumerate(founders)
            if len(own[banks[row]]) + sum(banks[other] == banks[row] for other in founders[:place]) < share
        ]
        founders = due + [row for row in founders if row not in due]
        claimed = {}
        for row in founders:
            if pool:
                claimed[row] = pool.pop(0)
        for row in founders[len(claimed) :]:
            left = [place for place in own[banks[row]] if place not in claimed.values()]
            if left:
                claimed[row] = left[0]
        return claimed


def unit(vector: list[float]) -> list[float]:
    size = math.sqrt(sum(x * x for x in vector))
    return [x / size for x in vector]


def log_softmax(logits: list[float]) -> list[float]:
    total = math.log(sum(math.exp(x) for x in logits))
    return [x - total for x in logits]


def residual(draft: list[float], target: list[float], params: DriftParams) -> dict[int, float]:
    draft, target = log_softmax(draft), log_softmax(target)
    best = sorted(range(len(draft)), key=lambda token: -max(draft[token], target[token]))[: params.num_tokens]
    draft_here, target_here = log_softmax([draft[t] for t in best]), log_softmax([target[t] for t in best])
    return {
        token: min(max(t - d, -params.clip), params.clip)
        for token, d, t in zip(best, draft_here, target_here, strict=True)
    }


banks_of_calls = st.lists(st.lists(st.sampled_from([0, 0, 1, NO_BANK]), min_size=1, max_size=5), max_size=12)


def test_rows_that_share_a_call_found_prototypes_in_slots_of_their_own() -> None:
    """Bank 0 is one slot beyond its share and no slot is free: two newcomers take its two oldest slots."""
    params = replace(SMALL, num_slots=6, threshold=0.999)
    memory = make(params)
    angles = torch.arange(6) * 0.5
    keys = torch.stack((angles.cos(), angles.sin(), torch.zeros(6)), dim=1)
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    memory.learn(keys, logits, -logits, torch.tensor([0, 0, 0, 0, 1, 1]))
    newcomers = torch.tensor([[0.0, 0.6, 0.8], [0.0, -0.6, 0.8]])
    memory.learn(newcomers, logits[:2], -logits[:2], torch.zeros(2, dtype=torch.int64))
    assert memory.occupancy() == [4, 2]
    for newcomer in newcomers:
        assert (memory.keys @ newcomer).max() > 0.999


@settings(deadline=None, max_examples=60)
@given(
    calls=banks_of_calls,
    seed=st.integers(0, 10**6),
    num_slots=st.integers(2, 9),
    fallback=st.sampled_from([None, NO_BANK, 1]),
    is_on_host=st.booleans(),
)
def test_memory_does_what_the_dictionary_model_does(
    calls: list[list[int]], seed: int, num_slots: int, fallback: int | None, is_on_host: bool
) -> None:
    """On a CPU, where it looks at what it holds, and as on a GPU, where it does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drift.memory._is_on_host", lambda tensor: is_on_host)
        patch.setattr("drift.memory._STRIDE", 1)
        do_both(calls, seed, num_slots, fallback, is_on_host)


def do_both(calls: list[list[int]], seed: int, num_slots: int, fallback: int | None, is_on_host: bool) -> None:
    params = replace(SMALL, num_slots=num_slots)
    memory, model = make(params), DictionaryModel(params)
    for call, banks in enumerate(calls):
        hidden, draft, target = rows(seed + call, len(banks))
        logits = draft.clone()
        others = None if fallback is None else torch.full((len(banks),), fallback)
        memory.apply(hidden, logits, torch.tensor(banks), others)
        wanted = [
            model.corrected(h, x, bank, fallback) if bank != NO_BANK else x
            for h, x, bank in zip(hidden.tolist(), draft.tolist(), banks, strict=True)
        ]
        model.clock += not is_on_host or any(bank != NO_BANK for bank in banks)
        torch.testing.assert_close(logits, torch.tensor(wanted), rtol=1e-4, atol=1e-4)
        memory.learn(hidden, draft, target, torch.tensor(banks))
        model.learn(hidden.tolist(), draft.tolist(), target.tolist(), banks)
        assert memory.owner.tolist() == [slot.bank if slot else NO_BANK for slot in model.slots]
        for place, slot in enumerate(model.slots):
            if slot is not None:
                found = dict(zip(memory.token_ids[place].tolist(), memory.bias[place].tolist(), strict=True))
                assert found == pytest.approx(slot.bias, abs=1e-4)
                assert memory.last_used[place] == slot.last_used
                assert memory.keys[place].tolist() == pytest.approx(slot.key, abs=1e-4)


def test_a_bank_below_its_share_comes_before_one_that_has_more() -> None:
    """Of four slots bank 1 holds three, and both banks want one more in the same call: bank 0 gets it, and keeps its own."""
    memory = make(replace(SMALL, num_slots=4, threshold=0.999))
    keys = torch.eye(3)
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    memory.learn(keys, logits[:3], -logits[:3], torch.tensor([1, 1, 1]))
    memory.learn(keys[:1], logits[3:4], -logits[3:4], torch.tensor([0]))
    memory.learn(-keys[:2], logits[:2], -logits[:2], torch.tensor([1, 0]))
    assert memory.occupancy() == [2, 2]


def taught(seed: int = 0, count: int = 20, bank: int = 0, params: DriftParams = SMALL) -> DriftMemory:
    memory = make(params)
    for call in range(count):
        hidden, draft, target = rows(seed + call, 3)
        memory.learn(hidden, draft, target, torch.full((3,), bank))
    return memory


def test_another_bank_is_asked_where_the_own_knows_nothing() -> None:
    memory = make()
    known, draft, target = (each[:1] for each in rows(1, 1))
    foreign = torch.linalg.cross(known, torch.tensor([[0.0, 0.0, 1.0]]))
    memory.learn(known, draft, target, torch.tensor([0]))
    memory.learn(foreign, draft, -target, torch.tensor([1]))

    def corrected(hidden: torch.Tensor, bank: int, fallback: int) -> torch.Tensor:
        logits = draft.clone()
        memory.apply(hidden, logits, torch.tensor([bank]), torch.tensor([fallback]))
        return logits

    alone = draft.clone()
    memory.apply(known, alone, torch.tensor([0]))
    assert torch.equal(corrected(known, 0, 1), alone)  # its own knows it
    assert not torch.equal(corrected(foreign, 0, 1), draft)
    assert torch.equal(corrected(foreign, 0, NO_BANK), draft)
    assert torch.equal(corrected(foreign, NO_BANK, 1), draft)
    assert memory.counters.tolist() == [[4, 2, 1, 0], [1, 1, 1, 0]]


def test_empty_memory_and_rows_without_a_bank_leave_the_logits_bit_for_bit() -> None:
    hidden, logits, _ = rows(1, 8)
    for memory, banks in ((make(), torch.zeros(8, dtype=torch.int64)), (taught(), torch.full((8,), NO_BANK))):
        found = logits.clone()
        memory.apply(hidden, found, banks)
        assert torch.equal(found, logits)


def test_correction_moves_the_draft_towards_the_target() -> None:
    params = replace(SMALL, num_tokens=VOCAB, gain=1.0, clip=50.0)
    memory, (hidden, draft, target) = make(params), rows(3, 1)
    banks = torch.zeros(1, dtype=torch.int64)
    memory.learn(hidden, draft, target, banks)
    memory.apply(hidden, draft, banks)
    torch.testing.assert_close(draft.softmax(1), target.softmax(1), rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10**6), calls=st.integers(1, 30))
def test_a_bank_within_its_share_is_not_touched_by_another(seed: int, calls: int) -> None:
    memory = taught(seed, count=1)
    assert 0 < memory.occupancy()[0] <= 3
    probe, logits, _ = rows(seed, 8)
    banks = torch.zeros(8, dtype=torch.int64)
    before = logits.clone()
    memory.apply(probe, before, banks)
    for call in range(calls):
        hidden, draft, target = rows(seed + 100 + call, 4)
        memory.apply(hidden, draft.clone(), torch.ones(4, dtype=torch.int64))
        memory.learn(hidden * -1, draft, target, torch.ones(4, dtype=torch.int64))
        memory.learn(hidden, draft, target, torch.ones(4, dtype=torch.int64))
    after = logits.clone()
    memory.apply(probe, after, banks)
    assert torch.equal(before, after)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["hidden", "draft", "target"])
def test_values_that_are_not_finite_teach_nothing_and_spread_nowhere(bad: float, where: str) -> None:
    memory, alone = make(), make()
    values = dict(zip(("hidden", "draft", "target"), rows(5, 3), strict=True))
    banks = torch.zeros(3, dtype=torch.int64)
    sound = [value[1:].clone() for value in values.values()]
    values[where][0] = bad
    memory.learn(*values.values(), banks)
    alone.learn(*sound, banks[1:])
    assert torch.equal(memory.bias, alone.bias)
    assert torch.equal(memory.keys, alone.keys)


def test_ten_thousand_lessons_stay_in_the_same_memory() -> None:
    memory = make()
    size = memory.num_bytes
    for call in range(2500):
        hidden, draft, target = rows(call, 4)
        memory.learn(hidden, draft, target, torch.tensor([0, 1, 0, NO_BANK]))
    assert memory.num_bytes == size
    assert sum(memory.occupancy()) <= SMALL.num_slots
    assert memory.bias.abs().max() <= SMALL.clip
    for ids, owner in zip(memory.token_ids.tolist(), memory.owner.tolist(), strict=True):
        assert owner == NO_BANK or len(set(ids)) == len(ids)


def test_reset_of_one_bank_leaves_the_others() -> None:
    memory = taught(bank=1)
    hidden, draft, target = rows(77, 1)
    memory.learn(hidden, draft, target, torch.zeros(1, dtype=torch.int64))
    kept = memory.occupancy()[1]
    memory.reset(0)
    assert memory.occupancy() == [0, kept]
    memory.reset()
    assert memory.occupancy() == [0, 0]


def test_counters_count() -> None:
    memory, (hidden, draft, target) = make(), rows(3, 1)
    bank = torch.ones(1, dtype=torch.int64)
    memory.apply(hidden, draft.clone(), bank)
    memory.learn(hidden, draft, target, bank)
    memory.apply(hidden, draft.clone(), bank)
    assert dict(zip(memory.COUNTERS, memory.counters[1].tolist(), strict=True)) == {
        "lookups": 2,
        "hits": 1,
        "allocations": 1,
        "evictions": 0,
    }
    assert memory.counters[0].tolist() == [0, 0, 0, 0]
    counted = memory.counters.clone()
    assert memory.bank_counts() == counted.tolist()
    memory.reset(1)
    assert memory.bank_counts()[1] == [0, 0, 0, 0]
    assert torch.equal(memory.counters, counted), "what was told once is not taken back"


def test_more_tokens_than_the_draft_has_are_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens: found 8; expected at most the 7"):
        make(replace(SMALL, num_tokens=8))
