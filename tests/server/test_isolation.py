"""Bad, aborted and short requests disturb no one, nothing leaks, and a prefix hit equals a cold run (A8, A9, A11)."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.client import FULL_LENGTH, Answer, Client, Reference, assert_parity, shapes_used

NUM_TOKENS = 48


class Streams:
    """Good requests that are being streamed while something else happens."""

    def __init__(self, client: Client, prompts: list[list[int]]) -> None:
        self._started = threading.Barrier(len(prompts) + 1)
        self._pool = ThreadPoolExecutor(len(prompts))
        self._futures = [self._pool.submit(self._read, client, ids) for ids in prompts]
        self._started.wait(timeout=120)  # all are decoding now

    def _read(self, client: Client, ids: list[int]) -> Answer:
        chunks = client.stream(ids, **FULL_LENGTH, max_new_tokens=NUM_TOKENS)
        first = next(chunks)
        self._started.wait(timeout=120)
        return [first, *chunks][-1]

    def all_live(self) -> bool:
        return not any(future.done() for future in self._futures)

    def answers(self) -> list[Answer]:
        found = [future.result(timeout=300) for future in self._futures]
        self._pool.shutdown()
        return found


def invalid_schema(client: Client, ids: list[int]) -> None:
    response = client.post(
        "/generate", {"input_ids": ids, "sampling_params": {"json_schema": '{"type": "no such type"}'}}
    )
    assert 400 <= response.status_code < 500, (response.status_code, response.text)


def invalid_parameter(client: Client, ids: list[int]) -> None:
    response = client.post("/generate", {"input_ids": ids, "sampling_params": {"temperature": -1}})
    assert 400 <= response.status_code < 500, (response.status_code, response.text)


def abort_by_id(client: Client, ids: list[int]) -> None:
    chunks = client.stream(ids, request={"rid": "to-be-aborted"}, **FULL_LENGTH, max_new_tokens=1000)
    next(chunks)
    assert client.post("/abort_request", {"rid": "to-be-aborted"}).ok
    *_, last = chunks
    assert last.finish["type"] == "abort"
    assert len(last.ids) < 1000


def disconnect(client: Client, ids: list[int]) -> None:
    chunks = client.stream(ids, **FULL_LENGTH, max_new_tokens=1000)
    next(chunks)
    chunks.close()


def one_token(client: Client, ids: list[int]) -> None:
    assert len(client.generate(ids, max_new_tokens=1).ids) == 1


def empty_stop_list(client: Client, ids: list[int]) -> None:
    answer = client.generate(ids, stop=[], stop_token_ids=[], max_new_tokens=5)
    assert len(answer.ids) == 5


@pytest.mark.parametrize(
    "disturb",
    [
        pytest.param([invalid_schema, invalid_parameter, one_token], id="invalid and short"),
        pytest.param([abort_by_id, disconnect, empty_stop_list], id="aborted and gone"),
    ],
)
def test_neighbours_are_not_disturbed(ada: Client, reference: Reference, prompts, disturb):
    right = reference.answers(prompts[:6], NUM_TOKENS)
    streams = Streams(ada, prompts[:6])
    for each in disturb:
        each(ada, prompts[8])
        assert streams.all_live(), f"{each.__name__} came too late to disturb anyone"
    assert_parity(right, streams.answers())
    # Those who left have given everything back.
    ada.wait_until_idle()
    assert ada.num_used_tokens() == 0


def test_a_prefix_hit_equals_a_cold_run(ada: Client, prompts, tokenizer):
    shared = prompts[9] + prompts[11] + prompts[13]
    sent = [shared, *(shared + tokenizer(tail).input_ids for tail in (" The first rule", " In the end")), shared]
    with ada.pinned([5, 2, 6]):
        cold = []
        for ids in sent:
            ada.flush()
            cold.append(ada.generate(ids, **FULL_LENGTH, max_new_tokens=16))
        ada.flush()
        warm = [ada.generate(ids, **FULL_LENGTH, max_new_tokens=16) for ids in sent]
    assert all(answer.meta["cached_tokens"] == 0 for answer in (*cold, warm[0]))
    for before, after in zip(cold[1:], warm[1:], strict=True):
        assert after.ids == before.ids
        assert after.meta["cached_tokens"] >= len(shared) - 3  # the last tokens are run again
        assert after.meta["spec_accept_length"] >= 0.9 * before.meta["spec_accept_length"]


class Traffic:
    """Many requests of different lengths, twelve at a time; some are aborted, some clients leave early.

    Args:
        lengths: tokens asked for by each request.
    """

    def __init__(self, client: Client, prompts: list[list[int]], lengths: list[int]) -> None:
        self._client, self._prompts, self._lengths = client, prompts, lengths
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(self._work, range(len(lengths))))
        stayed = [(index, answer) for index, answer in enumerate(answers) if answer is not None]
        self.aborted = {index: answer for index, answer in stayed if answer.finish["type"] == "abort"}
        self.finished = {index: answer for index, answer in stayed if index not in self.aborted}
        self.num_retracted = sum(answer.meta["num_retractions"] > 0 for answer in self.finished.values())
        self.shapes = shapes_used(list(self.finished.values()))
        print(f"{len(self.finished)} finished, {len(self.aborted)} aborted, {self.num_retracted} retracted")

    def _work(self, index: int) -> Answer | None:
        rid = f"pool-{index}-{time.monotonic_ns()}"
        prompt = self._prompts[index % len(self._prompts)]
        # Not with ignore_eos: SGLang would know how long the answer gets, and never admit too many.
        chunks = self._client.stream(prompt, request={"rid": rid}, max_new_tokens=self._lengths[index])
        if index % 10 == 3:  # aborted while it waits, is prefilled or decodes
            threading.Timer(0.02 * (index % 70), self._client.post, ("/abort_request", {"rid": rid})).start()
        if index % 10 == 7:
            next(chunks, None)
            chunks.close()
            return None
        return list(chunks)[-1]


def assert_pool_is_whole(client: Client) -> None:
    """Before the cache is emptied, which would hide a leak: a slot is free, or cached for a prefix."""
    client.wait_until_idle()
    assert client.num_used_tokens() == 0
    client.flush()
    assert client.num_used_tokens() == 0


def lengths_of(num_requests: int, longest: int) -> list[int]:
    dice = random.Random(7)
    return [dice.choice([1, 8, 30, longest // 2, longest]) for _ in range(num_requests)]


@pytest.mark.parametrize("num_requests", [24, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_pool_and_answers_after_aborts_and_retractions(
    remembering: Client, reference: Reference, prompts, num_requests
):
    lengths = lengths_of(num_requests, 110)
    right = reference.answers(prompts[:4], max(lengths))
    traffic = Traffic(remembering, prompts[:4], lengths)
    assert_pool_is_whole(remembering)
    for index, answer in (traffic.finished | traffic.aborted).items():
        expected = right[index % 4]
        safe = min(expected.num_safe, len(answer.ids))
        assert answer.ids[:safe] == expected.ids[:safe], index
    assert traffic.num_retracted > 0
    assert len(traffic.shapes) >= 3
    # It still answers, and well.
    some = prompts[:4]
    assert_parity(
        reference.answers(some, 32), remembering.generate_batch(some, [FULL_LENGTH | {"max_new_tokens": 32}] * 4)
    )


def test_pool_after_300_requests_with_shapes_at_random(cyclic: Client, cycle_ids):
    stop = threading.Event()

    def change_shapes() -> None:
        shapes = [[*map(int, name[1:-1].split(","))] for name in cyclic.adaptive_info()["shapes"]]
        dice = random.Random(1)
        while not stop.wait(0.05):
            cyclic.pin(dice.choice(shapes))
        cyclic.pin(None)

    with ThreadPoolExecutor(1) as pool:
        changes = pool.submit(change_shapes)
        try:
            traffic = Traffic(cyclic, [cycle_ids[start : start + 20] for start in range(8)], lengths_of(300, 180))
        finally:
            stop.set()
        changes.result()
    assert_pool_is_whole(cyclic)
    endless = cycle_ids * 4
    for index, answer in (traffic.finished | traffic.aborted).items():
        start = 20 + index % 8
        assert answer.ids == endless[start : start + len(answer.ids)], index
    assert len(traffic.finished) >= 200
    assert traffic.aborted
    assert traffic.num_retracted > 0
    assert len(traffic.shapes) == 8
    assert len(cyclic.generate(cycle_ids, **FULL_LENGTH, max_new_tokens=64).ids) == 64
