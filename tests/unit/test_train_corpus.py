"""Corpus reading, the held-out split and the draft vocabulary."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.draft_training.corpus import CorpusError, Row, count_draft_vocab, load_rows, split_rows


class WordTokenizer:
    """Two tokens of chat template, then one per word."""

    def apply_chat_template(self, chat: list[dict[str, str]], **kwargs: Any) -> str:
        return "<s> <user> " + chat[0]["content"]

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


def write(path: Path, lines: list[str]) -> Path:
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as stream:
        stream.write("\n".join(lines) + "\n")
    return path


def line(prompt: str = "hello you", ids: Any = (0, 1, 2, 3, 4, 5, 6, 7, 8), greedy: Any = True) -> str:
    return json.dumps({"prompt": prompt, "ids": ids, "greedy": greedy})


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.jsonl.gz"])
def test_rows_keep_their_order_and_short_answers_are_left_out(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [line("a"), line("bb", ids=[1, 2, 3]), line("ccc dd", greedy=False)])
    rows = load_rows(path, WordTokenizer())
    assert rows == [Row((3, 6, 1), tuple(range(9)), True), Row((3, 6, 3, 2), tuple(range(9)), False)]
    assert len(rows[1]) == len(rows[1].token_ids) == 13


@pytest.mark.parametrize("bad", ["not json", "[]", '{"prompt": "a", "ids": [1]}', line(ids="text"), line(greedy="yes")])
def test_a_bad_line_is_named_by_number(tmp_path: Path, bad: str) -> None:
    path = write(tmp_path / "corpus.jsonl", [line(), bad])
    with pytest.raises(CorpusError, match=r"corpus line 2: found .*; expected .*; fix: correct or remove that line"):
        load_rows(path, WordTokenizer())


def test_an_absent_file_is_an_error_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"found no file .*; fix: pass --corpus PATH"):
        load_rows(tmp_path / "none.jsonl", WordTokenizer())


few_ids = st.lists(st.integers(0, 2), min_size=1, max_size=2).map(tuple)
some_rows = st.lists(st.builds(Row, few_ids, few_ids, st.booleans()), min_size=2, max_size=30)


@given(rows=some_rows, data=st.data(), seed=st.integers(0, 99))
def test_nothing_held_out_is_trained_on_not_even_as_a_duplicate(
    rows: list[Row], data: st.DataObject, seed: int
) -> None:
    num_held_out = data.draw(st.integers(1, len(rows) - 1))
    train, held_out = split_rows(rows, num_held_out, seed)
    assert len(set(held_out)) == num_held_out
    assert not {rows[i].prompt_ids for i in train} & {rows[i].prompt_ids for i in held_out}
    assert not {rows[i].answer_ids for i in train} & {rows[i].answer_ids for i in held_out}
    assert (train, held_out) == split_rows(rows, num_held_out, seed)


def test_distinct_rows_are_all_used_and_the_seed_matters() -> None:
    rows = [Row((i,), (i, 50), True) for i in range(50)]
    train, held_out = split_rows(rows, 10, seed=0)
    assert sorted(train + held_out) == list(range(50))
    assert held_out != split_rows(rows, 10, seed=1)[1]


@pytest.mark.parametrize("num_held_out", [0, 2, 3])
def test_a_split_without_two_sides_is_refused(num_held_out: int) -> None:
    with pytest.raises(CorpusError, match=f"held-out rows: found {num_held_out} of 2 rows"):
        split_rows([Row((1,), (1,), True), Row((2,), (2,), True)], num_held_out, seed=0)


def test_draft_vocabulary_is_the_most_frequent_answer_tokens_in_ascending_order() -> None:
    rows = [Row((0, 0, 0), (7, 7, 7, 3, 3, 5), True), Row((0,), (9, 3, 1, 7), False)]
    ids, coverage = count_draft_vocab(rows, vocab_size=10, draft_vocab_size=3)
    assert ids.tolist() == [1, 3, 7]  # 1, 5 and 9 are seen once each: the smallest wins
    assert coverage == pytest.approx(8 / 10)
    assert ids.dtype == torch.int64
