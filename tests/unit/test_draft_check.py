"""`adaptivespec.sglang_plugin.draft_check`: every broken draft is refused in one line; a good one passes."""

import logging
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.errors import RefusedError
from adaptivespec.sglang_plugin.draft_check import check_draft
from tests.unit.models import (
    DRAFT_CONFIG,
    DRAFT_VOCAB_SIZE,
    HIDDEN_SIZE,
    VOCAB_SIZE,
    draft_weights,
    write_draft,
)


def check(folder: Path) -> None:
    check_draft(str(folder), HIDDEN_SIZE, VOCAB_SIZE)


def refusal(folder: Path) -> str:
    with pytest.raises(RefusedError) as caught:
        check(folder)
    message = str(caught.value)
    assert message.startswith(f"--speculative-draft-model-path {folder}: found ")
    assert "; expected " in message
    assert "; fix: " in message
    assert "\n" not in message
    assert caught.value.reason == "draft"
    return message


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in draft_weights().items() if key != name}


def test_a_good_draft_passes(tmp_path):
    check(write_draft(tmp_path))


def test_a_shared_vocabulary_needs_neither_head_nor_d2t(tmp_path):
    config = {key: value for key, value in DRAFT_CONFIG.items() if key != "draft_vocab_size"}
    check(write_draft(tmp_path, config, {"fc.weight": torch.zeros(1)}))
    check(write_draft(tmp_path, {**config, "draft_vocab_size": None}, {"fc.weight": torch.zeros(1)}))


def test_a_draft_vocabulary_as_large_as_the_targets_needs_no_d2t(tmp_path):
    config = {**DRAFT_CONFIG, "draft_vocab_size": VOCAB_SIZE}
    check(write_draft(tmp_path, config, {"lm_head.weight": torch.zeros(VOCAB_SIZE, HIDDEN_SIZE)}))


def test_a_draft_for_another_hidden_size_than_its_own_names_the_targets(tmp_path):
    check(write_draft(tmp_path, {**DRAFT_CONFIG, "hidden_size": 8, "target_hidden_size": HIDDEN_SIZE}))


def test_weights_may_be_in_several_files(tmp_path):
    from safetensors.torch import save_file

    write_draft(tmp_path, weights={"fc.weight": torch.zeros(2)})
    save_file({"d2t": draft_weights()["d2t"]}, tmp_path / "second.safetensors")
    assert "without lm_head.weight" in refusal(tmp_path)
    save_file({"lm_head.weight": draft_weights()["lm_head.weight"]}, tmp_path / "third.safetensors")
    check(tmp_path)


@pytest.mark.parametrize(
    ("change", "found", "expected"),
    [
        ({"hidden_size": 48}, "found hidden size 48", "expected 32, the target's"),
        ({"target_hidden_size": 48}, "found hidden size 48", "expected 32, the target's"),
        ({"vocab_size": 100}, "found vocab_size 100", "expected 64, the target's"),
        ({"architectures": ["LlamaForCausalLM"]}, "found architectures ['LlamaForCausalLM']", "an EAGLE-3 draft"),
        ({"architectures": None}, "found architectures None", "an EAGLE-3 draft"),
        ({"draft_vocab_size": 128}, "found draft_vocab_size 128", "an integer from 1 to 64"),
        ({"draft_vocab_size": 0}, "found draft_vocab_size 0", "an integer from 1 to 64"),
        ({"draft_vocab_size": 16.0}, "found draft_vocab_size 16.0", "an integer from 1 to 64"),
        ({"draft_vocab_size": 24}, "found lm_head.weight of shape [16, 32]", "expected 24 rows"),
    ],
)
def test_a_config_that_does_not_fit(tmp_path, change, found, expected):
    message = refusal(write_draft(tmp_path, {**DRAFT_CONFIG, **change}))
    assert found in message
    assert expected in message


@pytest.mark.parametrize(
    ("d2t", "found"),
    [
        (torch.arange(DRAFT_VOCAB_SIZE) * 4, "d2t that leads to target ids 0 to 75"),
        (torch.arange(DRAFT_VOCAB_SIZE) - 9, "d2t that leads to target ids -9 to 21"),
        (torch.zeros(DRAFT_VOCAB_SIZE - 1, dtype=torch.int64), "d2t of shape (15,), torch.int64"),
        (torch.zeros(1, DRAFT_VOCAB_SIZE, dtype=torch.int64), "d2t of shape (1, 16), torch.int64"),
        (torch.zeros(DRAFT_VOCAB_SIZE), "d2t of shape (16,), torch.float32"),
    ],
)
def test_a_d2t_that_does_not_fit(tmp_path, d2t, found):
    assert f"found {found}" in refusal(write_draft(tmp_path, weights={**draft_weights(), "d2t": d2t}))


