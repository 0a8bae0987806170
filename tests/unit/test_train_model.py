"""The draft model in training: file names, initialisation, and its steps against a plain reference."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from adaptivespec.draft_training.corpus import CorpusError, Row
from adaptivespec.draft_training.loop import make_batch
from adaptivespec.draft_training.model import Eagle3Draft, draft_config, init_from_target, load_draft, save_draft
from adaptivespec.draft_training.target_states import TargetStates, aux_layers, common_prefix, target_forward
from adaptivespec.draft_training.ttt import (
    Batch,
    LossOptions,
    count_agreement,
    head_tokens,
    sample_rows,
    ttt_loss,
    unroll,
)

VOCAB, DRAFT_IDS = 50, torch.tensor([0, 3, 4, 7, 8, 11, 12, 15, 20, 21, 30, 31, 33, 40, 48, 49])


@pytest.fixture(scope="module")
def target() -> LlamaModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=32, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, rope_theta=1000.0, max_position_embeddings=64, pad_token_id=2,
    )  # fmt: skip
    return LlamaModel(config).eval().requires_grad_(False)


@pytest.fixture
def draft(target: LlamaModel) -> Eagle3Draft:
    torch.manual_seed(1)
    draft = Eagle3Draft(draft_config(target.config, len(DRAFT_IDS)), DRAFT_IDS)
    init_from_target(draft, target)
    return draft


def make_rows() -> list[Row]:
    draw = torch.Generator().manual_seed(2)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(VOCAB, (count,), generator=draw).tolist())

    return [Row((1, 2, *ids(prompt)), ids(answer), True) for prompt, answer in ((1, 12), (4, 9), (2, 14), (6, 10))]


@pytest.fixture
def states(target: LlamaModel, tmp_path: Path) -> TargetStates:
    return TargetStates(tmp_path / "states", target, make_rows(), "tiny")


@pytest.fixture
def batch(states: TargetStates) -> Batch:
    return make_batch(states, [0, 1, 2, 3])


def test_target_forward_gives_the_states_that_sglang_captures(target: LlamaModel) -> None:
    tokens = torch.tensor([[1, 2, 9, 8, 7, 6], [1, 2, 5, 4, 3, 2]])
    out = target(tokens, output_hidden_states=True)
    # hidden_states[i] is the input of layer i; layers 2, L/2 and L-3 of 8.
    expected = torch.stack([*(out.hidden_states[i] for i in (2, 4, 5)), out.last_hidden_state], dim=2)
    assert aux_layers(8) == (2, 4, 5)
    assert aux_layers(30) == (2, 15, 27)
    _, prefix = target_forward(target, tokens[:1, :2])
    after, _ = target_forward(target, tokens[:, 2:], prefix)
    assert after.shape[2] == 4
    torch.testing.assert_close(after, expected[:, 2:], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(prefix.states, expected[0, :2], atol=1e-5, rtol=1e-4)


def test_states_are_kept_and_belong_to_one_corpus(states: TargetStates, target: LlamaModel, tmp_path: Path) -> None:
    tokens, first = states.get([2, 0])
    assert tokens[0].tolist() == list(states.rows[2].token_ids)
    assert tokens[1, len(states.rows[0]) :].eq(0).all()
    direct, _ = target_forward(target, tokens[:1])
    torch.testing.assert_close(first[0], direct[0].to(torch.bfloat16).float(), atol=0.02, rtol=0.02)
    broken = TargetStates(tmp_path / "states", target, make_rows(), "tiny")
    broken._prefix = None  # a second forward would fail
    torch.testing.assert_close(broken.get([2, 0])[1], first, atol=0, rtol=0)
    with pytest.raises(CorpusError, match=r"expected those of .*another.*; fix: delete that folder"):
        TargetStates(tmp_path / "states", target, make_rows(), "another")


def test_common_prefix_ends_where_prompts_part() -> None:
    assert common_prefix(make_rows()) == (1, 2)
    assert common_prefix([Row((1, 2, 3), (4,), True), Row((1, 2), (3,), True)]) == (1, 2)
    assert common_prefix([Row((5,), (4,), True), Row((6,), (4,), True)]) == ()


def test_saved_draft_has_sglangs_names_and_difference_d2t(draft: Eagle3Draft, tmp_path: Path) -> None:
    save_draft(draft, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert {name.split(".")[0] for name in state} == {"fc", "midlayer", "norm", "lm_head", "d2t", "t2d"}
    assert len(state) == 15
    assert (torch.arange(len(DRAFT_IDS)) + state["d2t"]).tolist() == DRAFT_IDS.tolist()
    assert state["t2d"].nonzero().flatten().tolist() == DRAFT_IDS.tolist()
    assert state["midlayer.self_attn.q_proj.weight"].shape == (24, 48)
    loaded = load_draft(tmp_path)
    assert loaded.config == draft.config
    for (name, ours), theirs in zip(draft.named_parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours.to(torch.bfloat16).float(), atol=0, rtol=0, msg=name)


def plain_chain(draft: Eagle3Draft, target: LlamaModel, batch: Batch, row: int, start: int, steps: int) -> list[Tensor]:
    """One chain as a server drafts it: keys in a growing list, one position at a time, no batching."""
    layer, attn, config = draft.midlayer, draft.midlayer.self_attn, draft.config
    heads, groups = config["num_attention_heads"], config["num_attention_heads"] // config["num_key_value_heads"]
    embed, tokens = target.embed_tokens.weight, batch.tokens[row]

    def rotate(x: Tensor, position: int) -> Tensor:
        half = x.shape[-1] // 2
        angles = position * config["rope_theta"] ** (-torch.arange(half) / half)
        turned = torch.view_as_complex(torch.stack((x[:, :half], x[:, half:]), -1).contiguous())
        turned = turned * torch.polar(torch.ones(half), angles)
        return torch.cat((turned.real, turned.imag), -1)

    def advance(hidden: Tensor, token: int, position: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        x = torch.cat((layer.input_layernorm(embed[token]), layer.hidden_norm(hidden)))
        keys.append(rotate(attn.k_proj(x).view(heads // groups, -1), position))
        values.append(attn.v_proj(x).view(heads // groups, -1))
        query = rotate(attn.q_proj(x).view(heads, -1), position)
        outs = []
        for head in range(heads):
            logits = torch.stack([key[head // groups] @ query[head] for key in keys]) / query.shape[-1] ** 0.5
            outs.append(logits.softmax(0) @ torch.stack([value[head // groups] for value in values]))
        hidden = hidden + attn.o_proj(torch.cat(outs))
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    keys: list[Tensor] = []
    values: list[Tensor] = []
    for position in range(start + 1):
        fused = draft.fc(batch.states[row, position, :3].flatten())
        hidden = advance(fused, int(tokens[position + 1]), position, keys, values)
    states = [hidden]
    for step in range(1, steps):
        states.append(advance(states[-1], int(tokens[start + 1 + step]), start + step, keys, values))
    return states


@torch.no_grad()
def test_batched_steps_equal_one_chain_at_a_time(draft: Eagle3Draft, target: LlamaModel, batch: Batch) -> None:
    rows = torch.arange(3, 9).repeat(4, 1)
    later = rows[:, [0, 2, 5]].contiguous()
    results = list(unroll(draft, target.embed_tokens.weight, batch, [rows, later, later]))
    for row in (0, 3):
        for slot, start in enumerate((3, 5, 8)):
            chain = plain_chain(draft, target, batch, row, start, steps=3)
            torch.testing.assert_close(results[0][0][row, (0, 2, 5)[slot]], chain[0], atol=1e-5, rtol=1e-4)
            for step in (1, 2):
                hidden, positions = results[step]
                assert positions[row, slot] == start + 1 + step
                torch.testing.assert_close(hidden[row, slot], chain[step], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_agreement_counts_every_answer_token_once_a_step(draft: Eagle3Draft, target: LlamaModel, batch: Batch) -> None:
    embed = target.embed_tokens.weight
    expected = [0, 0, 0]
    for row in range(4):
        answer = range(int(batch.prompt_lens[row]) - 1, int(batch.lens[row]) - 1)
        for start in range(answer[0] - 3, answer[-1]):
            if start < 0:
                continue
            last = min(3, answer[-1] - start)
            for step, state in enumerate(plain_chain(draft, target, batch, row, start, last)):
                if (position := start + 1 + step) in answer:
                    best = int((embed @ batch.states[row, position, -1]).argmax())
                    expected[step] += int(DRAFT_IDS[draft.lm_head(draft.norm(state)).argmax()]) == best
    hits, positions = count_agreement(draft, embed, batch, num_steps=3)
    assert hits.tolist() == expected
    assert positions == 12 + 9 + 14 + 10
    assert 0 < sum(expected) < 3 * positions


def test_rows_start_at_the_last_prompt_token_and_the_later_ones_are_a_share(batch: Batch) -> None:
    options = LossOptions(num_steps=3, row_share=0.5)
    first, second, third = sample_rows(batch, options, torch.Generator().manual_seed(0))
    assert first[:, 0].tolist() == (batch.prompt_lens - 1).tolist()
    assert second.shape == (4, round(first.shape[1] * 0.5))
    assert second is third
    for row in range(4):
        assert set(second[row].tolist()) <= set(first[row].tolist())
    whole = sample_rows(batch, LossOptions(num_steps=3, row_share=1.0), torch.Generator())
    assert all(rows is whole[0] for rows in whole)


@torch.no_grad()
def plain_loss(draft: Eagle3Draft, target: LlamaModel, batch: Batch, options: LossOptions) -> Tensor:
    embed, total = target.embed_tokens.weight, torch.zeros(())
    for step in range(options.num_steps):
        losses = []
        for row in range(4):
            for start in range(int(batch.prompt_lens[row]) - 1, int(batch.lens[row]) - 2 - step):
                position = start + 1 + step
                if int(batch.tokens[row, position + 1]) in DRAFT_IDS.tolist():
                    state = plain_chain(draft, target, batch, row, start, step + 1)[step]
                    wanted = (embed[DRAFT_IDS] @ batch.states[row, position, -1]).softmax(-1)
                    losses.append(-(wanted * draft.lm_head(draft.norm(state)).log_softmax(-1)).sum())
        total = total + options.step_decay**step * torch.stack(losses).mean()
    return total


def test_loss_is_the_cross_entropy_with_the_targets_distribution(
    draft: Eagle3Draft, target: LlamaModel, batch: Batch
) -> None:
    options = LossOptions(num_steps=3, row_share=1.0, head_top=0, dropout=0.0)
    loss = ttt_loss(draft, target.embed_tokens.weight, batch, options, torch.Generator())
    torch.testing.assert_close(loss, plain_loss(draft, target, batch, options), atol=1e-4, rtol=1e-4)


def test_drawing_every_other_token_gives_the_whole_softmax(
    draft: Eagle3Draft, target: LlamaModel, batch: Batch
) -> None:
    def loss(**choice: int) -> Tensor:
        options = LossOptions(num_steps=2, row_share=1.0, dropout=0.0, **choice)
        return ttt_loss(draft, target.embed_tokens.weight, batch, options, torch.Generator().manual_seed(3))

    torch.testing.assert_close(loss(head_top=1, head_random=100), loss(head_top=0), atol=1e-4, rtol=1e-5)


def test_random_tokens_of_the_softmax_stand_for_all_that_were_not_drawn() -> None:
    logits = torch.zeros(3, 40)
    logits[0, [5, 6]], logits[1, [6, 7]], logits[2, [30, 5]] = 1.0, 1.0, 1.0
    kept, shift = head_tokens(logits, LossOptions(head_top=2, head_random=9), torch.Generator().manual_seed(0))
    assert kept[:4].tolist() == [5, 6, 7, 30]
    assert shift[:4].eq(0).all()
    assert len(set(kept.tolist())) == 4 + 9
    assert shift[4:].exp().sum().item() == pytest.approx(40 - 4, rel=1e-5)


def test_feature_weight_adds_a_cost(draft: Eagle3Draft, target: LlamaModel, batch: Batch) -> None:
    losses = [
        ttt_loss(
            draft,
            target.embed_tokens.weight,
            batch,
            LossOptions(feature_weight=w, dropout=0.0),
            torch.Generator().manual_seed(0),
        )
        for w in (0.0, 1.0)
    ]
    assert losses[1] > losses[0]


def test_dropout_repeats_with_its_generator_and_scales_what_it_keeps(
    draft: Eagle3Draft, target: LlamaModel, batch: Batch
) -> None:
    def loss(dropout: float, seed: int = 0) -> float:
        options = LossOptions(num_steps=2, row_share=1.0, head_top=0, dropout=dropout)
        generator = torch.Generator().manual_seed(seed)
        return ttt_loss(draft, target.embed_tokens.weight, batch, options, generator).item()

    assert loss(0.5) == loss(0.5) != loss(0.5, seed=1)
    assert loss(0.5) != loss(0.0)
    means = sum(loss(0.2, seed) for seed in range(20)) / 20
    assert means == pytest.approx(loss(0.0), rel=0.1)
