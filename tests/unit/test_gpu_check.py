"""scripts/gpu_check.py without a GPU: a fake graph backend for the toy, a stub server for the real states."""

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adaptivespec.shapes import PRESETS, TreeShape
from cuda_graphs import EagerBackend, StateRegistry, selfcheck
from cuda_graphs.selfcheck import Check, ToyCheck

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"
CPU = torch.device("cpu")
FEW = [TreeShape(3, 4, 4), TreeShape(4, 3, 5), TreeShape(4, 4, 5), TreeShape(7, 1, 8)]
ALL_NAMES = [
    "capture",
    "replay equals eager",
    "replay equals eager after every swap",
    "results outlive other replays",
    "no host sync in a step",
    "swap time",
    "budget",
]


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_check"]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """The memory looks at values on a CPU, where that costs nothing."""
    monkeypatch.setattr("drift.memory._is_on_host", lambda tensor: False)


class NoItem(TorchDispatchMode):
    """Reading a tensor's value on the host raises, as it does on CUDA in sync debug mode."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("called a synchronizing operation")
        return func(*args, **(kwargs or {}))


class FakeGraph:
    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class FakeBackend(EagerBackend):
    """Captures as CUDA does - warms up, then remembers - and reports bytes. Subclasses break one thing each."""

    def __init__(self) -> None:
        super().__init__(size_of=lambda made: 1 << 20)
        self.runs: list[Callable[[], None]] = []

    def capture(self, run):
        run()
        self.num_captures += 1
        self.runs.append(run)
        return FakeGraph(lambda: self.replay(run))

    def replay(self, run: Callable[[], None]) -> None:
        run()

    @contextmanager
    def forbid_host_sync(self):
        with NoItem():
            yield


def failed(backend, shapes=FEW) -> list[str]:
    """Names of the checks that fail with this backend; every check must have run unless capturing failed."""
    checks = list(ToyCheck(shapes, backend, CPU).run())
    names = [check.name for check in checks]
    assert names == ALL_NAMES or names == ["capture"]
    return [check.name for check in checks if not check.is_ok]


def test_a_sound_backend_passes_with_every_shape_of_the_paper():
    backend = FakeBackend()
    checks = {check.name: check for check in ToyCheck(PRESETS["paper"].reachable(), backend, CPU).run()}
    assert [str(check) for check in checks.values() if not check.is_ok] == []
    assert list(checks) == ALL_NAMES
    capture = checks["capture"].figures
    assert capture["num_captures"] == (8 + 6) * 3  # a draft per shape, a verify per (num_draft_tokens, topk == 1)
    assert len(capture["states"]) == 8
    assert {state["bytes_with_parts"] for state in capture["states"]} == {2 << 20}
    assert capture["total_bytes"] == 14 << 20
    assert checks["replay equals eager after every swap"].figures == {"num_pairs": 56, "num_pairs_of_equal_steps": 6}
    assert checks["swap time"].figures["swap_us"] > 0
    assert min(checks["budget"].figures["needed_bytes"]) > 7 << 20


def test_a_backend_that_captures_nothing_fails():
    assert failed(EagerBackend(size_of=lambda made: 1)) == ["capture"]


def test_a_device_that_reports_no_memory_fails():
    class Weightless(FakeBackend):
        def reported_bytes(self, made):
            return 0

    assert failed(Weightless()) == ["capture"]


def test_stale_results_fail():
    class Stale(FakeBackend):
        def replay(self, run):
            pass

    assert failed(Stale()) == ["replay equals eager", "replay equals eager after every swap", ALL_NAMES[3]]


def test_a_graph_that_overwrites_another_graphs_results_fails():
    class Overlapping(FakeBackend):
        def replay(self, run):
            for other in self.runs:
                for buffer in inspect.getclosurevars(other).nonlocals["outputs"].values():
                    buffer.zero_()
            run()

    assert "results outlive other replays" in failed(Overlapping())


def test_a_swap_that_looks_at_num_steps_alone_fails(monkeypatch):
    right = StateRegistry.swap

    def swap(self, key):
        is_same_depth = self.active_key is not None and self.active_key.num_steps == key.num_steps
        return right(self, self.active_key if is_same_depth else key)

    monkeypatch.setattr(StateRegistry, "swap", swap)
    assert "replay equals eager after every swap" in failed(FakeBackend())


