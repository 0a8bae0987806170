"""Looks at what a DRIFT memory is asked to be before anything is loaded, so that a refused start says so in one line."""

import hashlib
import json
from pathlib import Path

import torch

from adaptivespec.config import DriftConfig
from adaptivespec.errors import RefusedError
from drift.memory import DriftMemory
from drift.storage import BankFileError, load_bank
from drift.tenants import Tenants


def check_memory(config: DriftConfig, draft_folder: str) -> None:
    """Raise unless a memory of this config can be made for this draft, its bank file included.

    Args:
        config: of the memory.
        draft_folder: a draft that `draft_check.check_draft` has passed, or a hub's name, of which only the need of a
            folder for bank files is checked.

    Raises:
        RefusedError: more tokens a prototype than the draft has; a bank file for a draft that is no folder, one in a
            folder that does not exist, or one that cannot be loaded.
    """
    if not config.enabled:
        return
    folder = Path(draft_folder)
    if not folder.is_dir():
        if config.file is not None:
            raise _refuse(
                "drift.file",
                f"a bank file for the draft {draft_folder}",
                "a draft in a local folder: the file belongs to its very weights",
                "download the draft and give its folder, or leave drift.file out",
            )
        return
    draft = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vocab_size = draft.get("draft_vocab_size") or draft["vocab_size"]
    if config.num_tokens > vocab_size:
        raise _refuse("drift.num_tokens", str(config.num_tokens), f"at most the {vocab_size} draft tokens", "lower it")
    if config.file is None:
        return
    if not any(folder.glob("*.safetensors")):
        raise _refuse(
            "drift.file",
            f"a draft without *.safetensors in {folder}",
            "weights to tell drafts apart by",
            "export them so",
        )
    file = Path(config.file)
    if not file.parent.is_dir():
        raise _refuse("drift.file", f"no folder {file.parent}", "a folder to write the bank to", "create it")
    if file.exists():
        vocabulary = torch.arange(vocab_size)  # any of that size: the fingerprint says that it is the right one
        hidden_size = draft.get("hidden_size", 0)
        memory = DriftMemory(config.params, hidden_size, vocab_size, "cpu", vocabulary, draft["vocab_size"])
        try:
            load_bank(file, memory, Tenants(config.num_banks), fingerprint(folder))
        except BankFileError as error:
            raise _refuse("drift.file", error.found, error.expected, "delete the file or name another") from error


def fingerprint(draft_folder: Path) -> str:
    """Of the draft's weights."""
    digest = hashlib.sha256()
    for file in sorted(draft_folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _refuse(where: str, found: str, expected: str, fix: str) -> RefusedError:
    return RefusedError(reason="drift", where=where, found=found, expected=expected, fix=fix)
