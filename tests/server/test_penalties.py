"""Penalties and the minimum length count tokens, not verify steps (field case A3)."""

import pytest

from tests.server.client import FULL_LENGTH, TIE_GAP, Client, Reference, assert_parity

NUM_TOKENS = 48


@pytest.mark.parametrize("min_new_tokens", [1, 8, 13])
def test_the_minimum_length_is_one_of_tokens(ada: Client, ref: Client, prompts, tokenizer, min_new_tokens):
    """The end-of-text token is the likeliest from the start, and comes as soon as it may."""
    wanted = {
        "min_new_tokens": min_new_tokens,
        "max_new_tokens": 40,
        "logit_bias": {str(tokenizer.eos_token_id): 1000.0},
    }
    right, found = (client.generate(prompts[3], **wanted) for client in (ref, ada))
    assert len(found.ids) == min_new_tokens + 1
    assert found.essence == right.essence


def test_a_stop_token_outside_the_vocabulary_stops_nothing_and_disturbs_nobody(ada: Client, ref: Client, prompts):
    """SGLang takes any number for one."""
    odd = FULL_LENGTH | {"max_new_tokens": 16, "stop_token_ids": [10**6, 2**63 - 1, -5]}
    wanted = [odd, FULL_LENGTH | {"max_new_tokens": 16, "repetition_penalty": 1.1}]
    right, found = (client.generate_batch(prompts[:2], wanted) for client in (ref, ada))
    assert [answer.ids for answer in found] == [answer.ids for answer in right]


@pytest.mark.parametrize(
    "penalty",
    [
        {"presence_penalty": 0.9, "frequency_penalty": 0.2},
        pytest.param({"frequency_penalty": 0.6}, marks=pytest.mark.slow),
    ],
)
def test_every_token_is_the_likeliest_after_the_penalties_of_those_before(
    ada: Client, ref: Client, reference: Reference, prompts, penalty
):
    """Penalised requests beside plain ones; plain decoding's model says what it would have said."""
    penalised = FULL_LENGTH | {"max_new_tokens": NUM_TOKENS} | penalty
    plain = FULL_LENGTH | {"max_new_tokens": NUM_TOKENS}
    answers = ada.generate_batch(prompts[:8], [penalised if index % 2 else plain for index in range(8)])
    assert_parity(reference.answers(prompts[:8], NUM_TOKENS)[::2], answers[::2])
    num_changed = 0
    for ids, answer in zip(prompts[1:8:2], answers[1::2], strict=True):
        scored = ref.generate(
            ids + answer.ids,
            request={"return_logprob": True, "top_logprobs_num": 30, "logprob_start_len": len(ids) - 1},
            max_new_tokens=1,
        )
        for position, (token, likeliest) in enumerate(
            zip(answer.ids, scored.meta["input_top_logprobs"][-NUM_TOKENS:], strict=True)
        ):
            before = answer.ids[:position]
            after = {
                other: log_prob
                - penalty.get("frequency_penalty", 0) * before.count(other)
                - penalty.get("presence_penalty", 0) * (other in before)
                for log_prob, other, _ in likeliest
            }
            assert token in after, position
            assert after[token] >= max(after.values()) - TIE_GAP, position
            num_changed += token != likeliest[0][1]
    assert num_changed > 8, "the penalties changed next to nothing"
