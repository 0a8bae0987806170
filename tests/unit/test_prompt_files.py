import json
from types import SimpleNamespace

import pytest

from adaptivespec.prompt_files import PromptFile, PromptFileError, chat_token_ids, check_lengths, rows_by_name


class PlainTokenizer:
    chat_template: str | None = None

    def encode(self, text, add_special_tokens=True):
        return [0] * add_special_tokens + [ord(char) for char in text]

    def apply_chat_template(self, turns, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return f"<{turns[0]['content']}>"


def test_prompts_take_the_chat_template_where_there_is_one():
    tokenizer = PlainTokenizer()
    assert chat_token_ids(tokenizer, ["a"]) == [[0, 97]]
    tokenizer.chat_template = "any"
    assert chat_token_ids(tokenizer, ["a"]) == [[60, 97, 62]]


def test_blank_lines_are_no_rows_and_rows_of_several_sets_go_by_name(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"question": "two"}\n\n', encoding="utf-8")
    found = rows_by_name([PromptFile("a", path), PromptFile("b", path)], 1, skip=1)
    assert {name: [row["text"] for row in rows] for name, rows in found.items()} == {"a": ["two"], "b": ["two"]}
    with pytest.raises(PromptFileError, match="--prompts: found a, a; expected each name once"):
        rows_by_name([PromptFile("a", path)] * 2, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found no rows"),
        (b"\n", "found no rows"),
        (b'{"prompt": "a"}\n{"prompt": \n', r"jsonl, line 2: found .*Expecting value"),
        (b'{"prompt": "a"}\n\xff\n', "expected a file of UTF-8"),
        (b'{"prompt": "a"}\n{"number": 3}\n', "jsonl, row 2: found"),
        (b'{"prompt": "a"}\n', "found 1 rows after row 0; expected 2"),
    ],
)
def test_a_file_that_does_not_do_names_its_place(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(PromptFileError, match=message):
        PromptFile("bad", path).rows(2)


def test_a_prompt_that_leaves_no_room_for_its_answer_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("short", "long", "short")))
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(max_position_embeddings=10))
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda target: config)
    sources, ids = [PromptFile("a", path)], {"a": [[1] * 4, [1] * 5]}
    check_lengths(sources, ids, skip=1, max_new_tokens=5, target="T")
    with pytest.raises(
        PromptFileError, match=r"a\.jsonl, row 3: found 5 tokens, with answers of 6; expected at most 10"
    ):
        check_lengths(sources, ids | {"a": [[1] * 4, [1] * 5]}, skip=1, max_new_tokens=6, target="T")
