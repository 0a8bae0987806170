"""Looks at a draft's folder before anything is loaded, since SGLang loads a broken EAGLE-3 draft without a word."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from adaptivespec.errors import RefusedError

_ARCHITECTURE_MARK = "Eagle3"


def check_draft(folder: str, target_hidden_size: int, target_vocab_size: int) -> None:
    """Raise unless the folder holds an EAGLE-3 draft that fits the target.

    Only local folders can be looked at; a name on a hub is left to SGLang's loader.

    Args:
        folder: ``--speculative-draft-model-path``.
        target_hidden_size, target_vocab_size: of the target's config.

    Raises:
        RefusedError: no such folder, no config or weights, another architecture, a hidden size or vocabulary that is
            not the target's, no lm_head, no d2t, or d2t that points outside the target's vocabulary.
    """
    path = Path(folder)
    if not path.is_dir():
        if folder.count("/") <= 1 and not folder.startswith((".", "/", "~")):
            return  # a hub's owner/name
        raise _refuse(folder, "no such folder", "a folder with config.json and *.safetensors", "check the path")
    config = _read_config(path)
    _check_config(folder, config, target_hidden_size, target_vocab_size)
    names, d2t = _read_weights(path)
    draft_vocab_size = config.get("draft_vocab_size")
    if draft_vocab_size is None:
        return  # the whole vocabulary: SGLang shares the target's lm_head where the draft has none
    if "lm_head.weight" not in names and not config.get("tie_word_embeddings"):
        raise _refuse(
            folder,
            "weights without lm_head.weight",
            f"lm_head.weight of {draft_vocab_size} rows",
            "export the draft's head",
        )
    if draft_vocab_size == target_vocab_size and d2t is None:
        return
    if d2t is None:
        raise _refuse(
            folder,
            f"a draft vocabulary of {draft_vocab_size} without d2t",
            "the tensor d2t: target id minus draft id of every draft token",
            "export d2t with the draft",
        )
    _check_d2t(folder, d2t, draft_vocab_size, target_vocab_size)


def _refuse(folder: str, found: str, expected: str, fix: str) -> RefusedError:
    return RefusedError(
        reason="draft", where=f"--speculative-draft-model-path {folder}", found=found, expected=expected, fix=fix
    )


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _refuse(
            str(path), f"no readable config.json ({error})", "an EAGLE-3 draft's config.json", "check the folder"
        ) from error
    if not isinstance(config, dict):
        raise _refuse(
            str(path), "a config.json that is not an object", "an EAGLE-3 draft's config.json", "check the folder"
        )
    return config


def _check_config(folder: str, config: dict[str, Any], hidden_size: int, vocab_size: int) -> None:
    architectures = config.get("architectures") or []
    if not any(_ARCHITECTURE_MARK in str(name) for name in architectures):
        raise _refuse(
            folder,
            f"architectures {architectures}",
            "an EAGLE-3 draft, such as LlamaForCausalLMEagle3",
            "use an EAGLE-3 draft",
        )
    found_hidden = config.get("target_hidden_size", config.get("hidden_size"))
    if found_hidden != hidden_size:
        raise _refuse(
            folder, f"hidden size {found_hidden}", f"{hidden_size}, the target's", "use a draft trained for this target"
        )
    if config.get("vocab_size") != vocab_size:
        raise _refuse(
            folder,
            f"vocab_size {config.get('vocab_size')}",
            f"{vocab_size}, the target's (draft_vocab_size may be smaller)",
            "use a draft trained for this target",
        )


def _read_weights(path: Path) -> tuple[set[str], Any]:
    files = sorted(path.glob("*.safetensors"))
    if not files:
        if any(path.glob("*.bin")):
            return {"lm_head.weight"}, None  # a pickle is not opened just to look at it
        raise _refuse(str(path), "no *.safetensors", "the draft's weights", "check the folder")
    names: set[str] = set()
    d2t = None
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                names_here = set(weights.keys())
                names |= names_here
                if "d2t" in names_here:
                    d2t = weights.get_tensor("d2t")
        except (SafetensorError, OSError) as error:
            raise _refuse(
                str(path), f"{file.name}: {error}", "readable safetensors", "download or export it again"
            ) from error
    return names, d2t


def _check_d2t(folder: str, d2t: Any, draft_vocab_size: int, target_vocab_size: int) -> None:
    import torch

    if d2t.shape != (draft_vocab_size,):
        raise _refuse(
            folder, f"d2t of shape {tuple(d2t.shape)}", f"({draft_vocab_size},), draft_vocab_size", "export d2t again"
        )
    targets = d2t.long() + torch.arange(draft_vocab_size)
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= target_vocab_size:
        raise _refuse(
            folder,
            f"d2t that leads to target ids {low} to {high}",
            f"ids from 0 to {target_vocab_size - 1}; d2t holds target id minus draft id",
            "export d2t again",
        )
