"""The training loop on a tiny random model: resuming, order, learning rate, and that it learns."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaModel

from adaptivespec.draft_training.corpus import Row
from adaptivespec.draft_training.loop import (
    BatchOrder,
    LoopOptions,
    Trainer,
    TrainingError,
    learning_rate,
    measure_agreement,
)
from adaptivespec.draft_training.model import Eagle3Draft, draft_config, init_from_target
from adaptivespec.draft_training.target_states import TargetStates
from adaptivespec.draft_training.ttt import LossOptions

LOSS = LossOptions(num_steps=3, head_top=2, head_random=4)


@pytest.fixture(scope="module")
def target() -> LlamaModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, rope_theta=1000.0, max_position_embeddings=64, pad_token_id=2,
    )  # fmt: skip
    return LlamaModel(config).eval().requires_grad_(False)


def make_trainer(target: LlamaModel, folder: Path, **options: int) -> Trainer:
    draw = torch.Generator().manual_seed(2)
    rows = [Row((1, 2), tuple(torch.randint(50, (10 + i % 4,), generator=draw).tolist()), True) for i in range(12)]
    torch.manual_seed(1)
    draft = Eagle3Draft(draft_config(target.config, 20), torch.arange(0, 40, 2))
    init_from_target(draft, target)
    loop = LoopOptions(**{"num_steps": 6, "decay_steps": 3, "warmup_steps": 2, "checkpoint_every": 2} | options)
    states = TargetStates(folder / "states", target, rows, "tiny")
    return Trainer(draft, states, list(range(10)), folder, loop, LOSS)


class Stop(Exception):
    pass


def test_a_resumed_training_ends_with_the_weights_of_an_uninterrupted_one(target: LlamaModel, tmp_path: Path) -> None:
    whole = make_trainer(target, tmp_path / "whole")
    whole.run()

    def stop(trainer: Trainer) -> None:
        if trainer.step == 4:
            raise Stop

    with pytest.raises(Stop):
        make_trainer(target, tmp_path / "parts").run(stop)
    resumed = make_trainer(target, tmp_path / "parts")
    steps: list[int] = []
    resumed.run(lambda trainer: steps.append(trainer.step))
    assert steps == [6]
    for (name, ours), theirs in zip(whole.draft.named_parameters(), resumed.draft.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours, atol=0, rtol=0, msg=name)


def test_a_checkpoint_of_other_options_is_refused_but_a_longer_training_goes_on(
    target: LlamaModel, tmp_path: Path
) -> None:
    make_trainer(target, tmp_path).run()
    with pytest.raises(TrainingError, match=r"found a training with .*'seed': 0.*; fix: give the same options"):
        make_trainer(target, tmp_path, seed=1).run()
    longer = make_trainer(target, tmp_path, num_steps=8, num_workers=1)
    longer.run()
    assert longer.step == 8


def test_a_finished_training_that_is_lengthened_ends_as_one_asked_for_at_once(
    target: LlamaModel, tmp_path: Path
) -> None:
    whole = make_trainer(target, tmp_path / "whole", num_steps=9)
    whole.run()
    make_trainer(target, tmp_path / "parts").run()
    lengthened = make_trainer(target, tmp_path / "parts", num_steps=9)
    lengthened.run()
    for ours, theirs in zip(whole.draft.parameters(), lengthened.draft.parameters(), strict=True):
        assert ours.equal(theirs)
    with pytest.raises(TrainingError, match="a decay that begins at step 1"):
        make_trainer(target, tmp_path / "parts", num_steps=4).run()


def test_the_number_of_threads_does_not_change_the_weights(target: LlamaModel, tmp_path: Path) -> None:
    one, three = (make_trainer(target, tmp_path / str(n), num_workers=n) for n in (1, 3))
    one.run()
    three.run()
    assert all(torch.equal(a, b) for a, b in zip(one.draft.parameters(), three.draft.parameters(), strict=True))


def test_training_raises_agreement_on_what_it_trains_on(target: LlamaModel, tmp_path: Path) -> None:
    trainer = make_trainer(target, tmp_path, num_steps=60, decay_steps=30, checkpoint_every=60)
    before = measure_agreement(trainer.draft, trainer.states, list(range(10)), 3)
    trainer.run()
    after = measure_agreement(trainer.draft, trainer.states, list(range(10)), 3)
    assert sum(after) > sum(before) + 0.1


lens = st.dictionaries(st.integers(0, 999), st.integers(10, 300), min_size=1, max_size=40)


@given(lens=lens, micro_batch=st.integers(1, 4), seed=st.integers(0, 9))
def test_an_epoch_takes_each_row_at_most_once(lens: dict[int, int], micro_batch: int, seed: int) -> None:
    lens |= {1000 + i: 50 for i in range(micro_batch)}
    order = BatchOrder(lens, micro_batch, seed)
    served = []
    for epoch in range(3):
        batches = order.epoch(epoch)
        assert all(len(batch) == micro_batch for batch in batches)
        rows = [row for batch in batches for row in batch]
        assert len(set(rows)) == len(rows)
        assert 0 <= len(lens) - len(rows) < micro_batch
        served += batches
    # Asked one by one, or out of order as after a restart, the answer is the same.
    assert [order.rows(n) for n in range(len(served))] == served
    assert order.rows(0) == served[0]
    assert BatchOrder(lens, micro_batch, seed).rows(len(served) - 1) == served[-1]


@given(steps=st.integers(10, 200), data=st.data())
def test_learning_rate_rises_stays_and_falls_to_zero(steps: int, data: st.DataObject) -> None:
    decay, warmup = data.draw(st.integers(1, steps // 2)), data.draw(st.integers(1, steps // 2))
    options = LoopOptions(num_steps=steps, decay_steps=decay, warmup_steps=warmup, learning_rate=1.0)
    rates = [learning_rate(step, options) for step in range(steps)]
    assert rates[:warmup] == sorted(rates[:warmup])
    assert all(rate == 1.0 for rate in rates[warmup : steps - decay])
    assert rates[steps - decay :] == sorted(rates[steps - decay :], reverse=True)
    assert rates[-1] == pytest.approx(1 / decay)
    longer = LoopOptions(num_steps=steps + 7, decay_steps=decay, warmup_steps=warmup, learning_rate=1.0)
    assert all(learning_rate(step, longer) == rates[step] for step in range(steps - decay))
