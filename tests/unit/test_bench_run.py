import errno
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from adaptivespec.bench.run import MeasureError, measure
from adaptivespec.bench.store import ROWS_NAME, Store, StoreError
from adaptivespec.errors import ConfigError
from adaptivespec.launch import ServerFailedError
from tests.unit.bench_fakes import NUM_TOKENS, Silent, fresh_fake, plan


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr("adaptivespec.launch.DYING_SECONDS", 0)
    return fresh_fake()


def opened(what, tmp_path) -> Store:
    return Store.open(tmp_path / "out", what.settings(), {"date": "today"})


def run(fake, what, tmp_path) -> tuple[Store, Silent]:
    store, progress = opened(what, tmp_path), Silent()
    try:
        measure(what, store, progress, make_server=fake)
    finally:
        assert fake.alive == [], "a server was left running"
    return store, progress


def lines(store: Store) -> list[dict]:
    return [json.loads(line) for line in (store.out / ROWS_NAME).read_text().splitlines()]


def test_every_cell_is_measured_and_kept(fake, tmp_path):
    what = plan(["eagle3-default", "adaptive"])
    store, progress = run(fake, what, tmp_path)
    assert what.num_cells == progress.num_done == len(store.cells) == len(lines(store)) == 3 * 4 * 2
    rows = {row["configuration"]: row for row in lines(store)}
    assert rows["plain"]["shape_steps"] is None
    assert rows["eagle3-default"]["shape_steps"] == {"(3,1,4)": 2}
    assert rows["adaptive"]["shape_steps"] == {"(1,1,2)": 1, "(3,1,4)": 1}
    assert rows["adaptive"]["shapes"] == ["(3,1,4)", "(1,1,2)"]
    assert rows["eagle3-default"]["shapes"] is None
    assert rows["adaptive"]["promoted"] == 1
    (first, one), (last, four) = rows["plain"]["arrivals"]  # an event without a new token is no arrival
    assert (one, four) == (1, NUM_TOKENS)
    assert rows["plain"]["sent"] <= first <= last
    assert store.servers["adaptive"]["resident_mib"] == 3
    assert "--extra" in store.servers["plain"]["command"]


def test_decoders_take_turns_and_the_first_place_goes_round(fake, tmp_path):
    what = plan(["eagle3-default"])
    run(fake, what, tmp_path)
    names = [name for name, _ in fake.order]
    assert names[:2] == ["plain", "eagle3-default"]  # warm-up
    turns = [names[start : start + 2] for start in range(2, len(names), 2)]
    assert all(set(turn) == {"plain", "eagle3-default"} for turn in turns)
    first = Counter((turn[0].task, turn[0].configuration) for turn in what.turns(0))
    assert set(first.values()) == {2}  # with each task
    assert [turn[0].configuration for turn in what.turns(0)] == [turn[0] for turn in turns]


def test_a_memory_is_told_the_task_as_its_tenant(fake, tmp_path):
    store, _ = run(fake, plan(["adaptive+drift", "adaptive+drift=off"], rounds=1), tmp_path)
    assert fake.starts == ["plain", "adaptive-drift"]  # one server for both
    assert store.servers["adaptive+drift=off"]["settings"] == {"drift": False}
    told = [(prompt, params["adaptive"]) for name, prompt, params in fake.asked[3:] if name == "adaptive-drift"]
    with_memory = [(prompt, options["tenant"]) for prompt, options in told if "tenant" in options]
    without = [prompt for prompt, options in told if options.get("drift") is False]
    assert sorted(with_memory) == [(1, "x"), (2, "x"), (3, "y"), (4, "y")]
    assert sorted(without) == [1, 2, 3, 4]
    assert len(told) == 8


