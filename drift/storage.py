"""A memory as a file: safetensors, with what it was made for in the metadata."""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from drift.memory import NO_BANK, DriftMemory
from drift.tenants import Tenants

FORMAT = "drift-2"


class BankFileError(ValueError):
    """The file cannot be used; the message says what was found, what was expected and how to fix it."""

    def __init__(self, path: Path, found: str, expected: str) -> None:
        super().__init__(f"{path}: found {found}; expected {expected}; to fix: delete the file or name another")
        self.found, self.expected = found, expected


def save_bank(path: Path, memory: DriftMemory, tenants: Tenants, model: str) -> None:
    """Write the memory, complete or not at all. Host sync: yes.

    Args:
        model: says whose hidden states and draft vocabulary it is about; a file of another one is refused.
    """
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _contents(memory).items()}
    metadata = {
        "format": FORMAT,
        "model": model,
        "sizes": json.dumps(_sizes(memory, tenants)),
        "tenants": json.dumps(tenants.banks),
    }
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata=metadata)
    part.replace(path)


def load_bank(path: Path, memory: DriftMemory, tenants: Tenants, model: str) -> None:
    """Replace the contents of the memory by those of a file; leaves both as they were where it is refused.

    Raises:
        BankFileError: the file is no such file, or belongs to another model, size or version, or holds impossible values.
    """
    try:
        with safe_open(path, framework="pt") as stream:
            metadata = stream.metadata() or {}
            tensors = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise BankFileError(path, str(error), "a file written by DRIFT") from error
    expected = {"format": FORMAT, "model": model, "sizes": json.dumps(_sizes(memory, tenants))}
    for key, value in expected.items():
        if metadata.get(key) != value:
            raise BankFileError(path, f"{key} {metadata.get(key)!r}", repr(value))
    banks = _parse_tenants(path, metadata.get("tenants", ""), tenants.num_banks)
    contents = _contents(memory)
    for name, own in contents.items():
        read = tensors.get(name)
        if read is None or read.shape != own.shape or read.dtype != own.dtype:
            found = "none" if read is None else f"{read.dtype} {list(read.shape)}"
            raise BankFileError(path, f"tensor {name}: {found}", f"{own.dtype} {list(own.shape)}")
    _check_values(path, tensors, memory)
    _check_slots(path, tensors, {NO_BANK, *banks.values(), *range(tenants.num_banks, memory.params.num_banks)})
    _check_columns(path, tensors, memory)
    for name, own in contents.items():
        own.copy_(tensors[name])
    tenants.restore(banks)


def _contents(memory: DriftMemory) -> dict[str, torch.Tensor]:
    """The tensors of a file, by name."""
    contents = {name: getattr(memory, name) for name in ("keys", "token_ids", "bias", "owner", "last_used", "clock")}
    if memory.spare is not None:
        contents |= {"spare_tokens": memory.spare.tokens, "spare_last_used": memory.spare.last_used}
    return contents


def _sizes(memory: DriftMemory, tenants: Tenants) -> dict[str, int]:
    params = asdict(memory.params)
    sizes = {name: params[name] for name in ("num_slots", "num_tokens", "num_banks")}
    # Banks beyond the tenants' are shared: one must never be taken for the other.
    return sizes | {
        "num_tenants": tenants.num_banks,
        "hidden_size": memory.keys.shape[1],
        "vocab_size": memory.vocab_size,
        "num_columns": memory.num_columns,
        "target_vocab_size": 0 if memory.spare is None else memory.spare.target_vocab_size,
    }


def _parse_tenants(path: Path, text: str, num_banks: int) -> dict[str, int]:
    try:
        banks = json.loads(text)
    except ValueError:
        banks = None
    if not isinstance(banks, dict) or sorted(map(repr, banks.values())) != sorted(map(repr, range(len(banks)))):
        raise BankFileError(path, f"tenants {text[:80]!r}", "an object of names and their banks, counted from 0")
    if len(banks) > num_banks:
        raise BankFileError(path, f"{len(banks)} tenants", f"at most {num_banks}")
    return banks


def _check_slots(path: Path, tensors: dict[str, torch.Tensor], banks: set[int]) -> None:
    owner, token_ids = tensors["owner"], tensors["token_ids"]
    found = set(owner.tolist()) - banks
    if found:
        raise BankFileError(path, f"slots of banks {sorted(found)}", "banks that are shared or a tenant's")
    used = token_ids[owner != NO_BANK].sort(dim=1).values
    if bool((used[:, 1:] == used[:, :-1]).any()):
        raise BankFileError(path, "a slot with a token twice", "different tokens in each slot")


def _check_columns(path: Path, tensors: dict[str, torch.Tensor], memory: DriftMemory) -> None:
    if memory.spare is None:
        return
    owner = tensors["owner"].unsqueeze(1)
    column = tensors["token_ids"] - memory.vocab_size
    is_foreign = (column >= 0) & (owner != NO_BANK) & (column // memory.spare.tokens.shape[1] != owner)
    if bool(is_foreign.any()):
        raise BankFileError(path, "a slot with a token of another bank", "tokens of the draft and of the slot's bank")


def _check_values(path: Path, tensors: dict[str, torch.Tensor], memory: DriftMemory) -> None:
    clock = tensors["clock"]
    bounds = {
        "token_ids": (0, memory.num_columns - 1),
        "owner": (NO_BANK, memory.params.num_banks - 1),
        "last_used": (0, int(clock)),
        "clock": (0, 2**62),
        "bias": (-1e4, 1e4),
        "keys": (-1.01, 1.01),
    }
    if memory.spare is not None:
        bounds |= {"spare_tokens": (0, memory.spare.target_vocab_size - 1), "spare_last_used": (0, int(clock))}
    for name, (low, high) in bounds.items():
        values = tensors[name]
        if not bool(((values >= low) & (values <= high)).all()):
            raise BankFileError(path, f"{name} outside {low} to {high}", "values that DRIFT writes")
