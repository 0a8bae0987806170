"""A server that answers at once, and plans for it."""

import time
import urllib.error
from pathlib import Path

from adaptivespec.bench.configurations import parse_configurations
from adaptivespec.bench.plan import Plan
from tests.unit.fake_server import FIXED_SHAPE, FakeServer

MEMORY = {"weight": 0.25, "kvcache": 0.5, "graph": {"decode": 0.125}}
NUM_TOKENS = 4


class FakeBenchServer(FakeServer):
    """`order` holds (log name, pinned shape) of each answer, and (log name, "reset") where a memory is emptied; `asked` (log
    name, first token of the prompt, custom parameters); `starts` log names."""

    starts: list[str]
    order: list[tuple[str, int | str | None]]
    asked: list[tuple[str, int, dict | None]]
    falls_back = False

    def __init__(self, model, args, *, log: Path, timeout: float) -> None:
        super().__init__(model, args, log=log, timeout=timeout)
        self.pinned: int | None = None

    def start(self) -> None:
        super().start()
        self.starts.append(self.log.stem)

    def resident_bytes(self) -> int:
        return 3 * 2**20

    def get(self, path):
        assert path == "/server_info"
        state = {"memory_usage": MEMORY}
        if "ADAPTIVE" in self.args:
            state["adaptive"] = {"shapes": ["(1,1,2)", "(3,1,4)", "(5,1,6)"]}
        is_upstream = "--speculative-adaptive" in self.args and not self.falls_back
        fixed = FIXED_SHAPE if "--speculative-algorithm" in self.args else {"speculative_num_steps": None}
        return {"internal_states": [state], "speculative_adaptive": is_upstream, **fixed}

    def post(self, path, body):
        assert path == "/set_internal_state"
        ((key, value),) = body["server_args"].items()
        if key == "adaptive_drift":
            self.order.append((self.log.stem, "reset"))
        elif key == "adaptive_shape":
            self.pinned = value
        else:
            assert key == "adaptive_kappa"
            self.kappa = value
        return [True]

    def stream(self, path, body, timeout):
        assert path == "/generate"
        assert body["stream"] is True
        assert body["sampling_params"]["temperature"] == 0
        self.order.append((self.log.stem, self.pinned))
        self.asked.append((self.log.stem, body["input_ids"][0], body["sampling_params"].get("custom_params")))
        if len(self.order) > self.dies_after:
            raise urllib.error.URLError(ConnectionRefusedError("gone"))
        meta = {"completion_tokens": NUM_TOKENS, "finish_reason": {"type": "length"}}
        if "--speculative-algorithm" in self.args:
            meta |= {"spec_verify_ct": 2, "spec_num_correct_drafts": 1}
        if "ADAPTIVE" in self.args:
            meta |= {"spec_shape_histogram": {"(1,1,2)": 1, "(3,1,4)": 1}, "spec_margin": {"num_promoted": 1}}
            if body["sampling_params"].get("custom_params", {}).get("adaptive", {}).get("details"):
                meta["spec_steps"] = [["(3,1,4)", 1, 0.9], ["(1,1,2)", 0, 0.2]]
        time.sleep(2e-4)  # times are kept to 10 microseconds, and speeds divide by them
        yield {"meta_info": {"completion_tokens": 1, "finish_reason": None}, "output_ids": [1]}
        yield {"meta_info": {"completion_tokens": 1, "finish_reason": None}, "output_ids": [1]}
        time.sleep(2e-4)
        yield {"meta_info": meta, "output_ids": [1, 2, 3, 4]}


class Silent:
    num_done = 0

    def say(self, text):
        pass

    def doing(self, text):
        pass

    def advance(self):
        self.num_done += 1


def fresh_fake(kind: type[FakeBenchServer] = FakeBenchServer, **changes) -> type:
    """A kind of server with lists of its own."""
    return type("Fake", (kind,), {"alive": [], "order": [], "asked": [], "starts": [], **changes})


def plan(names=("adaptive",), **changes) -> Plan:
    base = {
        "target": "TARGET",
        "draft": "DRAFT",
        "configurations": parse_configurations(list(names), "DRAFT"),
        "tasks": {"x": [[1], [2]], "y": [[3], [4]]},
        "batch_sizes": [1],
        "max_new_tokens": NUM_TOKENS,
        "rounds": 2,
        "num_beside": 5,
        "dtype": "bfloat16",
        "server_args": ["--extra"],
    }
    return Plan(**(base | changes))
