"""The earliest of stop and cap wins, also inside an accepted run; nothing behind it is returned or billed (A2).

The prompts make the target go on with a list that the draft can follow, so that runs are long. A stop is declared
afterwards: a token that plain decoding gives at the wanted offset, and not before.
"""

import pytest

from tests.server.client import FULL_LENGTH, Answer, Client, Reference

LISTS = (
    "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z A B C D E F G H I J K",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
)
NUM_TOKENS = 24

Call = tuple[list[int], dict]


@pytest.fixture(scope="module")
def continuations(reference: Reference, tokenizer) -> list[tuple[list[int], Answer]]:
    """Prompt ids and plain decoding's continuation, without a near tie."""
    prompts = [tokenizer(text).input_ids for text in LISTS]
    answers = reference.answers(prompts, NUM_TOKENS)
    assert all(answer.num_safe == NUM_TOKENS for answer in answers), "choose another list"
    return list(zip(prompts, answers, strict=True))


def answers_to(client: Client, calls: list[Call]) -> list[Answer]:
    answers = []
    for start in range(0, len(calls), 16):
        some = calls[start : start + 16]
        answers += client.generate_batch([ids for ids, _ in some], [sampling for _, sampling in some])
    return answers


@pytest.fixture(scope="module")
def token_calls(continuations) -> list[Call]:
    """Stop offsets 1 to 7 against caps 1 to 8, offset 0 being the token that the prefill gives."""
    calls = []
    for ids, answer in continuations:
        for offset in range(1, 8):
            if answer.ids[offset] not in answer.ids[:offset]:
                calls += [(ids, {"stop_token_ids": [answer.ids[offset]], "max_new_tokens": cap}) for cap in range(1, 9)]
    assert len(calls) >= 7 * 8
    return calls


@pytest.fixture(scope="module")
def text_calls(continuations) -> list[Call]:
    """Stop strings of a few characters, most of them across tokens, ending at every offset of the text."""
    calls = []
    for ids, answer in continuations:
        text = answer.text
        for end in range(4, 30, 3):
            stop = text[end - 3 : end]
            if text.find(stop) == end - 3:
                calls.append((ids, {"stop": [stop], "max_new_tokens": NUM_TOKENS}))
    assert len(calls) >= 10
    return calls


@pytest.fixture(scope="module", params=["token_calls", "text_calls"])
def expected(request: pytest.FixtureRequest, ref: Client) -> list[tuple[Call, Answer]]:
    """Every call with plain decoding's answer to it."""
    calls = request.getfixturevalue(request.param)
    return list(zip(calls, answers_to(ref, calls), strict=True))


@pytest.mark.parametrize("shape", [[7, 1, 8], [3, 4, 4]], ids=str)
def test_stop_inside_a_run_against_the_cap(ada: Client, expected, shape):
    with ada.pinned(shape):
        found = answers_to(ada, [call for call, _ in expected])
    for ((_, sampling), right), answer in zip(expected, found, strict=True):
        assert answer.essence == right.essence, sampling
    # Else nothing was tested: steps must have been cut in the middle.
    assert sum(answer.num_cut > 0 for answer in found) >= 5
    assert "stop" in {answer.finish["type"] for answer in found}


def test_streamed_answers_end_at_the_same_place(ada: Client, expected):
    some = expected[::5]
    assert len(some) >= 2
    with ada.pinned([7, 1, 8]):
        for (ids, sampling), right in some:
            chunks = list(ada.stream(ids, **sampling))
            assert chunks[-1].essence == right.essence, sampling
            # What a user has read is never taken back.
            assert all(right.text.startswith(chunk.text) for chunk in chunks), sampling
            assert all(chunk.meta["completion_tokens"] <= len(right.ids) for chunk in chunks)


def test_the_models_own_end_is_a_stop(ada: Client, ref: Client, prompts):
    # A question with a short answer, so that the end-of-text token comes before the cap.
    calls = [(ids, {"max_new_tokens": 160, "regex": r"(Yes|No), (it is|they are)\."}) for ids in prompts[:4]]
    for right, answer in zip(answers_to(ref, calls), answers_to(ada, calls), strict=True):
        assert right.finish["type"] == "stop"
        assert answer.essence == right.essence


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_openai_usage_and_finish_reason(ada: Client, ref: Client, route):
    cases = [{"max_tokens": 9}, {"max_tokens": 40, "stop": ["day, S"]}, {"max_tokens": 40, "stop": []}]
    for case in cases:
        body = {"model": "any", "temperature": 0, "ignore_eos": True, **case}
        if route == "/v1/chat/completions":
            body["messages"] = [
                {"role": "user", "content": "Repeat: Monday, Tuesday, Wednesday, Thursday, Friday, Saturday"}
            ]
        else:
            body["prompt"] = LISTS[1]
        right, found = (client.post(route, body).json() for client in (ref, ada))
        for key in ("text", "message", "finish_reason", "matched_stop"):
            assert found["choices"][0].get(key) == right["choices"][0].get(key), (case, key)
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert found["usage"][key] == right["usage"][key], (case, key)


def test_a_cap_of_every_length_is_kept(ada: Client, continuations):
    ids, right = continuations[0]
    caps = range(1, 17)
    answers = answers_to(ada, [(ids, FULL_LENGTH | {"max_new_tokens": cap}) for cap in caps])
    assert [answer.ids for answer in answers] == [right.ids[:cap] for cap in caps]
    assert all(answer.finish == {"type": "length", "length": cap} for answer, cap in zip(answers, caps, strict=True))