def test_d2t_may_reach_the_last_target_id(tmp_path):
    d2t = torch.full((DRAFT_VOCAB_SIZE,), VOCAB_SIZE - DRAFT_VOCAB_SIZE, dtype=torch.int32)
    check(write_draft(tmp_path, weights={**draft_weights(), "d2t": d2t}))
    assert "to 64; expected" in refusal(write_draft(tmp_path, weights={**draft_weights(), "d2t": d2t + 1}))


def test_missing_tensors(tmp_path):
    assert "weights without lm_head.weight" in refusal(write_draft(tmp_path, weights=without("lm_head.weight")))
    assert "draft vocabulary of 16 without d2t" in refusal(write_draft(tmp_path, weights=without("d2t")))


def test_a_head_that_is_no_matrix(tmp_path):
    weights = {**draft_weights(), "lm_head.weight": torch.zeros(())}
    assert "lm_head.weight of shape []" in refusal(write_draft(tmp_path, weights=weights))


def test_an_empty_folder(tmp_path):
    assert "no readable config.json" in refusal(tmp_path)


def test_a_folder_without_weights(tmp_path):
    (write_draft(tmp_path) / "model.safetensors").unlink()
    assert "found no *.safetensors" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", b"\xff" * 64, b"\x10\0\0\0\0\0\0\0{}"])
def test_corrupt_safetensors(tmp_path, content):
    (write_draft(tmp_path) / "model.safetensors").write_bytes(content)
    assert "model.safetensors: " in refusal(tmp_path)


def test_truncated_safetensors(tmp_path):
    file = write_draft(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "readable safetensors" in refusal(tmp_path)


def test_pickled_weights_are_left_unopened_and_that_is_said(tmp_path, caplog):
    (write_draft(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"never unpickled")
    with caplog.at_level(logging.INFO):
        check(tmp_path)
    assert "the weights go unchecked" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe{}", b"[" * 100_000])
def test_a_config_that_is_no_json_object(tmp_path, content):
    (write_draft(tmp_path) / "config.json").write_bytes(content)
    assert "config.json" in refusal(tmp_path)


def test_no_such_folder(tmp_path):
    assert "found no such folder" in refusal(tmp_path / "absent")
    file = tmp_path / "file"
    file.touch()
    assert "found no such folder" in refusal(file)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """The hub client's cache, without a network; what `some-owner/some-draft` has goes into the folder."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    entry = tmp_path / "cache" / "models--some-owner--some-draft"
    snapshot = entry / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (entry / "refs").mkdir()
    for name in ("main", "a-branch"):
        (entry / "refs" / name).write_text("0123")
    return snapshot


def check_hub(snapshot: Path, name: str = "some-owner/some-draft", revision: str | None = None) -> None:
    check_draft(name, HIDDEN_SIZE, VOCAB_SIZE, revision, str(snapshot.parents[2]))


def test_a_draft_on_the_hub_is_looked_at_too(hub):
    write_draft(hub, {**DRAFT_CONFIG, "hidden_size": 48})
    with pytest.raises(RefusedError, match=r"path some-owner/some-draft: found hidden size 48; expected 32"):
        check_hub(hub)
    write_draft(hub)
    check_hub(hub)
    check_hub(hub, revision="a-branch")
    (hub / "model.safetensors").unlink()
    check_hub(hub)  # it may have *.bin, which are not downloaded for this


@pytest.mark.parametrize(
    ("name", "revision"),
    [("some-owner/no-draft", None), ("some-owner/some-draft", "no-branch"), ("no-folder", None), ("no name!", None)],
)
def test_what_is_neither_a_folder_nor_on_the_hub(hub, name, revision):
    write_draft(hub)
    with pytest.raises(RefusedError, match="found neither such a folder nor a draft on the hub") as caught:
        check_hub(hub, name, revision)
    assert "\n" not in str(caught.value)


def test_a_path_is_not_looked_for_on_the_hub():
    with pytest.raises(RefusedError, match="no such folder"):
        check_draft("./some-eagle3-draft", HIDDEN_SIZE, VOCAB_SIZE)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
changes = st.dictionaries(
    st.sampled_from(
        ["architectures", "hidden_size", "target_hidden_size", "vocab_size", "draft_vocab_size", "tie_word_embeddings"]
    ),
    json_values | st.just([["LlamaForCausalLMEagle3"]]) | st.sampled_from([HIDDEN_SIZE, VOCAB_SIZE, DRAFT_VOCAB_SIZE]),
    min_size=1,
)


@given(json_values | changes.map(lambda change: {**DRAFT_CONFIG, **change}))
def test_any_config_passes_or_is_refused(config):
    with tempfile.TemporaryDirectory() as folder:
        write_draft(Path(folder), config)
        try:
            check(Path(folder))
        except RefusedError:
            return
        assert config["vocab_size"] == VOCAB_SIZE
        assert config.get("target_hidden_size", config["hidden_size"]) == HIDDEN_SIZE
        assert config["draft_vocab_size"] in (None, DRAFT_VOCAB_SIZE)
