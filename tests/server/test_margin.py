"""The margin rule from outside: every token is the target's top-1 or within kappa, and the others are all counted."""

import math

import pytest

from tests.server.client import FULL_LENGTH, Answer, Client, Reference, assert_parity

NUM_TOKENS = 48
# Ratios are compared across two servers and two batch sizes.
ROUNDING = 1e-3


def ratios(ref: Client, ids: list[int], answer: Answer) -> list[float]:
    """``p(token) / p(top1)`` of every token of an answer, as plain decoding's model sees it after the tokens before."""
    scored = ref.generate(
        ids + answer.ids,
        request={"return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": len(ids) - 1},
        max_new_tokens=1,
    )
    tokens = scored.meta["input_token_logprobs"][-len(answer.ids) :]
    tops = scored.meta["input_top_logprobs"][-len(answer.ids) :]
    assert [token[1] for token in tokens] == answer.ids
    return [math.exp(token[0] - top[0][0]) for token, top in zip(tokens, tops, strict=True)]


def assert_bounded(ref: Client, ids: list[int], answer: Answer, kappa: float) -> int:
    """The invariant; gives the number of tokens that are not the target's own."""
    margin = answer.meta["spec_margin"]
    found = ratios(ref, ids, answer)
    assert margin["kappa"] == pytest.approx(kappa)
    assert min(found) >= kappa - ROUNDING
    others = {position for position, ratio in enumerate(found) if ratio < 1 - ROUNDING}
    listed = {position: prob / top1 for position, prob, top1 in margin["promotions"]}
    assert others <= listed.keys()
    assert all(found[position] > 1 - 2 * ROUNDING for position in listed.keys() - others)  # near ties
    assert all(found[position] == pytest.approx(ratio, abs=ROUNDING) for position, ratio in listed.items())
    assert margin["num_promoted"] == len(listed)
    return len(others)


WITH_DETAILS = {"adaptive": {"details": True}}


