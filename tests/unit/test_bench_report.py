import base64
import csv
import functools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from adaptivespec.bench import command, report
from adaptivespec.bench.report import write_report
from adaptivespec.bench.rows import Cell, Row, decode_speed, output_speed
from adaptivespec.bench.run import measure
from adaptivespec.bench.store import Store
from adaptivespec.bench.tables import best_static, geometric_means, percentile, quartiles, summarise
from adaptivespec.bench.terminal import results_tables
from tests.unit.bench_fakes import MEMORY, fresh_fake, plan

EVIL = '<script>alert("x")</script> & <b>'
NAMES = ["eagle3-3-1-4", "adaptive"]


def row(name: str, seconds: float, *, task="x", round_number=0, ids=(1, 2, 3), size=1, slot=0, **values) -> Row:
    """An answer whose first token comes after one second and the others after `seconds` more."""
    cell = Cell(0, task, size, 0, round_number, name)
    arrivals = [[1.0, 1], [1.0 + seconds, len(ids)]]
    return Row(cell, slot, 0.0, arrivals, list(ids), False, **values)


def measured(tmp_path, what) -> Store:
    store = Store.open(tmp_path / "out", what.settings(), {"processor": EVIL})
    for number, seconds in enumerate((1.0, 2.0, 0.5)):
        for task in what.tasks:
            ours = {"verify_steps": 2, "accepted": 1, "shape_steps": {"(1,1,2)": 1, "(3,1,4)": 1}}
            ours |= {"shapes": ["(3,1,4)", "(1,1,2)"], "split_gap": 0.125 * number}
            store.append([row("plain", 2.0, task=task, round_number=number)])
            store.append([row("adaptive", seconds, task=task, round_number=number, ids=(1, 2, 9, 9), **ours)])
    store.servers = {"adaptive": {"command": f"launch {EVIL}", "adaptive": {"policy": "talon"}, "shapes": "(1,1,2)"}}
    store.servers["adaptive"] |= {"memory_gb": MEMORY, "resident_mib": 1234}
    return store


def test_speeds_of_a_batch():
    rows = [row("plain", 2.0, size=2), row("plain", 4.0, size=2, slot=1)]
    assert decode_speed(rows) == 4 / 4.0
    assert output_speed(rows) == 6 / 5.0
    cell = Cell(0, "x", 2, 0, 0, "adaptive")
    first = Row(cell, 0, 0.0, [[1.0, 1], [2.0, 4], [3.5, 6], [4.0, 8]], list(range(8)), False)
    waited = Row(cell, 1, 0.0, [[3.0, 1], [5.0, 3]], [1, 2, 3], False)
    assert decode_speed([first, waited]) == (4 + 2) / 2.0, "what came while the other was prefilled does not count"
    assert decode_speed([first, Row(cell, 1, 0.0, [[4.0, 1]], [1], False)]) is None
    assert decode_speed([row("plain", 0.0, ids=(1,))]) is None
    early = Row(Cell(0, "x", 1, 0, 0, "adaptive"), 0, 0.5, [[1.0, 3], [2.0, 5]], [1, 2, 3, 4, 5], False)
    assert decode_speed([early]) == 2.0, "three tokens that came with the first event took no time that is measured"


def test_tokens_that_arrive_together_share_the_time():
    cell = Cell(0, "x", 1, 0, 0, "adaptive")
    found = Row(cell, 0, 0.5, [[1.0, 1], [1.6, 4], [2.0, 5]], [1, 2, 3, 4, 5], False)
    assert list(found.inter_token()) == pytest.approx([0.2, 0.2, 0.2, 0.4])
    assert found.ttft == 0.5
    assert Row.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_draft_calls_are_the_depth_of_every_step():
    assert row("adaptive", 1, verify_steps=5, shape_steps={"(3,4,4)": 2, "(7,1,8)": 3}).draft_calls == 27
    assert row("sglang-adaptive", 1, verify_steps=5).draft_calls is None
    assert row("plain", 1).draft_calls == 0


