#!/usr/bin/env python3
"""Check the runtime states on a machine with a CUDA GPU, in under five minutes.

Part 1 needs torch alone: the registry captures and replays a toy draft and verify pair for every shape of a preset, and the
DRIFT memory is captured and timed at the size of an 8B model.
Part 2 starts real SGLang servers, plain and ADAPTIVE with another of its eight published shapes at every step, compares
their greedy answers and reads the states that ADAPTIVE built. It takes the demo pair, which it fetches if need be, unless
--target and --draft name another, and is left out where SGLang is not installed.

Prints one line per check, and one JSON line at the end. Exit status: 0 every check passed; 1 a check failed or nothing was
captured; 2 wrong arguments; 3 no CUDA GPU.
"""

import argparse
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout without installation, too

import torch

from adaptivespec.launch import speculation_args
from adaptivespec.shapes import PRESETS
from cuda_graphs import GraphBackend, RegistryError
from cuda_graphs.cuda import CudaBackend
from cuda_graphs.selfcheck import Check, ToyCheck
from drift.memory import DriftMemory
from drift.params import DriftParams

EXIT_FAILED, EXIT_NO_GPU = 1, 3
LAUNCH = (sys.executable, "-m", "sglang.launch_server")
START_TIMEOUT_S, ANSWER_TIMEOUT_S = 110, 30
MAX_NEW_TOKENS = 48
CONFIG = {"policy": "cycle", "shape": {"range": "paper"}}
NUM_STATES = len(PRESETS["paper"].reachable())
# Of EAGLE-3 drafts for 8B models.
MEMORY_HIDDEN, MEMORY_VOCAB, MEMORY_TARGET_VOCAB = 4096, 32000, 128_256
NEAR_TIE = 1e-3  # nats: on a GPU, kernels for other row counts round float32 differently, by more than on a CPU
MAX_NEAR_TIES = 0.1  # share of the prompts
PROMPTS = (
    "The capital of France is",
    "Write a Python function that returns the n-th Fibonacci number.",
    "def is_prime(n):",
    "Explain in two sentences why the sky is blue.",
    "A train travels 60 km in 45 minutes. Its speed in km/h is",
    "List the planets of the solar system in order:",
    "Once upon a time, in a small village by the sea,",
    "Translate to German: The weather is nice today.",
    "The three states of matter are",
    "SELECT name, COUNT(*) FROM orders",
)


@dataclass(frozen=True)
class Device:
    """Where part 1 runs; tests put a fake here."""

    backend: GraphBackend
    torch_device: torch.device
    description: dict[str, Any]


def open_cuda() -> Device:
    """The current CUDA device; RegistryError without one."""
    backend = CudaBackend()
    name = torch.cuda.get_device_name(backend.device)
    return Device(backend, backend.device, {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda})


# Part 1, the memory