def test_where_a_strict_answer_parts_from_plains_plain_is_asked_how_near_a_tie_that_was(fake, tmp_path):
    stream, post = fake.stream, fake.post

    def differs(self, path, body, timeout):
        *early, last = stream(self, path, body, timeout)
        if "ADAPTIVE" in self.args and body["input_ids"] == [3]:
            last = last | {"output_ids": [1, 2, 9, 4]}
        yield from (*early, last)

    def gaps(self, path, body, **kwargs):
        if path != "/generate":
            return post(self, path, body)
        assert self.log.stem == "plain"
        assert body["input_ids"] == [3, 1, 2]  # the prompt, and what both answers begin with
        return {"meta_info": {"output_top_logprobs": [[[-0.5, 3, None], [-0.75, 9, None]]]}}

    fake.stream, fake.post = differs, gaps
    store, _ = run(fake, plan(["adaptive", "adaptive+kappa=0.5"], rounds=1, asks_gaps=True), tmp_path)
    found = {(row.cell.configuration, row.cell.task, row.prompt): row.split_gap for (row,) in store.cells.values()}
    assert {key: gap for key, gap in found.items() if gap is not None} == {("adaptive", "y", 0): 0.25}
    assert opened(plan(["adaptive", "adaptive+kappa=0.5"], rounds=1), tmp_path).cells == store.cells


def test_a_run_begun_anew_drops_its_own_kind_only(fake, tmp_path):
    run(fake, plan(), tmp_path)
    other = plan(tasks={"other": [[1], [2]]}).settings()
    with pytest.raises(StoreError, match="found a run with tasks"):
        Store.open(tmp_path / "out", other, {"date": "today"}, anew=True)
    assert len(opened(plan(), tmp_path).cells) == 16
    again = Store.open(tmp_path / "out", plan(rounds=3).settings(), {"date": "today"}, anew=True)
    assert (again.cells, len(again.sessions)) == ({}, 1)
    assert not (again.out / ROWS_NAME).exists()


