"""Sampled requests draw from the target's distribution, and a seed decides what they draw: not the neighbours, not the
shapes."""

import math

import pytest
from scipy.stats import chisquare

from tests.server.client import FULL_LENGTH, Answer, Client, Reference

SAMPLED = FULL_LENGTH | {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "sampling_seed": 1234}
NUM_TOKENS = 24
SHAPES = [[3, 4, 4], [5, 2, 6], [7, 1, 8]]


@pytest.fixture(scope="module")
def alone(ada: Client, prompts) -> Answer:
    return ada.generate(prompts[7], **SAMPLED, max_new_tokens=NUM_TOKENS)


def test_the_seed_decides_whatever_the_shape(ada: Client, prompts, alone: Answer):
    for shape in SHAPES:
        with ada.pinned(shape):
            again = ada.generate(prompts[7], **SAMPLED, max_new_tokens=NUM_TOKENS)
        assert again.ids == alone.ids, shape
        assert list(again.meta["spec_shape_histogram"]) == ["({},{},{})".format(*shape)]


def test_the_seed_decides_whatever_the_neighbours(ada: Client, reference: Reference, prompts, alone: Answer):
    greedy = FULL_LENGTH | {"temperature": 0}
    others = [greedy, *({**SAMPLED, "temperature": 0.5 + 0.2 * seed, "sampling_seed": seed} for seed in range(6))]
    sampling = [{**each, "max_new_tokens": NUM_TOKENS} for each in (*others[:4], SAMPLED, *others[4:])]
    answers = ada.generate_batch([*prompts[:4], prompts[7], *prompts[4:7]], sampling)
    assert answers[4].ids == alone.ids
    # A greedy request beside sampled ones stays greedy.
    (right,) = reference.answers(prompts[:1], NUM_TOKENS)
    assert answers[0].ids[: right.num_safe] == right.ids[: right.num_safe]


def test_other_seeds_and_no_seed_give_other_answers(ada: Client, prompts, alone: Answer):
    seeded = [{**SAMPLED, "sampling_seed": seed, "max_new_tokens": NUM_TOKENS} for seed in (1, 2**31 - 1, 2**40, 7)]
    unseeded = [{**SAMPLED, "sampling_seed": None, "max_new_tokens": NUM_TOKENS}] * 3
    answers = ada.generate_batch([prompts[7]] * 7, [*seeded, *unseeded])
    assert len({tuple(answer.ids) for answer in (*answers, alone)}) == 8


def test_filters_and_temperature_are_honoured(ada: Client, prompts):
    cases = [{"top_k": 2, "temperature": 1.0}, {"top_p": 0.4}, {"min_p": 0.3}, {"top_k": 1}]
    plain = {"temperature": 1.0, "ignore_eos": True, "max_new_tokens": 32}
    answers = ada.generate_batch(
        [prompts[7]] * 4,
        [{**plain, **case, "sampling_seed": seed} for seed, case in enumerate(cases)],
        request={"return_logprob": True, "top_logprobs_num": 40, "logprob_start_len": -1},
    )
    top_k, top_p, min_p, argmax = (list(_ranked(answer)) for answer in answers)
    assert {rank for rank, _, _, _ in top_k} == {0, 1}
    assert all(above <= 0.4 + 1e-4 for _, above, _, _ in top_p)
    assert all(prob >= 0.3 * best - 1e-5 for _, _, prob, best in min_p)
    assert {rank for rank, _, _, _ in argmax} == {0}
    for case in (top_p, min_p):
        assert any(rank > 0 for rank, _, _, _ in case), "a filter let the likeliest token through only"


def _ranked(answer: Answer):
    """For each token: its rank, the probability of all likelier ones, its own, and that of the likeliest."""
    for (_, token, _), top in zip(
        answer.meta["output_token_logprobs"], answer.meta["output_top_logprobs"], strict=True
    ):
        ids = [entry[1] for entry in top]
        probs = [math.exp(entry[0]) for entry in top]
        assert token in ids, "a token beyond the 40 likeliest"
        rank = ids.index(token)
        yield rank, sum(probs[:rank]), probs[rank], probs[0]


NUM_RANKS = 6


def scored_by(ref: Client, prompt: list[int], answers: list[Answer]) -> list[tuple[int, list[float]]]:
    """For each sampled token: its rank in the reference's distribution (NUM_RANKS for later ones), and the log
    probabilities of the first ranks."""
    scores = ref.generate_batch(
        [prompt + answer.ids for answer in answers],
        [{"max_new_tokens": 1}] * len(answers),
        request={"return_logprob": True, "top_logprobs_num": NUM_RANKS, "logprob_start_len": len(prompt) - 1},
    )
    found = []
    for answer, score in zip(answers, scores, strict=True):
        # The entry of a position holds the alternatives to the token that stands there.
        tops = score.meta["input_top_logprobs"][-len(answer.ids) :]
        tokens = [token for _, token, _ in score.meta["input_token_logprobs"][-len(answer.ids) :]]
        assert tokens == answer.ids
        for token, top in zip(tokens, tops, strict=True):
            ids = [entry[1] for entry in top]
            rank = ids.index(token) if token in ids else NUM_RANKS
            found.append((rank, [entry[0] for entry in top]))
    return found


def sampled(ada: Client, ref: Client, prompt: list[int], num_batches: int, **sampling) -> list:
    scores = []
    for batch in range(num_batches):
        each = [
            FULL_LENGTH | sampling | {"sampling_seed": 100 * batch + row, "max_new_tokens": NUM_TOKENS}
            for row in range(8)
        ]
        scores += scored_by(ref, prompt, ada.generate_batch([prompt] * 8, each))
    return scores


def test_tokens_follow_the_targets_distribution(ada: Client, ref: Client, prompts):
    scores = sampled(ada, ref, prompts[9], 3, temperature=1.0)
    assert len(scores) == 3 * 8 * NUM_TOKENS
    expected = [sum(math.exp(top[rank]) for _, top in scores) for rank in range(NUM_RANKS)]
    expected.append(len(scores) - sum(expected))
    observed = [sum(rank == each for rank, _ in scores) for each in range(NUM_RANKS + 1)]
    print("tokens by rank, observed and expected:", observed, [round(each, 1) for each in expected])
    assert min(expected) > 10
    assert chisquare(observed, expected).pvalue > 1e-3
    # The test can tell: were argmax taken, or another temperature, it would fail.
    always_first = [len(scores), *[0] * NUM_RANKS]
    assert chisquare(always_first, expected).pvalue < 1e-9


@pytest.mark.parametrize("temperature", [0.5, pytest.param(2.0, marks=pytest.mark.slow)])
def test_the_temperature_is_the_one_asked_for(ada: Client, ref: Client, prompts, temperature):
    # With two candidates a position, their gap alone says how often the likelier one should win.
    scores = sampled(ada, ref, prompts[9], 2, temperature=temperature, top_k=2)
    pairs = [(rank == 0, top[0] - top[1]) for rank, top in scores]
    assert {rank for rank, _ in scores} == {0, 1}

    def deviations(assumed: float) -> float:
        """Standard deviations between how often the likeliest of two tokens won and how often it should have."""
        probs = [1 / (1 + math.exp(-gap / assumed)) for _, gap in pairs]
        spread = math.sqrt(sum(prob * (1 - prob) for prob in probs))
        return abs(sum(won for won, _ in pairs) - sum(probs)) / spread

    print(f"{len(pairs)} tokens, {deviations(temperature):.2f} deviations, {deviations(1.0):.2f} were it 1.0")
    assert deviations(temperature) < 3.5
    assert deviations(1.0) > 3.5
