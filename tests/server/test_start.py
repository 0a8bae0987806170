"""Refused starts end soon and say why; the CPU engine serves EAGLE3 and other models; the Engine does as the server."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import Qwen3ForCausalLM

from adaptivespec.launch import speculation_args
from adaptivespec.shapes import PRESETS, TreeShape
from tests.server.client import Answer, Reference, assert_parity, shapes_used
from tests.server.conftest import PAPER_RANGE, Servers, plain_environment
from tests.server.models import make_random_pair

# What a user may wait on a quiet machine. The processor's time is compared: here all start at once, on a machine that may be busy.
REFUSAL_SECONDS = 60
# Of three engines.
ENGINE_SECONDS = 1200
NUM_ENGINE_PROMPTS, NUM_ENGINE_TOKENS = 6, 24


def wrong_hidden_size(draft: Path, folder: Path) -> Path:
    """A draft whose config says another hidden size than the target has."""
    folder.mkdir()
    config = json.loads((draft / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 512}))
    (folder / "model.safetensors").symlink_to(draft / "model.safetensors")
    return folder


def other_plugin(folder: Path) -> Path:
    """A folder that, on PYTHONPATH, installs a plugin which replaces a function that ADAPTIVE relies on."""
    (folder / "other_plugin.py").write_text(OTHER_PLUGIN)
    about = folder / "other_plugin-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[sglang.srt.plugins]\nother = other_plugin:register\n")
    return folder


OTHER_PLUGIN = """
def register():
    from sglang.srt.managers import auxiliary_output

    auxiliary_output.append_auxiliary_output = lambda *outputs: outputs
"""
REFUSED = {
    "refused option": ["--enable-lora"],
    "broken draft": [],
    "partial shape": ["--speculative-num-steps", "3"],
    "replaced function": [],  # found in the scheduler's process only
}


class Refusal(NamedTuple):
    """How a start ended: exit status, output, and what the processor worked for it."""

    status: int
    output: str
    seconds: float


@pytest.fixture(scope="module")
def refusals(target: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refusal]:
    """Starts that are refused. They run at once, since SGLang is long in importing."""
    folder = tmp_path_factory.mktemp("refused")
    broken = wrong_hidden_size(draft, folder / "draft")
    environment = {"replaced function": {"PYTHONPATH": str(other_plugin(tmp_path_factory.mktemp("other")))}}

    def start(name: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(target), *REFUSED[name]]
        command += speculation_args("ADAPTIVE", broken if name == "broken draft" else draft)
        env = plain_environment() | environment.get(name, {})
        with (folder / name).open("wb") as out:
            return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)

    with ExitStack() as stack:
        started = {name: start(name) for name in REFUSED}
        for process in started.values():
            stack.callback(process.kill)
        return {name: end_of(process, folder / name) for name, process in started.items()}


def end_of(process: subprocess.Popen, out: Path) -> Refusal:
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Refusal(process.returncode, out.read_text(), usage.ru_utime + usage.ru_stime)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("refused option", ["--enable-lora", "True"]),
        ("broken draft", ["hidden size 512", "576"]),
        ("partial shape", ["--speculative-eagle-topk"]),
        ("replaced function", ["auxiliary_output", "unmodified"]),
    ],
)
def test_a_refused_start_ends_with_cause_and_fix_in_one_line(refusals, name, named):
    refusal = refusals[name]
    assert refusal.status != 0
    assert refusal.seconds < REFUSAL_SECONDS
    (line,) = [line for line in refusal.output.splitlines() if "adaptivespec: " in line]
    for word in ("found", "expected", "fix:", *named):
        assert word in line, line
    assert "Traceback" not in refusal.output
    if name != "replaced function":  # there SGLang adds that a process of its own has failed
        assert line == refusal.output.strip().splitlines()[-1]


SCRIPT = """
import json, sys
import sglang

def run(arguments, prompts, sampling):
    engine = sglang.Engine(**arguments)
    answers = engine.generate(input_ids=prompts, sampling_params=sampling)
    state = engine.get_server_info()["internal_states"][0]
    engine.shutdown()
    return answers, "adaptive" in state

if __name__ == "__main__":
    print(json.dumps([run(*job) for job in json.load(sys.stdin)]))