def test_a_summary_is_against_plain_of_the_same_turn(tmp_path):
    found = {
        (item.configuration, item.task): item for item in summarise(measured(tmp_path, plan(NAMES)), ["plain", *NAMES])
    }
    assert set(found) == {(name, task) for name in ("plain", "adaptive") for task in "xy"}
    ours, plain = found["adaptive", "x"], found["plain", "x"]
    # plain: 2 tokens in 2 s; ours 3 in 1, 2 and 0.5 s
    assert (ours.ratio, ours.ratio_min, ours.ratio_max, ours.num_turns) == (3.0, 1.5, 6.0, 3)
    assert (ours.ratio_q1, ours.ratio_q3) == (2.25, 4.5)
    assert ours.output_ratio == 2.0
    assert (ours.accept_length, ours.verify_steps, ours.draft_calls) == (2.0, 2, 4)
    assert (ours.num_identical, ours.num_answers, ours.agreement) == (0, 3, 0.5)
    assert ours.length_ratio == pytest.approx(4 / 3)
    assert ours.ttft_p50 == 1.0
    assert (plain.ratio, plain.num_identical, plain.accept_length) == (1.0, 3, None)


def test_the_geometric_mean_needs_every_task(tmp_path):
    what = plan(NAMES)
    store = measured(tmp_path, what)
    means = geometric_means(summarise(store, ["plain", *NAMES]))
    assert means == {1: {"plain": 1.0, "adaptive": 3.0}}
    assert best_static(means[1], what.configurations) is None
    store.append([row("eagle3-3-1-4", 1.0)])
    assert "eagle3-3-1-4" not in geometric_means(summarise(store, ["plain", *NAMES]))[1]
    store.append([row("eagle3-3-1-4", 1.0, task="y")])
    means = geometric_means(summarise(store, ["plain", *NAMES]))
    assert best_static(means[1], what.configurations) == "eagle3-3-1-4"


def written(what, store, problem: str):
    summaries = summarise(store, ["plain", *NAMES])
    return write_report(what, store, summaries, {"target": EVIL}, problem, lambda ids: f"said {ids} {EVIL}")


@pytest.mark.parametrize("width", [80, 140])
def test_the_terminal_table_names_every_decoder(tmp_path, width):
    console = Console(width=width)
    (table,) = results_tables(summarise(measured(tmp_path, plan(NAMES)), ["plain", *NAMES]))
    with console.capture() as capture:
        console.print(table)
    text = capture.get()
    assert all(word in text for word in ("plain", "adaptive", "3.00x, 2.00", "2.25-4.50", "mean", "0/6", "0.250"))


@settings(max_examples=30)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.integers(1, 100))
def test_percentiles_and_quartiles_lie_among_the_values(values, percent):
    assert percentile(values, percent) in values
    assert sum(value <= percentile(values, percent) for value in values) >= len(values) * percent / 100
    q1, middle, q3 = quartiles(values)
    assert min(values) <= q1 <= middle <= q3 <= max(values)


def test_the_report_is_one_file_with_everything(tmp_path):
    what = plan(NAMES)
    path, line = written(what, measured(tmp_path, what), f"{EVIL}.")
    html = " ".join(path.read_text("utf-8").split())
    assert 'name="viewport"' in html
    pictures = [item.stem for item in path.parent.glob("*.png")]
    assert sorted(pictures) == ["accept_length-1", "latency-1", "shapes-1", "shapes_over_time", "speed-1"]
    pngs = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    assert len(pngs) == 5
    assert all(base64.b64decode(each).startswith(b"\x89PNG") for each in pngs)
    assert not re.findall(r'(?:src|href)="(?!data:)', html)
    assert "<script>" not in html
    assert "<strong>adaptive 3.00x</strong> the speed of plain decoding" in html
    assert "4 tokens, others than plain decoding&#39;s from adaptive" in html
    assert "said [1, 2, 9, 9] &lt;script&gt;" in html
    assert "Not complete." in html
    assert "12 of 24 cells" in html
    assert "2.25-4.50, n=3<br>1.50-6.00" in html
    assert "ties within 0.250" in html
    assert "1234 MiB resident" in html
    assert line["complete"] is False
    assert line["geometric_mean"] == {"1": {"plain": 1.0, "adaptive": 3.0}}
    with (path.parent / "results.csv").open() as table:
        assert len(list(csv.DictReader(table))) == 4
    assert len(json.loads((path.parent / "results.json").read_text())["summaries"]) == 4


def test_a_report_of_nothing(tmp_path):
    what = plan(NAMES)
    store = Store.open(tmp_path / "out", what.settings(), {"date": "today"})
    path, line = written(what, store, "it was interrupted.")
    assert "Nothing was measured." in path.read_text()
    assert (line["cells"]["measured"], line["ratios"], line["geometric_mean"]) == (0, [], {})


