"""SpecForge's benchmark client from PyPI, unmodified, against ADAPTIVE: what it prints is what the server counts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.client import Client

NUM_PROMPTS = 3
DATASET_CARD = """---
configs:
- config_name: main
  data_files:
  - split: test
    path: test.jsonl
---
"""
ROW = {"question": "A box holds 12 pens. How many pens do 4 boxes hold?", "answer": "4 * 12 = 48\n#### 48"}


@pytest.fixture(scope="session")
def specforge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that it is installed in, without its dependencies, which name another SGLang."""
    folder = tmp_path_factory.mktemp("specforge")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, "specforge==0.2.0"], check=True)
    return folder


def test_its_figures_are_the_servers(ada: Client, target: Path, specforge: Path, tmp_path: Path):
    """One question again and again at one shape, so that its warm-up request counts as each of the others."""
    folder = tmp_path / "openai" / "gsm8k"  # `datasets` takes a local folder of this name
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(DATASET_CARD)
    (folder / "test.jsonl").write_text(json.dumps(ROW) + "\n")
    command = [sys.executable, "-m", "specforge.cli", "benchmark", "--model", str(target), "--dataset", "gsm8k"]
    command += ["--base-url", ada.url, "--num-prompts", str(NUM_PROMPTS), "--max-new-tokens", "48"]
    environment = os.environ | {
        "PYTHONPATH": str(specforge),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
    }
    before = ada.adaptive_info()["counts"]
    with ada.pinned([5, 2, 6]):
        done = subprocess.run(
            [*command, "--output-json", "out.json"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    after = ada.adaptive_info()["counts"]
    grown = {name: after[name] - before[name] for name in ("verify_steps", "accepted")}
    share = NUM_PROMPTS / (NUM_PROMPTS + 1)
    assert found["samples"] == NUM_PROMPTS
    assert found["spec_verify_count"] == share * grown["verify_steps"] > 0
    # The first token comes from the prefill; the cap may cut the last step.
    committed = NUM_PROMPTS + share * (grown["verify_steps"] + grown["accepted"])
    assert committed - 6 * NUM_PROMPTS < found["output_tokens"] <= committed
    assert found["average_acceptance_length"] == pytest.approx(found["output_tokens"] / found["spec_verify_count"])
