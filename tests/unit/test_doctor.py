"""The doctor's report: what it finds here, what it says of what is broken, and its exit status."""

import json
from pathlib import Path

import pytest

from adaptivespec import doctor
from adaptivespec.demo.draft import draft_folder
from adaptivespec.sglang_plugin.refusals import OPTIONS


def findings(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, dict[str, dict]]:
    status = doctor.main(["--json", *args])
    return status, {each["subject"]: each for each in json.loads(capsys.readouterr().out)}


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 576, "vocab_size": 49152}))
    return str(tmp_path)


def test_a_sound_environment_passes(capsys, target):
    pair = ["--model-path", target, "--speculative-draft-model-path", str(draft_folder())]
    status, found = findings(capsys, *pair)
    assert status == 0, found
    assert not [each for each in found.values() if each["is_ok"] is False]
    assert found["sglang"]["found"] == "0.5.23"
    assert "policy dcs, shapes (" in found["config"]["found"]
    assert found["draft"]["is_ok"]


def test_the_table_names_every_refused_option_and_why(capsys):
    assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for option in OPTIONS:
        assert any(option.flag in line for line in lines), option.flag
        assert any(option.why in line for line in lines), option.why


@pytest.mark.parametrize(
    ("break_it", "subject", "words"),
    [
        (lambda patch: patch.setenv("SGLANG_PLATFORM", "cuda"), "SGLANG_PLATFORM", "fix: unset it"),
        (lambda patch: patch.setenv("SGLANG_PLUGINS", "other"), "SGLANG_PLUGINS", "fix: add adaptivespec"),
        (lambda patch: patch.setattr(doctor, "SGLANG_VERSION", "9.9"), "sglang", "fix: pip install sglang==9.9"),
        (
            lambda patch: patch.setattr("importlib.metadata.entry_points", lambda group: []),
            "entry point sglang.srt.plugins",
            "fix: pip install -e .",
        ),
    ],
)
def test_what_is_broken_is_said_with_its_fix(capsys, monkeypatch, break_it, subject, words):
    break_it(monkeypatch)
    status, found = findings(capsys)
    assert status == 1
    assert found[subject]["is_ok"] is False
    assert words in found[subject]["found"]


def test_a_draft_and_a_config_that_do_not_fit(capsys, tmp_path, target):
    config = tmp_path / "adaptive.json"
    config.write_text('{"policy": "guess"}')
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 512, "vocab_size": 49152}))
    pair = ["--model-path", target, "--speculative-draft-model-path", str(draft_folder())]
    status, found = findings(capsys, *pair, "--speculative-adaptive-config", str(config))
    assert status == 1
    for subject in ("config", "draft"):
        assert found[subject]["is_ok"] is False
        assert all(word in found[subject]["found"] for word in ("found", "expected", "fix:"))
    status, found = findings(capsys, *pair[2:])
    assert (status, found["draft"]["is_ok"]) == (1, False)
    assert "fix: give --model-path" in found["draft"]["found"]