def check_memory(device: Device) -> Iterator[Check]:
    """DRIFT's memory with its default slots: a captured correction equals an eager one, nothing waits for the device, and
    what a step of (3,4,4) - four rows corrected at the root and twice below it, the path taught - takes."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(MEMORY_VOCAB)
    memory = DriftMemory(
        DriftParams(num_banks=1), MEMORY_HIDDEN, MEMORY_VOCAB, device.torch_device, ids, MEMORY_TARGET_VOCAB
    )
    banks = torch.zeros(4, dtype=torch.int64, device=device.torch_device)

    def rows(size: int) -> torch.Tensor:
        return torch.randn(4, size, generator=generator).to(device.torch_device)

    def teach() -> None:
        memory.take_in(chosen, banks)
        memory.learn(hidden, draft, target, banks)

    try:
        for token in range(4):  # the last lesson is what is corrected below
            hidden, draft, target = rows(MEMORY_HIDDEN), rows(MEMORY_VOCAB), rows(memory.num_columns)
            chosen = torch.full_like(banks, MEMORY_VOCAB + token)
            teach()
        wide = memory.widen(draft)
        corrected, logits = wide.clone(), wide.clone()
        memory.apply(hidden, corrected, banks)

        def correct() -> None:
            logits.copy_(wide)
            memory.apply(hidden, logits, banks)

        graph = device.backend.capture(correct)
        logits.zero_()
        graph.replay()
        is_same = torch.allclose(logits, corrected, atol=1e-5) and not torch.equal(logits, wide)
        with device.backend.forbid_host_sync():
            graph.replay()
            teach()
        apply_us = microseconds(device, graph.replay)
        learn_us = microseconds(device, teach)
    except RuntimeError as error:  # torch's errors are RuntimeErrors
        yield Check("DRIFT memory", False, f"{type(error).__name__}: {error}")
        return
    step_us = round(3 * apply_us + learn_us, 1)
    detail = (
        f"captured correction {'equals' if is_same else 'differs from'} the eager one; {apply_us} us a correction, {learn_us} us a "
        f"lesson, not captured, {step_us} us a step of (3,4,4)"
    )
    figures = {"apply_us": apply_us, "learn_us": learn_us, "step_us": step_us, "bytes": memory.num_bytes}
    yield Check("DRIFT memory", is_same, detail, figures)


def microseconds(device: Device, run: Callable[[], None], rounds: int = 5, runs: int = 10) -> float:
    """Of one run, on the device and the host together, median of some rounds."""
    times = []
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(runs):
            run()
        synchronize(device)
        times.append((time.perf_counter() - start) / runs * 1e6)
    return round(median(times), 1)


def synchronize(device: Device) -> None:
    """Wait for a GPU; a CPU is never behind."""
    if device.torch_device.type == "cuda":
        torch.cuda.synchronize(device.torch_device)


# Part 2: real servers


@dataclass(frozen=True)
class Answer:
    """Greedy output of one prompt: token ids, and at each position the gap in nats between the two likeliest tokens."""

    token_ids: list[int]
    gaps: list[float]


def check_sglang_states(target: str, draft: str, launch: Sequence[str] = LAUNCH) -> Iterator[Check]:
    """Yields checks of the real states: answers equal to plain decoding's in float32, and states captured on the GPU.

    Starts one server after the other, with the same options but for the speculation. A server that does not start or
    answer fails the check.

    Args:
        target: folder or name of the target model.
        draft: folder or name of its EAGLE-3 draft.
        launch: the command that starts a server, without its options.
    """
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
            json.dump(CONFIG, config)
            config.flush()
            speculation = [*speculation_args("ADAPTIVE", draft), "--speculative-adaptive-config", config.name]
            with running_server([*launch, *server_options(target)]) as url:
                reference = ask(url)
            with running_server([*launch, *server_options(target), *speculation]) as url:
                answers = ask(url)
                report = find_states_report(get_json(f"{url}/server_info"))
    except (ServerError, OSError) as error:  # requests' errors are OSErrors
        yield Check("sglang servers", False, f"{type(error).__name__}: {error}")
        return
    yield compare_answers(reference, answers)
    yield check_states_report(report)


def server_options(target: str) -> list[str]:
    """Options of both servers; triton is the attention backend that takes float32 and trees of any topk."""
    fixed = (
        "--dtype float32 --attention-backend triton --random-seed 0 --mem-fraction-static 0.6"
        " --max-running-requests 16 --cuda-graph-max-bs-decode 16"
    )
    return ["--model-path", target, *fixed.split()]


class ServerError(Exception):
    """A server did not start, or answered something unexpected."""


@contextmanager
def running_server(command: Sequence[str]) -> Iterator[str]:
    """Starts a server on a free port, yields its address once it is healthy, and ends it with all its children."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Triton multiplies float32 in TF32 unless told otherwise; the comparison with plain decoding needs the full format.
    env = {**os.environ, "TRITON_F32_DEFAULT": "ieee"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        try:
            wait_until_healthy(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            end_group(process)


def wait_until_healthy(process: "subprocess.Popen[bytes]", url: str, log: IO[str]) -> None:
    import requests

    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        except requests.RequestException:
            pass  # not listening yet
        time.sleep(0.5)
    log.seek(0)
    tail = " | ".join(log.read().strip().splitlines()[-5:])
    ended = "did not start in time" if process.poll() is None else f"ended with status {process.returncode}"
    raise ServerError(f"the server {ended}; its last lines: {tail}")


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process and its children, by force after a while."""
    for sign, patience_s in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
        try:
            os.killpg(process.pid, sign)
            process.wait(patience_s)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def get_json(url: str) -> Any:
    import requests

    response = requests.get(url, timeout=ANSWER_TIMEOUT_S)
    response.raise_for_status()
    return response.json()


def ask(url: str) -> list[Answer]:
    """Sends all prompts as one batch and returns the greedy answers."""
    import requests

    body: dict[str, Any] = {
        "text": list(PROMPTS),
        "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    response = requests.post(f"{url}/generate", json=body, timeout=ANSWER_TIMEOUT_S)
    response.raise_for_status()
    answers = []
    for item in response.json():
        top2 = item["meta_info"]["output_top_logprobs"]
        answers.append(Answer(item["output_ids"], [first[0] - second[0] for first, second in top2]))
    return answers


def compare_answers(reference: Sequence[Answer], answers: Sequence[Answer]) -> Check:
    """Token for token; a first difference where plain decoding itself was within `NEAR_TIE` counts as a near tie."""
    wrong, near_ties = [], 0
    for number, (expected, found) in enumerate(zip(reference, answers, strict=True)):
        if expected.token_ids == found.token_ids:
            continue
        pairs = zip(expected.token_ids, found.token_ids, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None and expected.gaps[at] < NEAR_TIE:
            near_ties += 1
        else:
            wrong.append(f"prompt {number} " + ("differs in length" if at is None else f"differs at token {at}"))
    is_ok = not wrong and near_ties <= MAX_NEAR_TIES * len(reference)
    detail = f"{len(reference)} prompts of up to {MAX_NEW_TOKENS} tokens: {len(wrong)} wrong, {near_ties} near ties"
    figures = {"num_prompts": len(reference), "num_wrong": len(wrong), "num_near_ties": near_ties}
    return Check("sglang ADAPTIVE equals plain", is_ok, "; ".join([detail, *wrong[:3]]), figures)


def find_states_report(info: Any) -> dict[str, Any] | None:
    """The registry's report (a dict with `backend` and `states`) under the key `adaptive` anywhere in /server_info."""

    def walk(node: Any, is_inside: bool) -> dict[str, Any] | None:
        if isinstance(node, dict):
            if is_inside and {"backend", "states"} <= node.keys():
                return node
            children = [(value, is_inside or key == "adaptive") for key, value in node.items()]
        else:
            children = [(value, is_inside) for value in node] if isinstance(node, list) else []
        return next((found for child in children if (found := walk(*child)) is not None), None)

    return walk(info, False)


def check_states_report(report: dict[str, Any] | None) -> Check:
    """A state for every shape, on the CUDA backend, that took memory, and each was swapped in."""
    if report is None:
        return Check("sglang states", False, "found no states under `adaptive` in /server_info")
    num_states, num_bytes = len(report["states"]), report.get("total_bytes", 0)
    num_switches = report.get("num_switches", 0)
    detail = (
        f"{num_states} states (expected {NUM_STATES}) on backend {report['backend']} (expected cuda), {num_bytes} bytes,"
        f" {report.get('total_seconds')} s, {num_switches} switches"
    )
    is_whole = report["backend"] == "cuda" and num_states == NUM_STATES and num_bytes > 0
    return Check("sglang states", is_whole and num_switches >= NUM_STATES, detail, report)


def demo_pair() -> tuple[str, str] | str:
    """Target and draft of the demo, or why part 2 cannot run."""
    if importlib.util.find_spec("sglang") is None:
        return "SGLang is not installed"
    from adaptivespec.demo.draft import draft_folder
    from adaptivespec.demo.target import DemoError, prepare_target

    try:
        return str(prepare_target()), str(draft_folder())
    except DemoError as error:
        return f"{error}; or give --target and --draft"


# Both parts


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--preset", choices=PRESETS, default="paper", help="range of shapes for part 1 (default: %(default)s)"
    )
    parser.add_argument("--target", help="target model for part 2: a folder or a name")
    parser.add_argument("--draft", help="its EAGLE-3 draft")
    parser.add_argument("--torch-only", action="store_true", help="part 1 alone")
    args = parser.parse_args(argv)
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft go together: give both, or neither for the demo pair")
    return args


def main(argv: Sequence[str] | None = None, open_device: Callable[[], Device] = open_cuda) -> int:
    """Runs the checks, prints them, and returns the exit status."""
    args = parse_args(argv)
    start = time.perf_counter()
    try:
        device = open_device()
    except RegistryError as error:
        print(f"gpu_check: no CUDA GPU: {error}", file=sys.stderr)
        print(json.dumps({"ok": False, "error": "no CUDA GPU", "checks": []}))
        return EXIT_NO_GPU
    checks: list[Check] = []

    def note(found: Iterator[Check]) -> None:
        for check in found:
            print(check, flush=True)
            checks.append(check)

    note(ToyCheck(PRESETS[args.preset].reachable(), device.backend, device.torch_device).run())
    if all(check.is_ok for check in checks):
        note(check_memory(device))
    pair = "--torch-only was given" if args.torch_only else (args.target, args.draft) if args.target else demo_pair()
    if isinstance(pair, str):
        print(f"SKIP  sglang states: {pair}")
    else:
        note(check_sglang_states(*pair))
    is_ok = all(check.is_ok for check in checks)
    result = {
        "ok": is_ok,
        **device.description,
        "preset": args.preset,
        "sglang_checked": not isinstance(pair, str),
        "seconds": round(time.perf_counter() - start, 1),
        "checks": [asdict(check) for check in checks],
    }
    print(json.dumps(result))
    return 0 if is_ok else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