@pytest.mark.parametrize(
    ("num_prompts", "kappas"),
    [
        pytest.param(24, [None, 0.1, 0.3, 0.7], id="24"),
        pytest.param(200, [None, 0.1, 0.3, 0.7, 1.0], id="200", marks=[pytest.mark.slow, pytest.mark.timeout(5400)]),
    ],
)
def test_every_token_is_the_targets_or_within_kappa(ada: Client, ref: Client, prompts, num_prompts, kappas):
    """Batches of eight in which requests tighten a server's kappa of 0.1; None asks for nothing."""
    asked = [kappas[index % len(kappas)] for index in range(num_prompts)]
    sent = [prompts[index % len(prompts)] + prompts[index // len(prompts)][:4] for index in range(num_prompts)]
    before = ada.adaptive_info()["counts"]
    answers: list[Answer] = []
    with ada.kappa(0.1):
        for start in range(0, num_prompts, 8):
            some = range(start, min(start + 8, num_prompts))
            options = [{"details": True} | ({} if asked[index] is None else {"kappa": asked[index]}) for index in some]
            sampling = [FULL_LENGTH | {"max_new_tokens": NUM_TOKENS, "custom_params": {"adaptive": o}} for o in options]
            answers += ada.generate_batch([sent[index] for index in some], sampling)
    after = ada.adaptive_info()["counts"]
    num_others = [
        assert_bounded(ref, ids, answer, kappa or 0.1) for ids, answer, kappa in zip(sent, answers, asked, strict=True)
    ]
    margins = [answer.meta["spec_margin"] for answer in answers]
    assert after["promoted"] - before["promoted"] == sum(margin["num_promoted"] for margin in margins)
    assert after["promoted_cut"] - before["promoted_cut"] == sum(margin["num_promoted_cut"] for margin in margins)
    loose, tight = (
        sum(n for n, kappa in zip(num_others, asked, strict=True) if kappa in which)
        for which in ((None, 0.1), (0.7, 1.0))
    )
    assert loose > tight, "a smaller kappa promotes more"
    print(f"{sum(num_others)} of {sum(len(answer.ids) for answer in answers)} tokens are not the target's own")


def test_strict_requests_beside_loose_ones_are_the_targets(ada: Client, reference: Reference, prompts):
    right = reference.answers(prompts[:8], 64)
    asked = {1: {"strict": True}, 3: {"enabled": False}, 5: {"kappa": 0.999999}}
    length = FULL_LENGTH | {"max_new_tokens": 64}
    sampling = [length | {"custom_params": {"adaptive": asked.get(index, {})}} for index in range(8)]
    with ada.kappa(0.1):
        answers = ada.generate_batch(prompts[:8], sampling)
    for index in asked:
        safe = right[index].num_safe
        assert answers[index].ids[:safe] == right[index].ids[:safe], asked[index]
    loose = [index for index in range(8) if index not in asked]
    assert any(answers[index].ids != right[index].ids for index in loose), "nothing was promoted"
    assert [index for index, answer in enumerate(answers) if "spec_margin" not in answer.meta] == [1, 3]


def test_without_kappa_nothing_is_promoted(ada: Client, reference: Reference, prompts):
    options = {"custom_params": {"adaptive": {"kappa": 0.1, "details": True}}}  # cannot loosen a strict server
    answers = ada.generate_batch(prompts[:8], [FULL_LENGTH | options | {"max_new_tokens": 64}] * 8)
    assert_parity(reference.answers(prompts[:8], 64), answers)
    assert all("spec_margin" not in answer.meta for answer in answers)


def test_a_stop_inside_a_run_with_promotions(ada: Client, prompts, tokenizer):
    """What a stop or the cap cuts off is counted apart, and the answer ends where it says."""
    with ada.kappa(0.1):
        for cap in (3, 7, 16):
            answers = ada.generate_batch(
                prompts[:8], [FULL_LENGTH | {"max_new_tokens": cap, "custom_params": WITH_DETAILS}] * 8
            )
            for answer in answers:
                margin = answer.meta["spec_margin"]
                assert len(answer.ids) == cap
                assert all(position < cap for position, _, _ in margin["promotions"])
                assert margin["num_promoted_cut"] <= answer.num_cut
        stop = tokenizer(" the", add_special_tokens=False).input_ids
        for answer in ada.generate_batch(
            prompts[:8], [{"max_new_tokens": 64, "stop_token_ids": stop, "custom_params": WITH_DETAILS}] * 8
        ):
            promoted = {answer.ids[position] for position, _, _ in answer.meta["spec_margin"]["promotions"]}
            assert not promoted & {*stop, tokenizer.eos_token_id}


@pytest.mark.parametrize(
    "path_and_body",
    [
        ("/generate", lambda custom: {"text": "Hi", "sampling_params": {"custom_params": custom}}),
        ("/v1/completions", lambda custom: {"model": "m", "prompt": "Hi", "custom_params": custom}),
        (
            "/v1/chat/completions",
            lambda custom: {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "custom_params": custom},
        ),
    ],
    ids=lambda pair: pair[0] if isinstance(pair, tuple) else None,
)
def test_bad_options_get_a_400_that_names_field_value_and_range(ada: Client, path_and_body):
    path, body = path_and_body
    response = ada.post(path, body({"adaptive": {"kappa": 1.5}}))
    assert response.status_code == 400, response.text
    assert "custom_params.adaptive.kappa: found 1.5; expected a number above 0, at most 1" in response.text
    assert ada.post(path, body({"adaptive": {"kappa": 0.5}})).ok


@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_a_kappa_out_of_range_is_rejected_and_counted(ada: Client, value):
    before = ada.adaptive_info()["counts"]["refusals"].get("adaptive_kappa", 0)
    response = ada.post("/set_internal_state", {"server_args": {"adaptive_kappa": value}})
    assert response.json() == [False]
    info = ada.adaptive_info()
    assert info["kappa"] is None
    assert info["counts"]["refusals"]["adaptive_kappa"] == before + 1
