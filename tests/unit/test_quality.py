"""scripts/quality.py without a server: what it makes of the answers, and files of prompts."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from adaptivespec.prompt_files import PromptFile, PromptFileError

SCRIPT = Path(__file__).parents[2] / "scripts" / "quality.py"


@pytest.fixture(scope="module")
def quality():
    spec = importlib.util.spec_from_file_location("quality", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["quality"] = module
    spec.loader.exec_module(module)
    return module


def record(quality, kappa, ids, **values):
    base = {"prompt_set": "s", "prompt": 0, "round": 0, "seconds": 1.0, "verify_steps": 2, "accepted": 3, "promoted": 0}
    base |= {"hit_cap": False, "log_likelihood": -1.0, "is_right": None}
    return quality.Record(kappa=kappa, ids=ids, **(base | values))


def test_figures_are_against_the_strict_answer_to_the_same_prompt(quality):
    strict = record(quality, 0.0, [1, 2, 3, 4], is_right=True)
    lossy = record(
        quality, 0.2, [1, 2, 9, 9, 9], seconds=0.5, promoted=1, log_likelihood=-1.5, hit_cap=True, is_right=False
    )
    found = quality.summarise([lossy, strict])
    assert list(found) == ["strict", "0.2"]
    assert found["strict"] | {"n": 1} == found["strict"]
    assert found["strict"]["speed_over_strict"] == 1 == found["strict"]["agreement"]
    row = found["0.2"]
    assert row["speed_over_strict"] == 2.5
    assert row["agreement"] == 0.4
    assert row["length_ratio"] == 1.25
    assert row["log_likelihood_gap"] == -0.5
    assert row["promoted_per_1000"] == 200
    assert (row["hit_cap"], row["accuracy"], row["accept_length"]) == (1, 0, 2.5), "5 tokens in 2 steps"
    assert quality.figure(found, "x.jsonl").startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("so 3 + 4 = 7.", "she has 3+4=<<3+4=7>>7\n#### 7", True),
        ("1,200 dollars", "#### 1200", True),
        ("no number", "#### 7", False),
        ("7", None, None),
        ("7", "blue", None),
        ("3", "\\frac{14}{3}", None),
    ],
)
def test_the_last_number_is_graded(quality, text, gold, right):
    assert quality.is_right(text, gold) is right


@pytest.mark.parametrize(
    ("options", "found"),
    [(["--kappas", "1.5"], "found 1.5"), (["--kappas", "x"], "found x"), (["--out", "q.log"], "q.log")],
)
def test_bad_options_cost_no_server(quality, options, found, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quality.py", "--prompts", "a=a.jsonl", *options])
    with pytest.raises(SystemExit):
        quality.main()
    assert found in capsys.readouterr().err


def test_repetition(quality):
    assert quality.repetition([1, 2, 3]) == 0
    assert quality.repetition(list(range(50))) == 0
    assert quality.repetition([1, 2] * 4) == pytest.approx(1 - 2 / 5)


def test_prompt_files(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"q{i}", "x"]}) + "\n" for i in range(3)))
    source = PromptFile.parse(f"mt={path}")
    assert source.name == "mt"
    assert [row["text"] for row in source.rows(2, skip=1)] == ["q1", "q2"]
    with pytest.raises(PromptFileError, match="found 1 rows after row 2; expected 2; fix: lower --num-prompts"):
        source.rows(2, skip=2)
    path.write_text('{"body": "x"}\n')
    with pytest.raises(
        PromptFileError, match=r"found .*body.*; expected an object with a text, or a list of texts, as question"
    ):
        source.rows(1)