# -- the command


@pytest.fixture
def fake(monkeypatch):
    """The servers that the command starts."""
    made = fresh_fake()
    monkeypatch.setattr("adaptivespec.launch.DYING_SECONDS", 0)
    monkeypatch.setattr(command, "measure", functools.partial(measure, make_server=made))
    monkeypatch.setattr(report, "figures", lambda store, summaries: {})  # they have a test of their own
    return made


def run(tmp_path, capsys) -> tuple[int, dict, str]:
    what = plan()
    store = Store.open(tmp_path / "out", what.settings(), {"date": "today"})
    code = command.run(what, store, command.Words({"target": "T"}, str))
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]), err


def test_the_last_line_is_json(fake, tmp_path, capsys):
    code, line, _ = run(tmp_path, capsys)
    assert (code, line["complete"], line["cells"]) == (0, True, {"measured": 16, "planned": 16})
    assert {item["configuration"] for item in line["ratios"]} == {"plain", "adaptive"}


def test_an_interruption_leaves_a_partial_report(fake, tmp_path, capsys):
    stream = fake.stream

    def interrupted(self, path, body, timeout):
        if len(self.order) == 6:
            raise KeyboardInterrupt
        yield from stream(self, path, body, timeout)

    fake.stream = interrupted
    code, line, _ = run(tmp_path, capsys)
    assert (code, line["complete"], line["problem"]) == (130, False, "it was interrupted.")
    assert line["cells"]["measured"] == 4
    assert "4 of 16 cells" in (tmp_path / "out" / "report.html").read_text()
    assert fake.alive == []
    fake.stream = stream
    assert run(tmp_path, capsys)[:2][1]["complete"] is True


def test_a_dead_server_leaves_a_partial_report(fake, tmp_path, capsys):
    fake.dies_after = 6
    code, line, err = run(tmp_path, capsys)
    assert (code, line["complete"]) == (1, False)
    assert "ended with code 137" in line["problem"]
    assert "last words" in err


def test_no_room_for_a_log(fake, tmp_path, capsys):
    def start(self):
        raise OSError(28, "No space left on device", "plain.log")

    fake.start = start
    code, line, err = run(tmp_path, capsys)
    assert (code, line["complete"]) == (1, False)
    assert "found [Errno 28] No space left on device: 'plain.log'; expected to be able to write there; fix:" in err
    assert (tmp_path / "out" / "report.html").exists()


def test_no_room_for_the_report(fake, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "write_report", full)
    code, line, err = run(tmp_path, capsys)
    assert (code, line["report"]) == (1, None)
    assert "found No space left on device; expected to write the report; fix: free some space" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--prompts", "x=nowhere.jsonl"],
            "nowhere.jsonl: found No such file or directory; expected a file of JSON lines",
        ),
        (["--prompts", "x={good}", "--num-prompts", "9"], "found 1 rows after row 0; expected 9"),
        (["--prompts", "x={bad}", "--num-prompts", "1"], "expected a JSON object a line"),
        (["--prompts", "x={good}", "--prompts", "x={good}"], "expected each name once"),
        (["--prompts", "x={good}", "--num-prompts", "1", "--grade"], "--grade: found nothing to grade by"),
        (
            ["--prompts", "x={good}", "--num-prompts", "1", "--configurations", "eagle"],
            "expected plain, eagle3-default",
        ),
        (
            ["--prompts", "x={good}", "--num-prompts", "1", "--target", "/no/such/model"],
            "--target: found no config.json in /no/such/model",
        ),
        (
            ["--prompts", "x={good}", "--num-prompts", "1", "--draft", "./nothing"],
            "--draft: found no config.json in ./nothing",
        ),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_starts(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("adaptivespec.command_line.end_on_sigterm", lambda: None)
    (tmp_path / "good.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "bad.jsonl").write_text("{\n")
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("good", "bad")}
    out = tmp_path / "out"
    assert command.main([text.format(**files) for text in arguments] + ["--out", str(out)]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_arguments_after_two_dashes_go_to_every_server():
    options = command.parse(
        ["--prompts", "x=f", "--configurations", "adaptive", "talon", "--", "--mem-fraction", "0.2"]
    )
    assert options.configurations == ["adaptive", "talon"]
    assert options.server_args == ["--mem-fraction", "0.2"]
