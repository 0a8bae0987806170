"""The earliest of stop and cap wins, also inside an accepted run; nothing behind it is returned or billed (A2).

The cyclic pair says one character after the other and its draft is always right, so where each step ends is known, and
so is the answer. The demo pair is compared with plain decoding.
"""

import pytest

from tests.server.client import Answer, Client
from tests.server.models import CYCLE

Call = tuple[list[int], dict]
SHAPES = [[7, 1, 8], [4, 3, 5], [3, 4, 4]]


def answers_to(client: Client, calls: list[Call]) -> list[Answer]:
    answers = []
    for start in range(0, len(calls), 16):
        some = calls[start : start + 16]
        answers += client.generate_batch([ids for ids, _ in some], [sampling for _, sampling in some])
    return answers


def assert_ends(answer: Answer, num_tokens: int, cycle_ids: list[int], *, stop: int | str | None, kept: int) -> None:
    """The answer is the first ``num_tokens`` of the cycle, of which the text shows ``kept`` characters."""
    assert answer.ids == cycle_ids[:num_tokens]
    assert answer.text == CYCLE[:kept]
    expected = {"type": "length", "length": num_tokens} if stop is None else {"type": "stop", "matched": stop}
    assert answer.finish == expected
    assert answer.meta["completion_tokens"] == num_tokens


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_text", [False, True], ids=["token", "text"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_stop_offset_against_cap(cyclic: Client, cycle_ids, shape, is_text, is_streamed):
    prompt = cycle_ids[-3:]
    cases = [(offset, cap) for offset in range(1, 8) for cap in range(1, 9)]
    calls: list[Call] = []
    for offset, cap in cases:
        stop = {"stop": [CYCLE[offset]]} if is_text else {"stop_token_ids": [cycle_ids[offset]]}
        calls.append((prompt, {**stop, "max_new_tokens": cap}))
    with cyclic.pinned(shape):
        if is_streamed:
            chunks = [list(cyclic.stream(ids, **sampling)) for ids, sampling in calls[::3]]
            cases, answers = cases[::3], [each[-1] for each in chunks]
            for each in chunks:  # what a user has read is never taken back
                assert all(each[-1].text.startswith(chunk.text) for chunk in each)
        else:
            answers = answers_to(cyclic, calls)
    for (offset, cap), answer in zip(cases, answers, strict=True):
        if offset < cap:
            stop = CYCLE[offset] if is_text else cycle_ids[offset]
            assert_ends(answer, offset + 1, cycle_ids, stop=stop, kept=offset)
        else:
            assert_ends(answer, cap, cycle_ids, stop=None, kept=cap)
    assert any(answer.num_cut > 0 for answer in answers), "no step was cut, so nothing was tested"


def test_stop_strings_across_tokens_and_runs(cyclic: Client, cycle_ids):
    prompt = cycle_ids[-3:]
    cases = [(start, length) for start in (1, 4, 6, 7, 8, 13) for length in (2, 3, 7, 12)]
    stops = [CYCLE[start : start + length] for start, length in cases]
    with cyclic.pinned([7, 1, 8]):
        answers = answers_to(cyclic, [(prompt, {"stop": [stop], "max_new_tokens": 40}) for stop in stops])
    for (start, length), stop, answer in zip(cases, stops, answers, strict=True):
        assert_ends(answer, start + length, cycle_ids, stop=stop, kept=start)


def test_a_cap_of_every_length_is_kept(cyclic: Client, cycle_ids):
    caps = range(1, 33)
    for answer, cap in zip(
        answers_to(cyclic, [(cycle_ids[-3:], {"max_new_tokens": cap}) for cap in caps]), caps, strict=True
    ):
        assert_ends(answer, cap, cycle_ids, stop=None, kept=cap)


@pytest.mark.parametrize("is_text", [False, True], ids=["token", "text"])
def test_the_demo_pair_stops_where_plain_decoding_does(ada: Client, reference, prompts, is_text):
    rights = reference.answers(prompts[:8], 64)
    calls: list[Call] = []
    for ids, right in zip(prompts[:8], rights, strict=True):
        # A token, or some characters, in the middle of the answer.
        stop = {"stop": [right.text[40:46]]} if is_text else {"stop_token_ids": [right.ids[9]]}
        calls.append((ids, {**stop, "max_new_tokens": 64, "ignore_eos": False}))
    for right, answer in zip(answers_to(reference.client, calls), answers_to(ada, calls), strict=True):
        assert answer.essence == right.essence
        assert answer.finish["type"] == "stop"


def test_the_models_own_end_is_a_stop(ada: Client, ref: Client, prompts):
    # A regex that the answer can complete, so that the end-of-text token comes before the cap.
    calls = [(ids, {"max_new_tokens": 160, "regex": r"(Yes|No), (it is|they are)\."}) for ids in prompts[:4]]
    for right, answer in zip(answers_to(ref, calls), answers_to(ada, calls), strict=True):
        assert right.finish["type"] == "stop"
        assert answer.essence == right.essence


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_openai_usage_and_finish_reason(ada: Client, ref: Client, route):
    days = "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,"
    for case in ({"max_tokens": 9}, {"max_tokens": 40, "stop": ["day, S"]}, {"max_tokens": 12, "stop": []}):
        body = {"model": "any", "temperature": 0, "ignore_eos": True, **case}
        if route == "/v1/chat/completions":
            body["messages"] = [{"role": "user", "content": f"Go on: {days}"}]
        else:
            body["prompt"] = days
        right, found = (client.post(route, body).json() for client in (ref, ada))
        for key in ("text", "message", "finish_reason", "matched_stop"):
            assert found["choices"][0].get(key) == right["choices"][0].get(key), (case, key)
        for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert found["usage"][key] == right["usage"][key], (case, key)
