"""Refused starts end soon and say why; the CPU engine serves EAGLE3 and other models; the Engine does as the server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.server.client import FULL_LENGTH, Answer, Client, Reference, assert_parity, shapes_used
from tests.server.conftest import PAPER_RANGE, Servers
from tests.server.models import make_random_pair

# 60 s is what a user may wait on a quiet machine; a busy one gets four times that.
REFUSAL_SECONDS = 240
NUM_ENGINE_PROMPTS, NUM_ENGINE_TOKENS = 6, 24


def wrong_hidden_size(draft: Path, folder: Path) -> Path:
    """A draft whose config says another hidden size than the target has."""
    folder.mkdir()
    config = json.loads((draft / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 512}))
    (folder / "model.safetensors").symlink_to(draft / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("args", "is_broken", "named"),
    [
        pytest.param(["--enable-lora"], False, ["--enable-lora", "True"], id="refused option"),
        pytest.param([], True, ["hidden size 512", "576"], id="broken draft"),
        pytest.param(["--speculative-num-steps", "3"], False, ["--speculative-eagle-topk"], id="partial shape"),
    ],
)
def test_a_refused_start_ends_with_cause_and_fix(target, draft, tmp_path, args, is_broken, named):
    draft_path = wrong_hidden_size(draft, tmp_path / "draft") if is_broken else draft
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(target), *args]
    command += ["--speculative-algorithm", "ADAPTIVE", "--speculative-draft-model-path", str(draft_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=REFUSAL_SECONDS, check=False)
    assert done.returncode != 0
    last = (done.stdout + done.stderr).strip().splitlines()[-1]
    for word in ("found", "expected", "fix:", *named):
        assert word in last, last


def test_sglangs_own_eagle3_serves_trees_on_the_cpu(eagle3: Client, reference: Reference, prompts):
    answers = eagle3.generate_batch(prompts[:4], [FULL_LENGTH | {"max_new_tokens": 32}] * 4)
    assert_parity(reference.answers(prompts[:4], 32), answers)
    assert sum(answer.meta["spec_num_correct_drafts"] for answer in answers) > 0
    # Installing us leaves its responses as they are.
    assert all("spec_shape_histogram" not in answer.meta for answer in answers)
    assert "adaptive" not in eagle3.get("/server_info")["internal_states"][0]


SCRIPT = """
import json, sys
import sglang

if __name__ == "__main__":
    arguments, prompts, sampling = json.load(sys.stdin)
    engine = sglang.Engine(**arguments)
    answers = engine.generate(input_ids=prompts, sampling_params=sampling)
    engine.shutdown()
    print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def random_pair(servers: Servers, target: Path) -> tuple[Path, Path]:
    """A tiny random Qwen3 and a random EAGLE-3 draft for it."""
    return make_random_pair(servers.folder, target)


@pytest.fixture(scope="module")
def engine_answers(servers: Servers, random_pair: tuple[Path, Path], prompts) -> list[Answer]:
    servers.stop_current()
    config = servers.folder / "engine.json"
    config.write_text(json.dumps({"policy": "cycle", **PAPER_RANGE}))
    script = servers.folder / "engine.py"
    script.write_text(SCRIPT)
    arguments = {
        "model_path": str(random_pair[0]),
        "dtype": "float32",
        "max_total_tokens": 8000,
        "speculative_algorithm": "ADAPTIVE",
        "speculative_draft_model_path": str(random_pair[1]),
        "speculative_adaptive_config": str(config),
    }
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": NUM_ENGINE_TOKENS}
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps([arguments, prompts[:NUM_ENGINE_PROMPTS], sampling]),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return [Answer(each["text"], each["output_ids"], each["meta_info"]) for each in found]


def test_the_engine_serves_a_tiny_random_qwen3(engine_answers: list[Answer], random_pair, prompts):
    """`sgl.Engine` does as the server does, with another kind of model."""
    model = Qwen3ForCausalLM.from_pretrained(random_pair[0], dtype=torch.float32).eval()
    assert len(shapes_used(engine_answers)) == 8
    for ids, answer in zip(prompts[:NUM_ENGINE_PROMPTS], engine_answers, strict=True):
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
