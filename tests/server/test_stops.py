"""The earliest of stop and cap wins, also inside an accepted run; nothing behind it is returned or billed (A2).

The prompts make the target go on with a list that the draft can follow, so that runs are long. A stop is declared
afterwards: a token that plain decoding gives at the wanted offset, and not before.
"""

import itertools

import pytest

from tests.server.client import FULL_LENGTH, Client, Reference

LISTS = (
    "one, two, three, four, five, six, seven, eight, nine, ten, one, two, three, four, five, six,",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
    "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z A B C D E F G H I J K",
)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def candidates(reference: Reference, tokenizer) -> list[tuple[list[int], list[int], str]]:
    """Prompt ids, continuation, and text of the continuation, each without a near tie."""
    prompts = [tokenizer(text).input_ids for text in LISTS]
    answers = reference.answers(prompts, NUM_TOKENS)
    assert all(answer.num_safe == NUM_TOKENS for answer in answers), "choose another list"
    return [(ids, answer.ids, answer.text) for ids, answer in zip(prompts, answers, strict=True)]


def stops_at_first_sight(continuation: list[int], offsets: range) -> list[int]:
    """The offsets whose token has not occurred before."""
    return [offset for offset in offsets if continuation[offset] not in continuation[:offset]]


def in_batches(client: Client, calls: list[tuple[list[int], dict]], size: int = 14) -> list:
    answers = []
    for some in itertools.batched(calls, size):
        answers += client.generate_batch([ids for ids, _ in some], [sampling for _, sampling in some])
    return answers


@pytest.fixture(scope="module")
def token_calls(candidates) -> list[tuple[list[int], dict]]:
    """Every stop offset 1 to 7 against every cap 1 to 8, counted from one token before a run may start."""
    calls = []
    for ids, continuation, _ in candidates:
        for offset in stops_at_first_sight(continuation, range(1, 8)):
            for cap in range(1, 9):
                sampling = {"stop_token_ids": [continuation[offset]], "max_new_tokens": cap, "ignore_eos": False}
                calls.append((ids, sampling))
    assert len(calls) >= 56
    return calls


@pytest.mark.parametrize("shape", [[7, 1, 8], [3, 4, 4]], ids=str)
def test_stop_token_against_cap(ada: Client, ref: Client, token_calls, shape):
    with ada.pinned(shape):
        found = in_batches(ada, token_calls)
    for expected, answer, (_, sampling) in zip(in_batches(ref, token_calls), found, token_calls, strict=True):
        assert answer.essence == expected.essence, sampling
    # Or nothing was tested: steps were cut in the middle.
    assert sum(answer.num_cut >= 2 for answer in found) >= 5
    assert {answer.finish["type"] for answer in found} == {"stop", "length"}
