"""What the server tests ask of a running server, and how answers are compared."""

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import requests

# Rounding differs between a batch of one row and one of many. Where the two likeliest tokens are closer than this in
# log-probability, either may win; that says nothing about speculation.
TIE_GAP = 1e-4


@dataclass(frozen=True)
class Answer:
    """One response of ``/generate``."""

    text: str
    ids: list[int]
    meta: dict[str, Any]

    @property
    def finish(self) -> dict[str, Any]:
        return self.meta["finish_reason"]

    @property
    def essence(self) -> tuple:
        """What must not depend on speculation: ids, text, why it ended, and what is billed."""
        return self.ids, self.text, self.finish, self.meta["prompt_tokens"], self.meta["completion_tokens"]

    @property
    def num_safe(self) -> int:
        """Tokens before the first near tie; needs two alternatives or more for each position."""
        for position, (first, second, *_) in enumerate(self.meta["output_top_logprobs"]):
            if first[0] - second[0] < TIE_GAP:
                return position
        return len(self.ids)

    @property
    def num_cut(self) -> int:
        """Accepted tokens that a stop or the cap removed: the first token comes from the prefill, every step commits
        its accepted drafts and a bonus token."""
        meta = self.meta
        committed = 1 + meta.get("spec_num_correct_drafts", 0) + meta.get("spec_verify_ct", 0)
        return committed - meta["completion_tokens"]


class Client:
    """A running server, spoken to over HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **kwargs: Any) -> Any:
        response = requests.get(self.url + path, timeout=60, **kwargs)
        response.raise_for_status()
        return response.json()

    def post(self, path: str, body: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=600)

    def generate(self, ids: list[int], *, request: dict[str, Any] | None = None, **sampling: Any) -> Answer:
        """One answer. Greedy unless ``sampling`` says otherwise; ``request`` holds fields beside the sampling ones."""
        return self.generate_batch([ids], [sampling], request=request)[0]

    def generate_batch(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]], *, request: dict[str, Any] | None = None
    ) -> list[Answer]:
        """Answers to prompts that arrive together, so that they run as one batch."""
        assert len(prompts) == len(sampling)
        body = {"input_ids": prompts, "sampling_params": [{"temperature": 0, **each} for each in sampling]}
        response = self.post("/generate", {**body, **(request or {})})
        assert response.ok, response.text
        return [_answer(each) for each in response.json()]

    def generate_at_once(self, calls: list[dict[str, Any]]) -> list[Answer]:
        """Answers to separate requests sent at the same time; each call is the arguments of `generate`."""
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(lambda call: self.generate(**call), calls))

    def stream(self, ids: list[int], *, request: dict[str, Any] | None = None, **sampling: Any) -> Iterator[Answer]:
        """The growing answer, once for each chunk that arrives."""
        body = {"input_ids": ids, "sampling_params": {"temperature": 0, **sampling}, "stream": True, **(request or {})}
        with requests.post(self.url + "/generate", json=body, stream=True, timeout=600) as response:
            assert response.ok, response.text
            for line in response.iter_lines():
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield _answer(json.loads(line.removeprefix(b"data: ")))

    # -- what an operator sees

    def adaptive_info(self) -> dict[str, Any]:
        """ADAPTIVE's part of ``/server_info``."""
        return self.get("/server_info")["internal_states"][0]["adaptive"]

    def counters(self) -> Counter[str]:
        """Every ``adaptivespec:*`` counter of ``/metrics``, by name and, where it has one, shape."""
        text = requests.get(self.url + "/metrics", timeout=60).text
        found: Counter[str] = Counter()
        for name, shape, value in re.findall(
            r'^adaptivespec:(\w+)_total(?:\{[^}]*?(?:shape="([^"]+)")?[^}]*\})? (\S+)$', text, re.MULTILINE
        ):
            found[name + shape] += round(float(value))
        return found

    def drift_events(self) -> Counter[str]:
        """What happened in the memory, over all banks, by event."""
        return self._by_label("drift_events", "event")

    def refusals(self) -> Counter[str]:
        """Refused settings and requests on ``/metrics``, by reason."""
        return self._by_label("refusals", "reason")

    def _by_label(self, counter: str, label: str) -> Counter[str]:
        text = requests.get(self.url + "/metrics", timeout=60).text
        found: Counter[str] = Counter()
        for labels, value in re.findall(rf"^adaptivespec:{counter}_total\{{([^}}]*)\}} (\S+)$", text, re.MULTILINE):
            found[re.search(rf'{label}="([^"]*)"', labels)[1]] += round(float(value))
        return found

    @contextmanager
    def pinned(self, shape: list[int]) -> Iterator[None]:
        """Every step runs with this shape."""
        self.pin(shape)
        try:
            yield
        finally:
            self.pin(None)

    def pin(self, shape: list[int] | None) -> None:
        """Pin a shape; None lets the policy choose again."""
        place = -1 if shape is None else self.adaptive_info()["shapes"].index(shape_name(shape))
        self.set_state("adaptive_shape", place)
        assert self.adaptive_info()["pinned_shape"] == (shape and shape_name(shape))

    @contextmanager
    def kappa(self, value: float) -> Iterator[None]:
        """The server accepts near misses down to this ratio."""
        self.set_state("adaptive_kappa", value)
        try:
            yield
        finally:
            self.set_state("adaptive_kappa", 0)

    def set_state(self, key: str, value: float) -> None:
        """One of the settings that an operator may change."""
        response = self.post("/set_internal_state", {"server_args": {key: value}})
        assert response.json() == [True], response.text

    def flush(self) -> None:
        """Empty the prefix cache, once the server is idle."""
        response = requests.post(self.url + "/flush_cache", params={"timeout": 30}, timeout=60)
        assert response.ok, response.text

    def num_used_tokens(self) -> int:
        """Slots of the KV pool that are neither free nor prefix cache: zero when idle, unless some leaked."""
        (load,) = self.get("/v1/loads")["loads"]
        return load["num_used_tokens"]

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Return when nothing runs or waits."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            (load,) = self.get("/v1/loads")["loads"]
            if load["num_running_reqs"] + load["num_waiting_reqs"] == 0:
                return
            time.sleep(0.2)
        raise AssertionError(f"still busy after {seconds} s")


