"""Refused starts end soon and say why; the CPU engine serves EAGLE3 and other models; the Engine does as the server."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from adaptivespec.launch import speculation_args
from adaptivespec.shapes import PRESETS, TreeShape
from tests.server.client import Answer, Reference, assert_parity, shapes_used
from tests.server.conftest import PAPER_RANGE, Servers, plain_environment
from tests.server.models import make_random_pair

# 60 s is what a user may wait on a quiet machine; here three start at once, and a busy machine gets its time.
REFUSAL_SECONDS = 300
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


REFUSED = {"refused option": ["--enable-lora"], "broken draft": [], "partial shape": ["--speculative-num-steps", "3"]}


@pytest.fixture(scope="module")
def refusals(target: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """How starts end that are refused: exit status and output. They run at once, since SGLang is long in importing."""
    broken = wrong_hidden_size(draft, tmp_path_factory.mktemp("broken") / "draft")

    def start(name: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(target), *REFUSED[name]]
        command += speculation_args("ADAPTIVE", broken if name == "broken draft" else draft)
        return stack.enter_context(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=plain_environment()
            )
        )

    with ExitStack() as stack:
        started = {name: start(name) for name in REFUSED}
        for process in started.values():
            stack.callback(process.kill)
        output = {name: process.communicate(timeout=REFUSAL_SECONDS)[0] for name, process in started.items()}
        return {name: (process.returncode, output[name]) for name, process in started.items()}


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("refused option", ["--enable-lora", "True"]),
        ("broken draft", ["hidden size 512", "576"]),
        ("partial shape", ["--speculative-eagle-topk"]),
    ],
)
def test_a_refused_start_ends_with_cause_and_fix(refusals, name, named):
    status, output = refusals[name]
    assert status != 0
    last = output.strip().splitlines()[-1]
    for word in ("found", "expected", "fix:", *named):
        assert word in last, last


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
