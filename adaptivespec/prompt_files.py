"""Prompts from JSON-lines files, for the measuring scripts."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptivespec.errors import AdaptiveSpecError

_FIELDS = ("question", "problem", "prompt", "text", "turns")


class PromptFileError(AdaptiveSpecError, ValueError):
    """A file of prompts that cannot be used as asked."""


@dataclass(frozen=True)
class PromptFile:
    """A named set of prompts, ``NAME=FILE.jsonl`` on a command line."""

    name: str
    path: Path

    @classmethod
    def parse(cls, text: str) -> "PromptFile":
        """For argparse.

        Raises:
            argparse.ArgumentTypeError: no name.
        """
        name, separator, path = text.partition("=")
        if not separator:
            raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=FILE.jsonl")
        return cls(name, Path(path))

    def rows(self, count: int, skip: int = 0) -> list[dict[str, Any]]:
        """``count`` rows after the first ``skip``, each with its user turn under ``"text"``.

        Raises:
            PromptFileError: too few rows, or none of the fields that hold a prompt.
        """
        with self.path.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        chosen = rows[skip : skip + count]
        if len(chosen) < count:
            raise PromptFileError(
                where=str(self.path),
                found=f"{len(chosen)} rows after row {skip}",
                expected=str(count),
                fix="lower --num-prompts",
            )
        field = next((name for name in _FIELDS if name in chosen[0]), None)
        if field is None:
            raise PromptFileError(
                where=str(self.path),
                found=f"fields {', '.join(chosen[0])}",
                expected=f"one of {', '.join(_FIELDS)}",
                fix="rename the field that holds the prompt",
            )
        return [row | {"text": row[field] if isinstance(row[field], str) else row[field][0]} for row in chosen]


def chat_text(tokenizer: Any, text: str) -> str:
    """A user turn in the model's chat template, ready for its answer."""
    chat = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