"""


@pytest.fixture(scope="module")
def random_pair(servers: Servers, target: Path) -> tuple[Path, Path]:
    """A tiny random Qwen3 and a random EAGLE-3 draft for it."""
    return make_random_pair(servers.folder, target)


@pytest.fixture(scope="module")
def engine_answers(
    servers: Servers, target: Path, draft: Path, random_pair: tuple[Path, Path], prompts
) -> list[tuple[list[Answer], bool]]:
    """Of three engines, one after the other: ADAPTIVE with the random pair, as it comes with the demo pair, and SGLang's EAGLE3
    with that. Their answers, and whether they show a state of ours."""
    servers.stop_current()
    config = servers.folder / "engine.json"
    config.write_text(json.dumps({"policy": "cycle", **PAPER_RANGE}))
    script = servers.folder / "engine.py"
    script.write_text(SCRIPT)
    common = {"dtype": "float32", "max_total_tokens": 8000}
    adaptive = common | {
        "model_path": str(random_pair[0]),
        "speculative_algorithm": "ADAPTIVE",
        "speculative_draft_model_path": str(random_pair[1]),
        "speculative_adaptive_config": str(config),
    }
    demo_pair = common | {"model_path": str(target), "speculative_draft_model_path": str(draft)}
    as_it_comes = demo_pair | {"speculative_algorithm": "ADAPTIVE"}
    eagle3 = demo_pair | {
        "speculative_algorithm": "EAGLE3",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8,
    }
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": NUM_ENGINE_TOKENS}
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps([[each, prompts[:NUM_ENGINE_PROMPTS], sampling] for each in (adaptive, as_it_comes, eagle3)]),
        capture_output=True,
        text=True,
        timeout=ENGINE_SECONDS,
        check=False,
        env=plain_environment(),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        ([Answer(each["text"], each["output_ids"], each["meta_info"]) for each in answers], is_adaptive)
        for answers, is_adaptive in json.loads(done.stdout.splitlines()[-1])
    ]


@pytest.mark.timeout(ENGINE_SECONDS + 300)
def test_it_needs_no_configuration(engine_answers, reference: Reference, prompts):
    answers, is_adaptive = engine_answers[1]
    assert is_adaptive
    assert_parity(reference.answers(prompts[:NUM_ENGINE_PROMPTS], NUM_ENGINE_TOKENS), answers)
    shapes = {TreeShape.parse(name) for name in shapes_used(answers)}
    assert len(shapes) >= 2
    assert shapes <= set(PRESETS["short"].reachable())


@pytest.mark.timeout(ENGINE_SECONDS + 300)
def test_sglangs_own_eagle3_serves_trees_on_the_cpu(engine_answers, reference: Reference, prompts):
    answers, is_adaptive = engine_answers[2]
    assert_parity(reference.answers(prompts[:NUM_ENGINE_PROMPTS], NUM_ENGINE_TOKENS), answers)
    assert sum(answer.meta["spec_num_correct_drafts"] for answer in answers) > 0
    # Installing us leaves its responses as they are.
    assert all("spec_shape_histogram" not in answer.meta for answer in answers)
    assert not is_adaptive


@pytest.mark.timeout(ENGINE_SECONDS + 300)
def test_the_engine_serves_a_tiny_random_qwen3(engine_answers, random_pair, prompts):
    """`sgl.Engine` does as the server does, with another kind of model."""
    answers, is_adaptive = engine_answers[0]
    assert is_adaptive
    model = Qwen3ForCausalLM.from_pretrained(random_pair[0], dtype=torch.float32).eval()
    assert len(shapes_used(answers)) == 8
    for ids, answer in zip(prompts[:NUM_ENGINE_PROMPTS], answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids + answer.ids])).logits[0, len(ids) - 1 : -1]
        top = logits.topk(2, dim=-1)
        assert float((top.values[:, 0] - top.values[:, 1]).min()) > 1e-3, "choose another seed"
        assert answer.ids == top.indices[:, 0].tolist()
        meta = answer.meta
        assert len(answer.ids) == meta["completion_tokens"] == NUM_ENGINE_TOKENS
        assert meta["spec_accept_rate"] == pytest.approx(
            meta["spec_num_correct_drafts"] / meta["spec_num_proposed_drafts"]
        )