def test_a_folder_in_which_another_run_is_at_work_is_refused(tmp_path):
    script = (
        "import fcntl, sys, time\n"
        "file = open(sys.argv[1], 'a')\nfcntl.lockf(file, fcntl.LOCK_EX)\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    opened(plan(), tmp_path)
    lock = tmp_path / "out" / "run.lock"
    with subprocess.Popen([sys.executable, "-c", script, str(lock)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(
                StoreError, match="found another run at work in it; expected none; fix: wait for its end"
            ):
                opened(plan(), tmp_path)
        finally:
            other.kill()
    opened(plan(), tmp_path)


def test_a_batch_is_sent_at_once_and_batch_sizes_take_turns(fake, tmp_path):
    store, _ = run(fake, plan(batch_sizes=[1, 2], rounds=1), tmp_path)
    assert sorted({cell.batch_size for cell in store.cells}) == [1, 2]
    assert all(len(rows) == cell.batch_size for cell, rows in store.cells.items())
    assert len(store.cells) == 2 * (4 + 2)
    with pytest.raises(ConfigError, match="found 3 with 2 prompts of x; expected a divisor"):
        plan(batch_sizes=[3])


def test_blocks_have_plain_decoding_each(fake, tmp_path):
    what = plan(["eagle3-default", "adaptive", "talon"], num_beside=2)
    assert [[item.slug for item in block] for block in what.blocks()] == [
        ["plain", "eagle3-default", "adaptive"],
        ["plain", "talon"],
    ]
    store, _ = run(fake, what, tmp_path)
    assert {cell.block for cell in store.cells if cell.configuration == "plain"} == {0, 1}
    assert fake.starts.count("plain") == 1  # on one server


def test_static_shapes_are_pinned_on_one_server(fake, tmp_path):
    store, _ = run(fake, plan(["adaptive-static-3-1-4", "adaptive-static-5-1-6"]), tmp_path)
    assert {pinned for name, pinned in fake.order if name != "plain"} == {1, 2}
    config = json.loads((store.out / "configs" / "adaptive-static-3-1-4.json").read_text())
    assert config == {"policy": "static", "shape": {"start": [3, 1, 4], "extra": [[5, 1, 6]]}}


def test_an_upstream_that_falls_back_to_a_static_shape_is_an_error(fake, tmp_path):
    run(fake, plan(["sglang-adaptive"]), tmp_path)
    fake.falls_back = True
    with pytest.raises(MeasureError, match="SGLang fell back to a static shape"):
        run(fake, plan(["sglang-adaptive"]), tmp_path / "again")


def test_a_dead_server_keeps_what_was_measured_and_the_run_goes_on_there(fake, tmp_path):
    fake.dies_after = 2 + 5  # the warm-up, two turns, and plain in the third
    with pytest.raises(ServerFailedError, match=r"ended with code 137; expected .*; fix: read .*\.log"):
        run(fake, plan(), tmp_path)
    assert len(lines(opened(plan(), tmp_path))) == 5
    fake.dies_after, fake.order[:] = 10**9, []
    store, progress = run(fake, plan(), tmp_path)
    assert progress.num_done == 16
    assert len(fake.order) == 2 + 16 - 4  # the turn that was cut is measured again, plain and all
    assert len(store.cells) == 16
    assert len(store.sessions) == 3
    fake.order.clear()
    run(fake, plan(), tmp_path)
    assert fake.order == []  # nothing is left to do, so no server starts


def test_a_pass_begins_with_an_empty_memory_also_after_an_interruption(fake, tmp_path):
    what = plan(["adaptive+drift"])
    fake.dies_after = 2 + 1 + 8 + 1 + 3  # the warm-up, a pass, and in the second the reset and three answers
    with pytest.raises(ServerFailedError):
        run(fake, what, tmp_path)
    fake.dies_after, fake.order[:] = 10**9, []
    store, progress = run(fake, what, tmp_path)
    assert progress.num_done == len(store.cells) == 16
    assert [pinned for _, pinned in fake.order] == [None] * 2 + ["reset"] + [None] * 8


def test_other_settings_are_refused_by_name(fake, tmp_path):
    run(fake, plan(), tmp_path)
    with pytest.raises(StoreError, match=r"found a run with rounds 2; expected rounds 3; fix: give the same arguments"):
        opened(plan(rounds=3), tmp_path)
    with pytest.raises(StoreError, match="found a run with tasks"):
        opened(plan(tasks={"x": [[1], [9]], "y": [[3], [4]]}), tmp_path)


def test_a_line_that_was_cut_is_dropped(fake, tmp_path):
    store, _ = run(fake, plan(), tmp_path)
    path = store.out / ROWS_NAME
    path.write_bytes(path.read_bytes()[:-5])
    assert len(opened(plan(), tmp_path).cells) == 15
    assert path.read_bytes().endswith(b"\n")
    batched = path.read_text().replace('"batch_size": 1', '"batch_size": 2')
    path.write_text(batched)  # as if every second row of a batch had been cut
    assert opened(plan(), tmp_path).cells == {}
    path.write_text('{"block": 0}\n')
    with pytest.raises(StoreError, match="a line that is no row"):
        opened(plan(), tmp_path)


def test_a_full_disk_is_said_and_keeps_what_was_measured(fake, tmp_path, monkeypatch):
    store = opened(plan(), tmp_path)
    open_path = Path.open

    def full(self, mode="r", **kwargs):
        if self.name == ROWS_NAME and mode == "a" and len(store.cells) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_path(self, mode, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(
            StoreError, match=r"requests\.jsonl: found No space left on device; .* fix: free some space"
        ):
            measure(plan(), store, Silent(), make_server=fake)
    assert fake.alive == []
    assert len(opened(plan(), tmp_path).cells) == 3


def test_a_wrong_folder(tmp_path):
    (tmp_path / "out").write_text("a file")
    with pytest.raises(StoreError, match="out: found File exists; expected to be able to write there"):
        opened(plan(), tmp_path)


def test_a_run_file_of_something_else(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text("[]")
    with pytest.raises(StoreError, match=r"run\.json: found what is no run"):
        opened(plan(), tmp_path)


def test_rows_of_an_unknown_run_are_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ROWS_NAME).touch()
    with pytest.raises(StoreError, match=r"found requests\.jsonl without run\.json"):
        opened(plan(), tmp_path)


def test_an_incremental_stream_is_an_error(fake, tmp_path):
    def stream(self, path, body, timeout):
        yield {"meta_info": {"completion_tokens": 1, "finish_reason": None}, "output_ids": [1]}
        yield {"meta_info": {"completion_tokens": 2, "finish_reason": {"type": "length"}}, "output_ids": [2]}

    fake.stream = stream
    with pytest.raises(MeasureError, match="expected a whole answer"):
        run(fake, plan(), tmp_path)


def test_an_aborted_answer_is_an_error(fake, tmp_path):
    def stream(self, path, body, timeout):
        yield {"meta_info": {"completion_tokens": 1, "finish_reason": {"type": "abort"}}, "output_ids": [1]}

    fake.stream = stream
    with pytest.raises(MeasureError, match=r"ended with \{'type': 'abort'\}"):
        run(fake, plan(), tmp_path)
