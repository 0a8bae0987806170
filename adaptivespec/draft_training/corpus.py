"""The training text: rows of (prompt, the target's own answer), the held-out split and the draft vocabulary."""

import gzip
import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaptivespec.errors import AdaptiveSpecError

MIN_ANSWER_TOKENS = 8


class CorpusError(AdaptiveSpecError, ValueError):
    """The corpus file cannot be used; the message says what was found, what was expected and how to fix it."""


@dataclass(frozen=True)
class Row:
    """One answer of the target: token ids of the templated prompt and of the answer (EOS included where it ended)."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    greedy: bool

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.answer_ids

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


def load_rows(path: Path, tokenizer: Any) -> list[Row]:
    """Read a corpus file, in file order, with each prompt put through the tokenizer's chat template.

    Answers of at most MIN_ANSWER_TOKENS tokens are left out: they have no room for the draft's steps.

    Args:
        path: `.jsonl` or `.jsonl.gz`, one object a line with `prompt` (text), `ids` (answer tokens), `greedy` (bool).
        tokenizer: a Hugging Face tokenizer with a chat template.

    Raises:
        CorpusError: the file is absent, or a line is not such an object.
    """
    if not path.is_file():
        raise CorpusError(found=f"no file at {path}", expected="a .jsonl or .jsonl.gz file", fix="pass --corpus PATH")
    opener: Any = gzip.open if path.suffix == ".gz" else open
    rows: list[Row] = []
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            prompt, answer_ids, greedy = _parse_line(line, number)
            if len(answer_ids) > MIN_ANSWER_TOKENS:
                rows.append(Row(_prompt_ids(prompt, tokenizer), answer_ids, greedy))
    return rows


def _parse_line(line: str, number: int) -> tuple[str, tuple[int, ...], bool]:
    try:
        item = json.loads(line)
        prompt, ids, greedy = item["prompt"], item["ids"], item["greedy"]
    except (ValueError, KeyError, TypeError) as error:
        raise _line_error(line, number) from error
    if not (isinstance(prompt, str) and isinstance(greedy, bool) and isinstance(ids, list)):
        raise _line_error(line, number)
    return prompt, tuple(ids), greedy


def _line_error(line: str, number: int) -> CorpusError:
    return CorpusError(
        where=f"corpus line {number}",
        found=repr(line[:60]),
        expected='{"prompt": text, "ids": [token ids], "greedy": true or false}',
        fix="correct or remove that line",
    )


def _prompt_ids(prompt: str, tokenizer: Any) -> tuple[int, ...]:
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tuple(tokenizer(text)["input_ids"])


def split_rows(rows: list[Row], num_held_out: int, seed: int) -> tuple[list[int], list[int]]:
    """Draw the held-out rows by seed; the same arguments give the same split on every machine.

    A row that shares its prompt or its answer with a held-out row is in neither part.

    Returns:
        (training indices, held-out indices) into `rows`, both ascending.

    Raises:
        CorpusError: no row would be held out, or none left to train on.
    """
    if not 0 < num_held_out < len(rows):
        raise CorpusError(
            where="held-out rows",
            found=f"{num_held_out} of {len(rows)} rows",
            expected="at least one row held out and one left to train on",
            fix="change --held-out or give a larger corpus",
        )
    held_out = sorted(random.Random(seed).sample(range(len(rows)), num_held_out))
    prompts = {rows[i].prompt_ids for i in held_out}
    answers = {rows[i].answer_ids for i in held_out}
    train = [i for i, row in enumerate(rows) if row.prompt_ids not in prompts and row.answer_ids not in answers]
    return train, held_out


def count_draft_vocab(rows: list[Row], vocab_size: int, draft_vocab_size: int) -> tuple[Tensor, float]:
    """Take the answer tokens that the rows use most as the draft vocabulary; ties go to the smaller id.

    Returns:
        target ids, int64 [draft_vocab_size], ascending; the share of the rows' answer tokens inside it.
    """
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for row in rows:
        counts += torch.bincount(torch.tensor(row.answer_ids), minlength=vocab_size)
    kept = torch.argsort(counts, descending=True, stable=True)[:draft_vocab_size].sort().values
    return kept, (counts[kept].sum() / counts.sum()).item()


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
