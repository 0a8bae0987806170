"""`scripts/replay.py`: its two commands from the command line, and what they say."""

import json

import pytest

from adaptivespec.shapes import TreeShape
from adaptivespec.tracelab import command
from adaptivespec.tracelab.report import HINDSIGHT, agreement, objections, rankings, replay_all
from tests.unit.bench_fakes import plan
from tests.unit.trace_fakes import C1, NUM_TOKENS, TREE, fresh_trace_fake, trace, traced


def test_run_replays_everything_that_is_asked(tmp_path, capsys):
    path = tmp_path / "trace.json"
    trace().save(path)
    config = tmp_path / "eager.json"
    config.write_text(json.dumps({"dcs": {"divisor": 0.1}, "shape": {"range": {"low": [1, 1, 2], "high": [3, 1, 4]}}}))
    argv = ["run", "--trace", str(path), "--policy", "dcs", "talon", "--range", "1-1-2:3-1-4", "1-1-2:2-1-3"]
    assert command.main([*argv, "--config", str(config)]) == 1, "its live speeds are made up"
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = line["rows"]
    statics = [f"static {shape}" for shape in trace().step_ms]
    policies = ["dcs 1-1-2:3-1-4", "talon 1-1-2:3-1-4", "dcs 1-1-2:2-1-3", "talon 1-1-2:2-1-3", str(config)]
    assert list(rows) == [HINDSIGHT, *statics, *policies]
    for row in rows.values():
        assert row["of_hindsight_best"] <= 1
        assert set(row["tokens_per_s"]) == {"x", "y"}
        assert sum(row["shape_share"].values()) == pytest.approx(1, abs=0.01)
    # Among chains talon takes the deepest.
    assert rows["talon 1-1-2:3-1-4"] == rows["static (3,1,4)"]
    assert rows[line["best_static"]]["of_best_static"] == 1
    assert line["cost_ms"] == {"plain": 50, "(1,1,2)": 60, "(2,1,3)": 70, "(3,1,4)": 80, "(3,4,4)": 90}
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "replay.json").read_text())
    assert written["rows"] == rows
    assert "date" in written["provenance"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--range", "paper"], "dcs paper: found a trace without (4,4,5)"),
        ([], "dcs short: found a trace without (4,1,5)"),
        (["--range", "1-1-2:"], "--range: found ''; expected three integers"),
        (["--config", "/no/such.json"], "/no/such.json: found No such file"),
        (["--trace", "/no/trace.json"], "/no/trace.json: found No such file"),
    ],
)
def test_what_cannot_be_replayed_ends_with_one_line(tmp_path, capsys, argv, message):
    path = tmp_path / "trace.json"
    trace().save(path)
    assert command.main(["run", "--trace", str(path), *argv]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


def test_record_makes_a_trace_that_run_replays(tmp_path, capsys, monkeypatch):
    asked = []

    def prepare(options):
        asked.append(options)
        changes = {"max_new_tokens": NUM_TOKENS, "batch_sizes": options.batch_sizes, "num_beside": options.beside}
        return plan(options.configurations, **changes), {}, None

    monkeypatch.setattr(command, "prepare", prepare)
    out = tmp_path / "out"
    options = command.parse(
        ["record", "--prompts", "x=x.jsonl", "--range", "1-1-2:3-1-4", "--shapes", "3-4-4", "1-1-2", "--out", str(out)]
    )
    assert command.command_record(options, fresh_trace_fake()) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["shapes"] == ["(3,4,4)", "(1,1,2)", "(2,1,3)", "(3,1,4)"]
    assert line["check"]["same_steps"] == line["check"]["compared"] == 16
    assert asked[0].grade is False
    exit_code = command.main(["run", "--trace", line["trace"], "--range", "1-1-2:3-1-4"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert exit_code == bool(line["objections"]), "how the fake's speeds rank is chance"
    assert "dcs 1-1-2:3-1-4" in line["rows"]


def test_record_needs_a_shape(capsys):
    assert command.main(["record", "--prompts", "x=x.jsonl"]) == 1
    assert capsys.readouterr().err.startswith("--shapes: found no shape; expected one at least")


def test_rankings_compare_replayed_with_live_by_set_and_over_all():
    what = trace()
    found = rankings(what, replay_all(what, {}))
    assert list(found) == ["x", "y", "all"]
    assert all(each["pairs"] == 6 for each in found.values())
    assert found["y"]["clear_pairs"] == 6


@pytest.mark.parametrize(
    ("compared", "same", "clear", "alike", "words"),
    [
        (16, 16, 10, 10, []),
        (0, 0, 10, 10, ["no live answer"]),
        (16, 15, 10, 10, ["only 15 of 16 live answers"]),
        (16, 16, 0, 0, ["record --rounds 2"]),
        (16, 16, 10, 9, ["only 9 of 10 clear pairs"]),
        (16, 0, 10, 0, ["only 0 of 16", "only 0 of 10"]),
    ],
)
def test_a_replay_that_does_not_agree_with_live_serving_says_so(compared, same, clear, alike, words):
    ranks = {"x": {"clear_pairs": 0, "clear_alike": 0}, "all": {"clear_pairs": clear, "clear_alike": alike}}
    found = objections({"compared": compared, "same_steps": same}, ranks)
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))


def test_agreement_counts_pairs_and_leaves_near_ties_out_of_the_clear_ones():
    found = agreement([1.0, 1.02, 1.5, 0.8], [1.1, 1.0, 2.0, 1.05])
    assert found == {"pairs": 6, "alike": 4, "clear_pairs": 5, "clear_alike": 4, "spearman": 0.4}
    assert agreement([1.0, 2.0, 3.0], [1.0, 4.0, 9.0])["spearman"] == 1.0
    assert agreement([1.0], [1.0])["spearman"] is None


def test_shapes_without_a_live_speed_are_not_ranked():
    what = trace(live={"x": {C1: 1.3}, "y": {C1: 1.2, TREE: 0.8}}, answers=[traced(0), traced(2, "y")])
    found = rankings(what, replay_all(what, {}))
    assert found["y"]["pairs"] == 0
    assert TreeShape(3, 4, 4) in what.live["y"]
