"""Log-probabilities under speculation are those of plain decoding (field case A5)."""

import pytest

from tests.server.client import FULL_LENGTH, WITH_TOP_TWO, Answer, Client, Reference, assert_parity

TOLERANCE = 1e-3
NUM_TOP = 5
NUM_TOKENS = 32


def assert_same_logprobs(right: Answer, found: Answer, num_top: int, count: int) -> None:
    """The first ``count`` tokens: one entry each, the ids returned, and the reference's values and alternatives."""
    got, expected = found.meta["output_token_logprobs"], right.meta["output_token_logprobs"]
    assert len(got) == found.meta["completion_tokens"] == len(found.ids)
    assert [token for _, token, _ in got] == found.ids
    for (value, *_), (expected_value, *_) in zip(got[:count], expected[:count], strict=True):
        assert value == pytest.approx(expected_value, abs=TOLERANCE)
    tops, expected_tops = found.meta["output_top_logprobs"], right.meta["output_top_logprobs"]
    assert len(tops) == len(got)
    for top, expected_top in zip(tops[:count], expected_tops[:count], strict=True):
        assert len(top) == num_top
        # By rank, not by id: two alternatives may be too close to keep their order.
        assert [entry[0] for entry in top] == pytest.approx([entry[0] for entry in expected_top], abs=TOLERANCE)
        assert top[0][1] == expected_top[0][1]


@pytest.fixture(scope="module")
def answers(ada: Client, ref: Client, prompts) -> list[tuple[Answer, Answer]]:
    """Pairs of plain and adaptive answers with five alternatives and the log-probabilities of the input."""
    request = {"return_logprob": True, "top_logprobs_num": NUM_TOP, "logprob_start_len": 0}
    sampling = [FULL_LENGTH | {"max_new_tokens": NUM_TOKENS}] * 8
    # Without cached prefixes, or some input positions have no value.
    for client in (ref, ada):
        client.flush()
    pair = [client.generate_batch(prompts[:8], sampling, request=request) for client in (ref, ada)]
    return list(zip(*pair, strict=True))


def test_output_values_and_alternatives(answers):
    assert_parity([right for right, _ in answers], [found for _, found in answers])
    for right, found in answers:
        assert_same_logprobs(right, found, NUM_TOP, right.num_safe)


def test_input_values(answers):
    for right, found in answers:
        got, expected = found.meta["input_token_logprobs"], right.meta["input_token_logprobs"]
        assert [token for _, token, _ in got] == [token for _, token, _ in expected]
        assert len(got) == found.meta["prompt_tokens"]
        assert got[0][0] is None
        assert [value for value, *_ in got[1:]] == pytest.approx([value for value, *_ in expected[1:]], abs=TOLERANCE)


def test_a_mixed_batch_where_only_some_ask(ada: Client, reference: Reference, prompts):
    right = reference.answers(prompts[:8], NUM_TOKENS)
    asked = [index % 2 == 0 for index in range(8)]
    found = ada.generate_batch(
        prompts[:8],
        [FULL_LENGTH | {"max_new_tokens": NUM_TOKENS}] * 8,
        request={
            "return_logprob": asked,
            "top_logprobs_num": [2 * is_asked for is_asked in asked],
            "logprob_start_len": [-1] * 8,
        },
    )
    assert_parity(right, found)
    for is_asked, expected, answer in zip(asked, right, found, strict=True):
        if is_asked:
            assert_same_logprobs(expected, answer, 2, expected.num_safe)
        else:
            assert "output_token_logprobs" not in answer.meta


def test_a_stop_inside_a_run_cuts_them_too(cyclic: Client, cycle_ids):
    for shape in ([7, 1, 8], [3, 4, 4]):
        with cyclic.pinned(shape):
            for offset in range(1, 8):
                stop = {"stop_token_ids": [cycle_ids[offset]], "max_new_tokens": 20}
                found = cyclic.generate(cycle_ids[-3:], request=WITH_TOP_TWO, **stop)
                values = found.meta["output_token_logprobs"]
                assert [token for _, token, _ in values] == found.ids == cycle_ids[: offset + 1]
                assert len(found.meta["output_top_logprobs"]) == offset + 1
                # Its logit is 32, all others are 0.
                assert [value for value, *_ in values] == pytest.approx([0.0] * (offset + 1), abs=1e-4)


def test_streamed_values_are_those_of_the_whole(ada: Client, reference: Reference, prompts):
    (right,) = reference.answers(prompts[:1], NUM_TOKENS)
    *_, last = ada.stream(prompts[0], request=WITH_TOP_TWO, **FULL_LENGTH, max_new_tokens=NUM_TOKENS)
    assert_same_logprobs(right, last, 2, right.num_safe)


def test_openai_logprobs(ada: Client, ref: Client):
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": "Why do cats purr?"}],
        **{"temperature": 0, "max_tokens": 16, "logprobs": True, "top_logprobs": 3},
    }
    right, found = (client.post("/v1/chat/completions", body).json() for client in (ref, ada))
    expected, got = (answer["choices"][0]["logprobs"]["content"] for answer in (right, found))
    assert len(got) == found["usage"]["completion_tokens"] == len(expected)
    assert [entry["token"] for entry in got] == [entry["token"] for entry in expected]
    for entry, expected_entry in zip(got, expected, strict=True):
        assert entry["logprob"] == pytest.approx(expected_entry["logprob"], abs=TOLERANCE)
        assert len(entry["top_logprobs"]) == 3
