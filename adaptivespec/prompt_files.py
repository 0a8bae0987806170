"""Models and prompts of the measuring scripts: their common arguments, and prompts from JSON-lines files."""

import argparse
import json
import random
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptivespec.command_line import not_negative, positive
from adaptivespec.errors import AdaptiveSpecError, ConfigError

_FIELDS = ("question", "problem", "prompt", "text", "turns")


class PromptFileError(AdaptiveSpecError, ValueError):
    """A file of prompts that cannot be used as asked."""


@dataclass(frozen=True)
class PromptFile:
    """A named set of prompts, ``NAME=FILE.jsonl`` on a command line.

    Args:
        name, path: of the set and its file.
        seed: rows are taken in an order drawn with it, for files that are sorted by kind; None: as they stand.
    """

    name: str
    path: Path
    seed: int | None = None

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
            PromptFileError: no such file, not JSON lines, too few rows, or none of the fields that hold a prompt.
        """
        rows = self._read()
        if self.seed is not None:
            random.Random(self.seed).shuffle(rows)
        chosen = rows[skip : skip + count]
        if len(chosen) < count:
            raise PromptFileError(
                where=str(self.path),
                found=f"{len(chosen)} rows after row {skip}",
                expected=str(count),
                fix="lower --num-prompts",
            )
        return [row | {"text": self._prompt_of(row, skip + number)} for number, row in enumerate(chosen, 1)]

    def _prompt_of(self, row: Any, number: int) -> str:
        """The first user turn of a row, whose number is for the error."""
        for name in _FIELDS if isinstance(row, dict) else ():
            value = row.get(name)
            turn = value[0] if isinstance(value, list) and value else value
            if isinstance(turn, str) and turn:
                return turn
        raise PromptFileError(
            where=f"{self.path}, row {number}",
            found=reprlib.repr(row),
            expected=f"an object with a text, or a list of texts, as {', '.join(_FIELDS)}",
            fix="correct that row",
        )

    def _read(self) -> list[dict[str, Any]]:
        try:
            lines = self.path.read_text(encoding="utf-8").split("\n")
        except OSError as error:
            raise PromptFileError(
                where=str(self.path),
                found=error.strerror or str(error),
                expected="a file of JSON lines",
                fix=f"correct the path after {self.name}=",
            ) from error
        except UnicodeDecodeError as error:
            raise PromptFileError(
                where=str(self.path), found=str(error), expected="a file of UTF-8", fix="correct the file"
            ) from error
        rows = [self._parse(line, number) for number, line in enumerate(lines, 1) if line.strip()]
        if not rows:
            raise PromptFileError(
                where=str(self.path), found="no rows", expected="a JSON object a line", fix="give another file"
            )
        return rows

    def _parse(self, line: str, number: int) -> Any:
        try:
            return json.loads(line)
        except json.JSONDecodeError as error:
            raise PromptFileError(
                where=f"{self.path}, line {number}",
                found=f"{reprlib.repr(line)} ({error.msg})",
                expected="a JSON object a line",
                fix="correct that line",
            ) from error


def rows_by_name(sources: Sequence[PromptFile], count: int, skip: int = 0) -> dict[str, list[dict[str, Any]]]:
    """The rows of several sets.

    Raises:
        PromptFileError: two sets of one name, or see `PromptFile.rows`.
    """
    names = [source.name for source in sources]
    if len(names) > len(set(names)):
        raise PromptFileError(
            where="--prompts", found=", ".join(names), expected="each name once", fix="give each file a name of its own"
        )
    return {source.name: source.rows(count, skip) for source in sources}


def check_lengths(
    sources: Sequence[PromptFile], ids: Mapping[str, list[list[int]]], skip: int, max_new_tokens: int, target: str
) -> None:
    """Refuse prompts that leave a target no room for their answers: a server would refuse each when its turn comes.

    Raises:
        PromptFileError: one is too long.
    """
    from transformers import AutoConfig

    room = getattr(AutoConfig.from_pretrained(target).get_text_config(), "max_position_embeddings", None)
    for source in sources:
        for number, prompt in enumerate(ids[source.name], skip + 1):
            if room is not None and len(prompt) + max_new_tokens > room:
                raise PromptFileError(
                    where=f"{source.path}, row {number}",
                    found=f"{len(prompt)} tokens, with answers of {max_new_tokens}",
                    expected=f"at most {room} together, the context of {target}",
                    fix="leave that row out, or lower --max-new-tokens",
                )


def chat_text(tokenizer: Any, text: str) -> str:
    """A user turn in the model's chat template, ready for its answer."""
    chat = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))


def chat_token_ids(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each user turn in the model's chat template; the bare text where the model has none."""
    if tokenizer.chat_template is None:
        return [tokenizer.encode(prompt) for prompt in prompts]
    # The template writes the special tokens itself.
    return [tokenizer.encode(chat_text(tokenizer, prompt), add_special_tokens=False) for prompt in prompts]


def add_arguments(parser: argparse.ArgumentParser, *, rounds: bool = True) -> None:
    """The arguments that say what is measured: the pair, the prompts and, unless told otherwise, how often."""
    parser.add_argument("--target", help="default: the demo target")
    parser.add_argument("--draft", help="default: the demo draft")
    parser.add_argument(
        "--prompts",
        type=PromptFile.parse,
        action="append",
        required=True,
        metavar="NAME=FILE.jsonl",
        help=f"a set of prompts: an object a line, with the user turn as {', '.join(_FIELDS)}; may be given again",
    )
    parser.add_argument("--num-prompts", type=positive, default=8, help="of each set (default %(default)s)")
    parser.add_argument("--skip", type=not_negative, default=0, help="rows of each set to leave out at the front")
    parser.add_argument("--max-new-tokens", type=positive, default=96, help="of an answer (default %(default)s)")
    if rounds:
        parser.add_argument("--rounds", type=positive, default=1, help="over all prompts (default %(default)s)")


def fill_in_pair(args: argparse.Namespace) -> None:
    """The demo's target and draft, where the arguments name none. Fetches the target if need be.

    Raises:
        ConfigError: a folder without a model.
    """
    for option in ("target", "draft"):
        _check_model(f"--{option}", getattr(args, option))
    if not (args.target and args.draft):
        from adaptivespec.demo.draft import draft_folder
        from adaptivespec.demo.target import prepare_target

        args.target, args.draft = args.target or prepare_target(), args.draft or draft_folder()


def _check_model(option: str, value: str | None) -> None:
    """Refuse a local path without a model; hub names and None pass."""
    if value is None:
        return
    path = Path(value).expanduser()
    is_hub_name = value.count("/") <= 1 and not value.startswith((".", "/", "~")) and not path.exists()
    if not is_hub_name and not (path / "config.json").is_file():
        raise ConfigError(
            where=option,
            found=f"no config.json in {value}",
            expected="a model's folder or hub name",
            fix="correct the path",
        )
