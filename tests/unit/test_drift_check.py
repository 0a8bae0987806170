"""`adaptivespec.sglang_plugin.drift_check`: a memory that cannot be made is refused in one line; others pass."""

from pathlib import Path
from typing import Any

import pytest
import torch

from adaptivespec.config import DriftConfig
from adaptivespec.errors import RefusedError
from adaptivespec.sglang_plugin.drift_check import check_memory, fingerprint
from drift.memory import DriftMemory
from drift.storage import save_bank
from drift.tenants import Tenants
from tests.unit.models import DRAFT_VOCAB_SIZE, HIDDEN_SIZE, VOCAB_SIZE, draft_weights, write_draft


def config(**values: Any) -> DriftConfig:
    return DriftConfig(**{"enabled": True, "num_slots": 8, "num_tokens": 2, **values})


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_draft(tmp_path / "draft")


@pytest.fixture
def bank(draft: Path, tmp_path: Path) -> Path:
    ids = torch.arange(DRAFT_VOCAB_SIZE)
    memory = DriftMemory(config().params, HIDDEN_SIZE, DRAFT_VOCAB_SIZE, "cpu", ids, VOCAB_SIZE)
    save_bank(tmp_path / "bank", memory, Tenants(config().num_banks), fingerprint(draft))
    return tmp_path / "bank"


def test_what_can_be_made_passes(draft: Path, bank: Path, tmp_path: Path):
    check_memory(config(file=str(bank)), str(draft))
    check_memory(config(file=str(tmp_path / "not-yet")), str(draft))
    check_memory(config(), "some-owner/some-draft")
    check_memory(config(enabled=False, num_tokens=4096, file="/no/such/folder/bank"), str(draft))


def test_what_cannot_is_refused_in_one_line(draft: Path, bank: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    broken.write_bytes(bank.read_bytes()[:-20])
    cases = [
        (config(num_tokens=4096), str(draft), f"drift.num_tokens: found 4096; expected at most the {DRAFT_VOCAB_SIZE}"),
        (config(file=str(bank)), "some-owner/some-draft", "expected a draft in a local folder"),
        (config(file=str(tmp_path / "none" / "bank")), str(draft), "found no folder"),
        (config(file=str(broken)), str(draft), "expected a file written by DRIFT"),
        (config(file=str(bank), num_slots=16), str(draft), "found sizes"),
    ]
    for each, folder, message in cases:
        with pytest.raises(RefusedError) as caught:
            check_memory(each, folder)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.reason == "drift"


def test_a_bank_of_another_draft_is_refused(draft: Path, bank: Path, tmp_path: Path):
    other = write_draft(tmp_path / "other", weights=draft_weights() | {"fc.weight": torch.ones(1)})
    with pytest.raises(RefusedError, match="found model"):
        check_memory(config(file=str(bank)), str(other))