def test_a_step_that_reads_a_value_on_the_host_fails():
    class Reading(FakeBackend):
        def replay(self, run):
            run()
            torch.ones(()).item()

    assert failed(Reading()) == ["no host sync in a step"]


def test_a_detector_that_sees_nothing_fails():
    class Blind(FakeBackend):
        def forbid_host_sync(self):
            return EagerBackend.forbid_host_sync(self)

    assert failed(Blind()) == ["no host sync in a step"]


def test_a_slow_swap_fails(monkeypatch):
    monkeypatch.setattr(selfcheck, "MAX_SWAP_US", 0.0)
    assert failed(FakeBackend()) == ["swap time"]


def test_a_refusal_that_keeps_its_memory_fails():
    class Leaking(FakeBackend):
        def bytes_in_use(self):
            return self.num_captures << 22

        def release(self):
            pass

    assert failed(Leaking()) == ["budget"]


def test_a_budget_that_is_not_enforced_fails(monkeypatch):
    right = StateRegistry.__init__

    def init(self, *args, budget_bytes=None, **options):
        right(self, *args, **options)

    monkeypatch.setattr(StateRegistry, "__init__", init)
    assert failed(FakeBackend()) == ["budget"]


def test_an_error_on_the_device_fails_its_check_and_the_others_go_on():
    class Broken(FakeBackend):
        def replay(self, run):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    checks = list(ToyCheck(FEW, Broken(), CPU).run())
    assert [check.is_ok for check in checks] == [True, False, False, False, False, True, True]
    assert "illegal memory access" in str(checks[1])


def run_main(gpu_check, capsys, argv, backend) -> tuple[int, list[str], dict]:
    monkey_device = gpu_check.Device(backend, CPU, {"device": "fake"})
    status = gpu_check.main(argv, open_device=lambda: monkey_device)
    lines = capsys.readouterr().out.splitlines()
    return status, lines[:-1], json.loads(lines[-1])


def test_main_lists_each_check_and_ends_with_one_json_line(gpu_check, capsys):
    status, lines, result = run_main(gpu_check, capsys, ["--torch-only"], FakeBackend())
    assert status == 0
    assert [line.split("  ")[0] for line in lines] == ["PASS"] * 8 + ["SKIP"]
    assert (result["ok"], result["device"], result["sglang_checked"]) == (True, "fake", False)
    names = [*ALL_NAMES, "DRIFT memory"]
    assert [(check["name"], check["is_ok"]) for check in result["checks"]] == [(name, True) for name in names]
    assert result["checks"][-1]["figures"]["step_us"] > 0


@pytest.fixture
def small_memory(gpu_check, monkeypatch):
    monkeypatch.setattr(gpu_check, "MEMORY_HIDDEN", 16)
    monkeypatch.setattr(gpu_check, "MEMORY_VOCAB", 64)
    return lambda backend: next(gpu_check.check_memory(gpu_check.Device(backend, CPU, {})))


def test_a_correction_that_is_not_in_the_graph_fails(small_memory):
    class Stale(FakeBackend):
        def replay(self, run):
            pass

    assert small_memory(FakeBackend()).is_ok
    assert not small_memory(Stale()).is_ok


def test_a_memory_that_reads_a_device_value_on_the_host_fails(small_memory, monkeypatch):
    from drift.memory import DriftMemory

    learn = DriftMemory.learn
    monkeypatch.setattr(DriftMemory, "learn", lambda self, *args: (self.clock.item(), learn(self, *args)))
    found = small_memory(FakeBackend())
    assert (found.is_ok, "synchronizing" in found.detail) == (False, True)


def test_without_sglang_or_models_part_two_says_why_it_is_left_out(gpu_check, capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "demo_pair", lambda: "SGLang is not installed")
    _, lines, result = run_main(gpu_check, capsys, [], EagerBackend())
    assert lines[-1] == "SKIP  sglang states: SGLang is not installed"
    assert not result["sglang_checked"]


def test_main_fails_where_nothing_was_captured(gpu_check, capsys):
    status, lines, result = run_main(gpu_check, capsys, ["--torch-only"], EagerBackend())
    assert status == 1
    assert lines[0].startswith("FAIL  capture: 0 graphs captured")
    assert (result["ok"], len(result["checks"])) == (False, 1)


