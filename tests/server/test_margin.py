"""The margin rule from outside: every token is the target's top-1 or within kappa, and the others are all counted."""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import requests

from tests.server.client import FULL_LENGTH, Answer, Client, Reference, assert_parity

NUM_TOKENS = 48
# Ratios are compared across two servers and two batch sizes.
ROUNDING = 1e-3


NUM_ALTERNATIVES = 64  # of the target's likeliest tokens, among which its own choice must be where a request bends it

Shift = Callable[[int, list[int]], float]


class Bend(NamedTuple):
    """What a request does to the target's logits.

    Attributes:
        sampling: how it asks for that.
        shift: of a token, after the tokens before it: what is added to its log-probability; at most 0.
    """

    sampling: dict[str, Any]
    shift: Shift


def no_shift(token: int, before: list[int]) -> float:
    """Of a request that bends nothing."""
    return 0.0


def bends(tokenizer: Any) -> list[Bend]:
    """As they are met in one batch."""
    banned = tokenizer(" the", add_special_tokens=False).input_ids[0]
    is_plain: dict[int, bool] = {}

    def only_plain(token: int, before: list[int]) -> float:
        if token not in is_plain:
            is_plain[token] = re.fullmatch(r"[A-Za-z ,.]+", tokenizer.decode([token])) is not None
        return 0.0 if is_plain[token] else -math.inf

    return [
        Bend({}, no_shift),
        Bend({"logit_bias": {str(banned): -100.0}}, lambda token, before: -100.0 if token == banned else 0.0),
        Bend({"frequency_penalty": 0.4}, lambda token, before: -0.4 * before.count(token)),
        # Open at its end, so that the cap ends the answer and not the grammar.
        Bend({"regex": "[A-Za-z ,.]{1000,}"}, only_plain),
    ]


def ratios(ref: Client, ids: list[int], answer: Answer, shift: Shift = no_shift) -> list[float]:
    """``p(token) / p(top1)`` of every token of an answer, as plain decoding's model sees it after the tokens before."""
    scored = ref.generate(
        ids + answer.ids,
        request={"return_logprob": True, "top_logprobs_num": NUM_ALTERNATIVES, "logprob_start_len": len(ids) - 1},
        max_new_tokens=1,
    )
    tokens = scored.meta["input_token_logprobs"][-len(answer.ids) :]
    tops = scored.meta["input_top_logprobs"][-len(answer.ids) :]
    assert [token[1] for token in tokens] == answer.ids
    found = []
    for position, (token, top) in enumerate(zip(tokens, tops, strict=True)):
        before = answer.ids[:position]
        best = max(each[0] + shift(each[1], before) for each in top)
        assert best >= top[-1][0], "the target's choice may be beyond the alternatives"
        found.append(math.exp(token[0] + shift(token[1], before) - best))
    return found


