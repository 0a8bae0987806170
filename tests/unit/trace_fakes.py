"""A server whose acceptance is known, and traces made by hand."""

import json
import time
from pathlib import Path

from adaptivespec.shapes import TreeShape
from adaptivespec.tracelab.trace import Trace, TracedAnswer
from tests.unit.bench_fakes import FakeBenchServer, fresh_fake

NUM_TOKENS = 12
ANSWER = list(range(100, 100 + 4 * NUM_TOKENS))
C1, C2, C3, TREE = TreeShape(1, 1, 2), TreeShape(2, 1, 3), TreeShape(3, 1, 4), TreeShape(3, 4, 4)


def accepted(prompt: int, root: int, shape: TreeShape) -> int:
    """Nested among chains, and something else for trees."""
    likely = (7 * prompt + 5 * root) % 5 if shape.topk == 1 else (3 * prompt + root) % 4
    return min(likely, shape.num_steps)


def top1_prob(prompt: int, root: int) -> float:
    return ((prompt + root) % 10 + 1) / 16


class FakeTraceServer(FakeBenchServer):
    """Prompts have one token. Every answer is the same; `strays` is a shape whose server gives another one."""

    strays: str | None = None
    one_step: int = 0

    def __init__(self, model, args: list[str], *, log: Path, timeout: float) -> None:
        super().__init__(model, args, log=log, timeout=timeout)
        self.shapes: list[TreeShape] = []
        if "--speculative-adaptive-config" in args:
            shape = json.loads(Path(args[args.index("--speculative-adaptive-config") + 1]).read_text())["shape"]
            self.shapes = [TreeShape.parse(each) for each in (shape["start"], *shape["extra"])]

    def get(self, path):
        info = super().get(path)
        if self.shapes:
            info["internal_states"][0]["adaptive"] = {"shapes": [str(shape) for shape in self.shapes]}
        return info | {"device": "cpu", "disable_overlap_schedule": True}

    def stream(self, path, body, timeout):
        *_, last = super().stream(path, body, timeout)
        yield {"meta_info": {"completion_tokens": 1, "finish_reason": None}, "output_ids": ANSWER[:1]}
        steps = self._steps(body)
        time.sleep(0.0005 * (len(steps) if self.shapes else NUM_TOKENS))
        meta = {**last["meta_info"], "completion_tokens": body["sampling_params"]["max_new_tokens"]}
        if self.shapes:
            meta |= {"spec_verify_ct": len(steps), "spec_num_correct_drafts": sum(step[1] for step in steps)}
        yield {"meta_info": meta, "output_ids": ANSWER[: meta["completion_tokens"]]}

    def post(self, path, body):
        if path != "/generate":
            return super().post(path, body)
        params, root = body["sampling_params"], len(body["input_ids"]) - 1
        assert params["ignore_eos"] is True
        assert params["custom_params"]["adaptive"] == {"details": True, "strict": True}
        type(self).one_step += params["max_new_tokens"] == 2
        self.order.append((self.log.stem, self.pinned))
        if len(self.order) > self.dies_after:
            raise ConnectionRefusedError("gone")
        ids = ANSWER[root : root + params["max_new_tokens"]]
        if str(self.shapes[self.pinned]) == self.strays:
            ids = [*ids[:-1], -1]
        return {"output_ids": ids, "meta_info": {"spec_steps": self._steps(body)}}

    def _steps(self, body):
        if not self.shapes:
            return []
        prompt, *before = body["input_ids"]
        assert before == ANSWER[: len(before)]
        shape, steps, given = self.shapes[self.pinned or 0], [], 1
        while given < body["sampling_params"]["max_new_tokens"]:
            root = len(before) + given - 1
            steps.append([str(shape), accepted(prompt, root, shape), top1_prob(prompt, root)])
            given += 1 + steps[-1][1]
        return steps


def fresh_trace_fake(**changes) -> type[FakeTraceServer]:
    return fresh_fake(FakeTraceServer, **changes)


def traced(prompt: int = 0, prompt_set: str = "x", **changes) -> TracedAnswer:
    """An answer of 12 tokens by `accepted`."""
    roots = range(NUM_TOKENS - 1)
    values = {
        "prompt_set": prompt_set,
        "prompt": prompt,
        "token_ids": ANSWER[:NUM_TOKENS],
        "top1_probs": [top1_prob(prompt, root) for root in roots],
        "accepted": {shape: [accepted(prompt, root, shape) for root in roots] for shape in (C3, TREE)},
        "live": {},
    }
    return TracedAnswer(**(values | changes))


def trace(**changes) -> Trace:
    """Two sets of two answers, four shapes."""
    values = {
        "settings": {"target": "TARGET"},
        "sessions": [{"date": "today"}],
        "device": "cpu",
        "lag": 0,
        "plain_ms": 50.0,
        "step_ms": {C1: 60.0, C2: 70.0, C3: 80.0, TREE: 90.0},
        "live": {
            "x": {C1: 1.3, C2: 1.4, C3: 1.5, TREE: 1.0},
            "y": {C1: 1.2, C2: 1.1, C3: 1.0, TREE: 0.8},
        },
        "answers": [traced(0), traced(1), traced(2, "y"), traced(3, "y")],
    }
    return Trace(**(values | changes))
