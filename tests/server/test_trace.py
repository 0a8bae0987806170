"""What a trace says is what the server does: replayed steps are live steps, for static shapes and for a policy."""

from collections.abc import Mapping
from typing import Any

import pytest

from adaptivespec.config import AdaptiveConfig, resolve_start
from adaptivespec.policy import make_policy
from adaptivespec.shapes import PRESETS, TreeShape
from adaptivespec.tracelab.record import Asker
from adaptivespec.tracelab.replay import walk
from adaptivespec.tracelab.report import static
from adaptivespec.tracelab.trace import TracedAnswer
from tests.server.client import FULL_LENGTH, Client

TREE, CHAIN, SHORTER = TreeShape(3, 4, 4), TreeShape(7, 1, 8), TreeShape(6, 1, 7)
NUM_TOKENS = 24


class Posts:
    """A client as the recorder knows servers."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def post(self, path: str, body: Any) -> Any:
        return self._client.post(path, body).json()


def live_and_steps(ada: Client, shape: TreeShape, prompt: list[int], answer: list[int]) -> tuple:
    with ada.pinned(shape.to_list()):
        ask = Asker(Posts(ada), shape, prompt, answer)
        return ask.live(), ask.every_root(8) if shape != SHORTER else None


def test_replaying_a_shape_gives_the_steps_that_the_server_takes(ada: Client, prompts):
    for prompt in prompts[:1]:
        answer = ada.generate(prompt, **FULL_LENGTH, max_new_tokens=NUM_TOKENS).ids
        found = {shape: live_and_steps(ada, shape, prompt, answer) for shape in (TREE, CHAIN, SHORTER)}
        live = {shape: steps for shape, (steps, _) in found.items()}
        recorded = {shape: steps for shape, (_, steps) in found.items() if steps}
        assert [strayed for _, _, strayed in recorded.values()] == [0, 0]
        assert recorded[TREE][1] == pytest.approx(recorded[CHAIN][1], abs=1e-4)
        accepted = {shape: counts for shape, (counts, _, _) in recorded.items()}
        traced = TracedAnswer("x", 0, answer, recorded[TREE][1], accepted, live)
        for shape, steps in live.items():
            assert steps is not None, "another answer"
            assert [step.accepted for step in walk(static(shape), 0, traced)] == steps
            assert len(set(steps)) > 1


def test_replaying_a_policy_gives_the_shapes_that_the_server_chose(remembering: Client, prompts):
    config = AdaptiveConfig.from_dict({"policy": "dcs", "shape": {"range": "paper"}})
    lag = int(not remembering.get("/server_info")["disable_overlap_schedule"])
    details = FULL_LENGTH | {"custom_params": {"adaptive": {"details": True, "drift": False}}}
    for prompt in prompts[:2]:
        answer = remembering.generate(prompt, **details, max_new_tokens=48)
        steps = walk(make_policy(config, resolve_start(config, None)), 0, visited(answer.ids, answer.meta), lag)
        assert [[str(shape), *rest] for shape, *rest in steps] == answer.meta["spec_steps"]
        assert len({step.shape for step in steps}) > 1


def visited(token_ids: list[int], meta: Mapping[str, Any]) -> TracedAnswer:
    """What one live answer reveals: every shape accepts what was accepted at the roots it went through, else nothing."""
    accepted, probs, root = [0] * (len(token_ids) - 1), [0.0] * (len(token_ids) - 1), 0
    for _, count, prob in meta["spec_steps"]:
        accepted[root], probs[root] = count, prob
        root += count + 1
    return TracedAnswer("x", 0, token_ids, probs, dict.fromkeys(PRESETS["paper"].reachable(), accepted), {})