def assert_bounded(ref: Client, ids: list[int], answer: Answer, kappa: float, shift: Shift = no_shift) -> int:
    """The invariant; gives the number of tokens that are not the target's own."""
    margin = answer.meta["spec_margin"]
    found = ratios(ref, ids, answer, shift)
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
def test_every_token_is_the_targets_or_within_kappa(ada: Client, ref: Client, prompts, tokenizer, num_prompts, kappas):
    """Batches of eight in which requests tighten a server's kappa of 0.1, and some bend the target's logits; None asks for
    nothing."""
    asked = [kappas[index % len(kappas)] for index in range(num_prompts)]
    kinds = bends(tokenizer)
    bent = [kinds[index // len(kappas) % len(kinds)] for index in range(num_prompts)]
    sent = [prompts[index % len(prompts)] + prompts[index // len(prompts)][:4] for index in range(num_prompts)]
    before = ada.adaptive_info()["counts"]
    answers: list[Answer] = []
    with ada.kappa(0.1):
        for start in range(0, num_prompts, 8):
            some = range(start, min(start + 8, num_prompts))
            options = [{"details": True} | ({} if asked[index] is None else {"kappa": asked[index]}) for index in some]
            sampling = [
                FULL_LENGTH | bend.sampling | {"max_new_tokens": NUM_TOKENS, "custom_params": {"adaptive": option}}
                for bend, option in zip([bent[index] for index in some], options, strict=True)
            ]
            answers += ada.generate_batch([sent[index] for index in some], sampling)
    after = ada.adaptive_info()["counts"]
    num_others = [
        assert_bounded(ref, ids, answer, kappa or 0.1, bend.shift)
        for ids, answer, kappa, bend in zip(sent, answers, asked, bent, strict=True)
    ]
    for bend in kinds:
        mine = [n for n, each in zip(num_others, bent, strict=True) if each is bend]
        assert sum(mine) > 0, f"nothing was promoted under {bend.sampling}"
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


def test_sampled_requests_are_promoted_by_their_own_distribution(ada: Client, ref: Client, prompts):
    """The ratio is that of the tempered distribution; a request that is strict draws what it draws on a strict server."""
    temperature = 0.7
    sampling = [FULL_LENGTH | {"max_new_tokens": 48, "temperature": temperature, "sampling_seed": n} for n in range(4)]
    right = ada.generate_batch(prompts[:4], sampling)
    asked = [{"strict": True} if index == 3 else {"details": True} for index in range(4)]
    with ada.kappa(0.3):
        answers = ada.generate_batch(
            prompts[:4],
            [each | {"custom_params": {"adaptive": options}} for each, options in zip(sampling, asked, strict=True)],
        )
    assert answers[3].ids == right[3].ids
    assert "spec_margin" not in answers[3].meta
    num_promoted = 0
    for ids, answer, strict in zip(prompts[:4], answers, right, strict=True):
        promotions = answer.meta.get("spec_margin", {"promotions": []})["promotions"]
        first = promotions[0][0] if promotions else len(answer.ids)
        assert answer.ids[:first] == strict.ids[:first], "before the first promotion the draws are the same"
        found = ratios(ref, ids, answer)
        for position, prob, top1 in promotions:
            assert prob / top1 >= 0.3
            assert prob / top1 == pytest.approx(found[position] ** (1 / temperature), abs=ROUNDING)
        num_promoted += len(promotions)
    assert num_promoted > 0


def test_fly_takes_a_miss_only_where_the_target_is_undecided_and_goes_on_as_drafted(
    remembering: Client, ref: Client, prompts
):
    """The server's rule is FLy with a window of three: two of the target's own tokens follow every miss taken."""
    window, min_entropy = 3, 0.3
    with remembering.pinned([7, 1, 8]), remembering.kappa(1e-6):
        answers = [
            remembering.generate(ids, **FULL_LENGTH, max_new_tokens=64, custom_params=WITH_DETAILS)
            for ids in prompts[:3]
        ]
    num_promoted = 0
    for ids, answer in zip(prompts, answers, strict=False):
        margin = answer.meta["spec_margin"]
        found = ratios(ref, ids, answer)
        taken = [position for position, _, _ in margin["promotions"]]
        assert {position for position, ratio in enumerate(found) if ratio < 1 - ROUNDING} <= set(taken)
        for position in taken:
            assert _entropy_of_three(ref, ids + answer.ids[:position]) >= min_entropy - ROUNDING
            after = found[position + 1 : position + window]
            assert all(ratio > 1 - ROUNDING for ratio in after), (position, after)
        num_promoted += len(taken)
    assert num_promoted > 0


def _entropy_of_three(ref: Client, ids: list[int]) -> float:
    """Of plain decoding's three likeliest next tokens, nats."""
    scored = ref.generate(ids, request={"return_logprob": True, "top_logprobs_num": 3}, max_new_tokens=1)
    probs = [math.exp(each[0]) for each in scored.meta["output_top_logprobs"][0]]
    return -sum(prob / sum(probs) * math.log(prob / sum(probs)) for prob in probs)


def test_a_stop_inside_a_run_with_promotions(ada: Client, prompts, tokenizer):
    """What a stop or the cap cuts off is counted apart, and the answer ends where it says."""
    num_cut = 0
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
                num_cut += margin["num_promoted_cut"]
        assert num_cut > 0
        stop = tokenizer(" the", add_special_tokens=False).input_ids
        for answer in ada.generate_batch(
            prompts[:8], [{"max_new_tokens": 64, "stop_token_ids": stop, "custom_params": WITH_DETAILS}] * 8
        ):
            promoted = {answer.ids[position] for position, _, _ in answer.meta["spec_margin"]["promotions"]}
            assert not promoted & {*stop, tokenizer.eos_token_id}


@pytest.mark.parametrize(
    "path_and_body",
    [
        ("/generate", {"text": "Hi"}),
        ("/v1/completions", {"model": "m", "prompt": "Hi", "max_tokens": 2}),
        ("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    ],
    ids=lambda pair: pair[0] if isinstance(pair, tuple) else None,
)
def test_bad_options_get_a_400_that_names_field_value_and_range(ada: Client, path_and_body):
    path, body = path_and_body

    def post(value: Any) -> requests.Response:
        custom = {"custom_params": value}
        options = {"sampling_params": custom | {"max_new_tokens": 2}} if path == "/generate" else custom
        return ada.post(path, body | options)

    before = ada.refusals()
    response = post({"adaptive": {"kappa": 1.5}})
    assert response.status_code == 400, response.text
    assert "custom_params.adaptive.kappa: found 1.5; expected a number above 0, at most 1" in response.text
    assert ada.refusals() - before == {"custom_params.adaptive.kappa": 1}
    assert post('{"adaptive": {"strict": true}}').status_code == 400, "a text must not pass for asking nothing"
    assert post({"adaptive": {"kappa": 0.5}}).ok


@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_a_kappa_out_of_range_is_rejected_and_counted(ada: Client, value):
    before = ada.adaptive_info()["counts"]["refusals"].get("adaptive_kappa", 0)
    response = ada.post("/set_internal_state", {"server_args": {"adaptive_kappa": value}})
    assert response.json() == [False]
    info = ada.adaptive_info()
    assert info["kappa"] is None
    assert info["counts"]["refusals"]["adaptive_kappa"] == before + 1
    assert ada.refusals()["adaptive_kappa"] == before + 1