class Reference:
    """Plain decoding, asked once a prompt: greedy answers with the two likeliest tokens of each position."""

    LEAST = 64  # tokens asked for; shorter answers are their beginnings

    def __init__(self, client: Client) -> None:
        self.client = client
        self._answers: dict[tuple[int, ...], Answer] = {}

    def answers(self, prompts: list[list[int]], max_new_tokens: int) -> list[Answer]:
        """Answers of that many tokens, the end-of-text token ignored; the text is that of `LEAST` tokens or more."""
        missing = [ids for ids in prompts if not self._knows(ids, max_new_tokens)]
        sampling = FULL_LENGTH | {"max_new_tokens": max(max_new_tokens, self.LEAST)}
        for start in range(0, len(missing), 8):
            some = missing[start : start + 8]
            got = self.client.generate_batch(some, [sampling] * len(some), request=WITH_TOP_TWO)
            self._answers.update(zip(map(tuple, some), got, strict=True))
        return [_beginning(self._answers[tuple(ids)], max_new_tokens) for ids in prompts]

    def _knows(self, ids: list[int], max_new_tokens: int) -> bool:
        known = self._answers.get(tuple(ids))
        return known is not None and len(known.ids) >= max_new_tokens


def _beginning(answer: Answer, num_tokens: int) -> Answer:
    cut = {name: answer.meta[name][:num_tokens] for name in ("output_token_logprobs", "output_top_logprobs")}
    return replace(answer, ids=answer.ids[:num_tokens], meta=answer.meta | cut)


FULL_LENGTH = {"ignore_eos": True}
WITH_TOP_TWO = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": -1}


def assert_parity(expected: list[Answer], found: list[Answer]) -> None:
    """Every answer equals the reference up to the reference's first near tie; at most a tenth have one."""
    assert len(expected) == len(found) > 0
    num_tied = 0
    for index, (right, got) in enumerate(zip(expected, found, strict=True)):
        safe = right.num_safe
        num_tied += safe < len(right.ids)
        assert got.ids[:safe] == right.ids[:safe], f"answer {index} differs before its first near tie at {safe}"
        assert len(got.ids) == len(right.ids), f"answer {index} has another length"
    print(f"{num_tied} of {len(expected)} answers compared up to a near tie only")
    assert num_tied <= len(expected) / 10, f"{num_tied} of {len(expected)} answers have a near tie"


def shapes_used(answers: list[Answer]) -> Counter[str]:
    """Steps of these answers by shape."""
    total: Counter[str] = Counter()
    for answer in answers:
        total.update(answer.meta["spec_shape_histogram"])
    return total


def shape_name(shape: list[int]) -> str:
    """As metrics print it."""
    return "({},{},{})".format(*shape)


def _answer(response: dict[str, Any]) -> Answer:
    return Answer(response["text"], response["output_ids"], response["meta_info"])