def test_one_model_without_the_other_is_a_usage_error(gpu_check, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(["--target", "somewhere"])
    assert "--target and --draft go together" in capsys.readouterr().err


def test_without_a_gpu_the_script_says_so_and_exits_3():
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("gpu_check: no CUDA GPU: found no CUDA device")
    assert json.loads(done.stdout) == {"ok": False, "error": "no CUDA GPU", "checks": []}


# Part 2

STUB = """
import http.server, json, sys
mode, argv = sys.argv[1], sys.argv[2:]
is_adaptive = "--speculative-algorithm" in argv
if mode == "dies" and is_adaptive:
    sys.exit("refused: the draft folder is empty")

class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, value):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())
    def do_GET(self):
        states = {"backend": "cuda", "states": [{}] * 8, "total_bytes": 5, "num_switches": 9}
        if mode == "eager":
            states["backend"] = "eager"
        if mode == "few":
            states["states"] = [{}] * 7
        if mode == "still":
            states["num_switches"] = 0
        self.reply({"internal_states": [{"adaptive": {"runtime_states": states}}] if is_adaptive else []})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = [1, 2, 9] if mode == "wrong" and is_adaptive else [1, 2, 3]
        meta = {"output_top_logprobs": [[[-0.5, 1, None], [-1.5, 2, None]]] * 3}
        self.reply([{"output_ids": ids, "meta_info": meta} for _ in body["text"]])
    def log_message(self, *args):
        pass

http.server.HTTPServer(("127.0.0.1", int(argv[argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def stub(tmp_path):
    (tmp_path / "stub.py").write_text(STUB)
    return lambda mode: [sys.executable, str(tmp_path / "stub.py"), mode]


@pytest.mark.parametrize(
    ("mode", "outcome"),
    [
        ("right", (True, True)),
        ("wrong", (False, True)),
        ("eager", (True, False)),
        ("few", (True, False)),
        ("still", (True, False)),
    ],
)
def test_the_real_states_are_checked_through_two_servers(gpu_check, stub, mode, outcome):
    checks = list(gpu_check.check_sglang_states("target", "draft", launch=stub(mode)))
    assert [check.name for check in checks] == ["sglang ADAPTIVE equals plain", "sglang states"]
    assert tuple(check.is_ok for check in checks) == outcome
    assert checks[1].figures["num_switches"] == (0 if mode == "still" else 9)


def test_a_server_that_does_not_start_fails_with_its_last_words(gpu_check, stub):
    (check,) = gpu_check.check_sglang_states("target", "draft", launch=stub("dies"))
    assert not check.is_ok
    assert "the server ended with status 1" in check.detail
    assert "refused: the draft folder is empty" in check.detail


def answers(gpu_check, *token_lists, gap=1.0):
    return [gpu_check.Answer(list(ids), [gap] * len(ids)) for ids in token_lists]


@pytest.mark.parametrize(
    ("reference", "found", "gap", "is_ok", "words"),
    [
        ([[1, 2]] * 10, [[1, 2]] * 10, 1.0, True, "0 wrong, 0 near ties"),
        ([[1, 2]] * 10, [[1, 2]] * 9 + [[1, 3]], 1.0, False, "prompt 9 differs at token 1"),
        ([[1, 2]] * 10, [[1, 2]] * 9 + [[1, 3]], 1e-5, True, "0 wrong, 1 near ties"),
        ([[1, 2]] * 10, [[1, 2]] * 8 + [[1, 3]] * 2, 1e-5, False, "0 wrong, 2 near ties"),
        ([[1, 2]], [[1]], 1e-5, False, "prompt 0 differs in length"),
    ],
)
def test_answers_are_compared_token_for_token_but_for_few_near_ties(gpu_check, reference, found, gap, is_ok, words):
    check = gpu_check.compare_answers(answers(gpu_check, *reference, gap=gap), answers(gpu_check, *found))
    assert check.is_ok is is_ok
    assert words in check.detail


def test_states_missing_from_server_info_fail(gpu_check):
    assert gpu_check.find_states_report({"internal_states": [{"states": [], "backend": "cuda"}]}) is None
    assert not gpu_check.check_states_report(None).is_ok
    empty = gpu_check.find_states_report({"adaptive": {"backend": "cuda", "states": [], "total_bytes": 0}})
    assert not gpu_check.check_states_report(empty).is_ok


def test_a_check_prints_as_one_line():
    assert str(Check("name", False, "why")) == "FAIL  name: why"
