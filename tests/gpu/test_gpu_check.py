"""The states on a real GPU: scripts/gpu_check.py, with servers of the demo pair."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch sees none"),
]


def test_states_are_captured_replayed_swapped_and_refused_on_this_gpu():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["ok"] is True
