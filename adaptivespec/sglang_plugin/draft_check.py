"""Looks at a draft's files before anything is loaded, since SGLang loads a broken EAGLE-3 draft without a word."""

import json
import logging
import reprlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from adaptivespec.errors import RefusedError

logger = logging.getLogger(__name__)

_ARCHITECTURE_MARK = "Eagle3"


def check_draft(
    draft: str,
    target_hidden_size: int,
    target_vocab_size: int,
    revision: str | None = None,
    download_dir: str | None = None,
) -> None:
    """Raise unless this is an EAGLE-3 draft that fits the target. What is on the hub only is downloaded for that, to where
    SGLang's loader finds it.

    Args:
        draft: ``--speculative-draft-model-path``, a folder or a name on the hub.
        target_hidden_size, target_vocab_size: of the target's config.
        revision, download_dir: SGLang's, of a name on the hub.

    Raises:
        RefusedError: no such draft, no config or weights, another architecture, a hidden size or vocabulary that is
            not the target's, no lm_head or one of another size, no d2t, or d2t that points outside the target's
            vocabulary.
    """
    path, is_local = Path(draft), Path(draft).is_dir()
    if not is_local:
        path = _download(draft, revision, download_dir)
    config = _read_config(draft, path)
    _check_config(draft, config, target_hidden_size, target_vocab_size)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        if is_local and not any(path.glob("*.bin")):
            raise _refuse(draft, "no *.safetensors", "the draft's weights", "check the folder")
        logger.info(
            "%s: no *.safetensors; a pickle is not opened just to look at it, so the weights go unchecked", draft
        )
        return
    shapes, d2t = _read_weights(draft, files)
    if config.get("draft_vocab_size") is None:
        return  # the whole vocabulary: SGLang shares the target's lm_head where the draft has none
    _check_weights(draft, config, shapes, d2t, target_vocab_size)


def _download(name: str, revision: str | None, download_dir: str | None) -> Path:
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise _refuse(name, "no such folder", "a folder with config.json and *.safetensors", "check the path")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["config.json", "*.safetensors"]
        folder = snapshot_download(name, revision=revision, cache_dir=download_dir, allow_patterns=patterns)
    except (OSError, ValueError) as error:  # what the hub's client raises is one or the other
        raise _refuse(
            name,
            f"neither such a folder nor a draft on the hub ({error})",
            "a folder with config.json and *.safetensors, or an owner/name that can be downloaded",
            "check the name; for a private draft set HF_TOKEN, without a network download it beforehand",
        ) from error
    return Path(folder)


def _refuse(folder: str, found: str, expected: str, fix: str) -> RefusedError:
    return RefusedError(
        reason="draft", where=f"--speculative-draft-model-path {folder}", found=found, expected=expected, fix=fix
    )


def _read_config(draft: str, path: Path) -> dict[str, Any]:
    expected, fix = "an EAGLE-3 draft's config.json", "check the folder or name"
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _refuse(draft, f"no readable config.json ({error})", expected, fix) from error
    if not isinstance(config, dict):
        raise _refuse(draft, "a config.json that is not an object", expected, fix)
    return config


def _check_config(folder: str, config: dict[str, Any], hidden_size: int, vocab_size: int) -> None:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not any(_ARCHITECTURE_MARK in str(name) for name in architectures):
        raise _refuse(
            folder,
            f"architectures {reprlib.repr(architectures)}",
            "an EAGLE-3 draft, such as LlamaForCausalLMEagle3",
            "use an EAGLE-3 draft",
        )
    found_hidden = config.get("target_hidden_size", config.get("hidden_size"))
    if found_hidden != hidden_size:
        raise _refuse(
            folder,
            f"hidden size {reprlib.repr(found_hidden)}",
            f"{hidden_size}, the target's",
            "use a draft trained for this target",
        )
    if config.get("vocab_size") != vocab_size:
        raise _refuse(
            folder,
            f"vocab_size {reprlib.repr(config.get('vocab_size'))}",
            f"{vocab_size}, the target's (draft_vocab_size may be smaller)",
            "use a draft trained for this target",
        )
    draft_vocab_size = config.get("draft_vocab_size")
    if draft_vocab_size is not None and (type(draft_vocab_size) is not int or not 1 <= draft_vocab_size <= vocab_size):
        raise _refuse(
            folder,
            f"draft_vocab_size {reprlib.repr(draft_vocab_size)}",
            f"an integer from 1 to {vocab_size}, the target's vocab_size, or none",
            "correct config.json",
        )


def _read_weights(folder: str, files: list[Path]) -> tuple[dict[str, list[int]], Any]:
    """The shape of every tensor, and the tensor ``d2t`` or None."""
    shapes: dict[str, list[int]] = {}
    d2t = None
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                here = {name: weights.get_slice(name).get_shape() for name in sorted(weights.keys())}
                if "d2t" in here:
                    d2t = weights.get_tensor("d2t")
        except (SafetensorError, OSError) as error:
            raise _refuse(
                folder, f"{file.name}: {error}", "readable safetensors", "download or export it again"
            ) from error
        shapes |= here
    return shapes, d2t


def _check_weights(
    folder: str, config: dict[str, Any], shapes: dict[str, list[int]], d2t: Any, target_vocab_size: int
) -> None:
    draft_vocab_size = config["draft_vocab_size"]
    head = shapes.get("lm_head.weight")
    if head is None and not config.get("tie_word_embeddings"):
        raise _refuse(
            folder,
            "weights without lm_head.weight",
            f"lm_head.weight of {draft_vocab_size} rows",
            "export the draft's head",
        )
    if head is not None and head[:1] != [draft_vocab_size]:
        raise _refuse(
            folder,
            f"lm_head.weight of shape {head}",
            f"{draft_vocab_size} rows, draft_vocab_size",
            "correct config.json or export the draft again",
        )
    if d2t is not None:
        _check_d2t(folder, d2t, draft_vocab_size, target_vocab_size)
    elif draft_vocab_size != target_vocab_size:
        raise _refuse(
            folder,
            f"a draft vocabulary of {draft_vocab_size} without d2t",
            "the tensor d2t: target id minus draft id of every draft token",
            "export d2t with the draft",
        )


def _check_d2t(folder: str, d2t: Any, draft_vocab_size: int, target_vocab_size: int) -> None:
    import torch

    if d2t.shape != (draft_vocab_size,) or d2t.is_floating_point():
        raise _refuse(
            folder,
            f"d2t of shape {tuple(d2t.shape)}, {d2t.dtype}",
            f"integers of shape ({draft_vocab_size},), draft_vocab_size",
            "export d2t again",
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
