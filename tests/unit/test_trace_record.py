"""`adaptivespec.tracelab.record` and the trace that it makes: what is recorded is what the server does, and is kept."""

import json
from statistics import median

import pytest

from adaptivespec.bench.configurations import parse_configurations
from adaptivespec.bench.rows import Cell, Row
from adaptivespec.bench.run import MeasureError
from adaptivespec.bench.store import Store, StoreError
from adaptivespec.launch import ServerFailedError
from adaptivespec.tracelab import timing
from adaptivespec.tracelab.command import make_trace
from adaptivespec.tracelab.record import SERVER_NAME, STEPS_NAME
from adaptivespec.tracelab.report import check
from adaptivespec.tracelab.trace import Trace, TraceError
from tests.unit.bench_fakes import plan
from tests.unit.trace_fakes import ANSWER, C1, C2, C3, NUM_TOKENS, TREE, accepted, fresh_trace_fake, top1_prob

NAMES = ("adaptive-static-1-1-2", "adaptive-static-3-1-4", "adaptive-static-3-4-4", "adaptive-static-2-1-3")
NUM_LIVE = 4 * 4  # answers, shapes
NUM_STEPS = 4 * 2 * (NUM_TOKENS - 1)  # answers, shapes that are asked at every root


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr("adaptivespec.launch.DYING_SECONDS", 0)


def make(fake, tmp_path, parallel: int = 3, **changes) -> Trace:
    what = plan(NAMES, **{"max_new_tokens": NUM_TOKENS, "num_beside": 1, **changes})
    store = Store.open(tmp_path / "out", what.settings(), {"date": "today"})
    try:
        return make_trace(what, store, parallel, fake)
    finally:
        assert fake.alive == [], "a server was left running"


def test_a_trace_holds_what_the_server_does(tmp_path):
    fake = fresh_trace_fake()
    found = make(fake, tmp_path)
    prompts = {("x", 0): 1, ("x", 1): 2, ("y", 0): 3, ("y", 1): 4}
    assert {(answer.prompt_set, answer.prompt) for answer in found.answers} == set(prompts)
    for answer in found.answers:
        prompt, roots = prompts[answer.prompt_set, answer.prompt], range(NUM_TOKENS - 1)
        assert answer.token_ids == ANSWER[:NUM_TOKENS]
        assert answer.accepted == {shape: [accepted(prompt, root, shape) for root in roots] for shape in (C3, TREE)}
        assert answer.top1_probs == [top1_prob(prompt, root) for root in roots]
        assert set(answer.live) == {C1, C2, C3, TREE}
    assert fake.one_step == NUM_STEPS
    assert (found.device, found.lag) == ("cpu", 0)
    assert check(found) == {"compared": 16, "same_steps": 16, "other_answer": 0, "roots": NUM_STEPS, "strayed": 0}


def test_costs_are_medians_of_the_timed_answers(tmp_path):
    found = make(fresh_trace_fake(), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "out" / "requests.jsonl").read_text().splitlines()]

    def times(name: str) -> list[float]:
        mine = [line for line in lines if line["configuration"] == name and line["round"] == 0]
        spans = [(line["arrivals"][-1][0] - line["arrivals"][0][0], line["verify_steps"] or 11) for line in mine]
        return [1000 * seconds / number for seconds, number in spans]

    assert found.plain_ms == pytest.approx(median(times("plain")))
    assert list(found.step_ms) == [C1, C3, TREE, C2]
    assert found.step_ms[C3] == pytest.approx(median(times("adaptive-static-3-1-4")))
    assert len(times("plain")) == 4, "those of the even rounds"
    assert {name: set(by) for name, by in found.live.items()} == {"x": set(found.step_ms), "y": set(found.step_ms)}


def test_live_speeds_are_of_other_rounds_than_the_costs(tmp_path):
    (shape,) = parse_configurations(["adaptive-static-1-1-2"], "DRAFT")[1:]
    store = Store.open(tmp_path / "out", {}, {})
    for number, seconds in enumerate((2.0, 8.0, 2.0, 8.0)):
        for name, took in (("plain", 4.0), (shape.name, seconds)):
            cell = Cell(0, "x", 1, 0, number, name)
            store.append([Row(cell, 0, 0.0, [[1.0, 1], [1.0 + took, 5]], [1] * 5, True, verify_steps=2)])
    assert timing.plain_ms(store) == 1000
    assert timing.step_ms(store, [shape]) == {C1: 1000}
    assert timing.live_ratios(store, [shape]) == {"x": {C1: 0.5}}


def test_only_the_recording_server_has_a_prefix_cache(tmp_path):
    make(fresh_trace_fake(), tmp_path)
    servers = json.loads((tmp_path / "out" / "run.json").read_text())["servers"]
    assert "--disable-radix-cache" in servers["plain"]["command"]
    assert "--disable-radix-cache" in servers[NAMES[0]]["command"]
    assert "--disable-radix-cache" not in servers[SERVER_NAME]["command"]
    assert "--extra" in servers[SERVER_NAME]["command"]


def test_recording_goes_on_where_it_stopped_and_loses_one_answer_at_most(tmp_path):
    timed = 5 * (1 + 4 * 2)  # warm-up, then prompts and rounds, of five decoders
    broken = fresh_trace_fake(dies_after=timed + 50)
    with pytest.raises(ServerFailedError, match="recording server"):
        make(broken, tmp_path)
    path = tmp_path / "out" / STEPS_NAME
    kept = path.read_text()
    assert kept.endswith("\n")
    assert kept.count("\n") >= 6
    path.write_text(kept + '{"prompt_set": "cut')
    fake = fresh_trace_fake()
    found = make(fake, tmp_path)
    assert path.read_text().startswith(kept)
    assert path.read_text().count("\n") == NUM_LIVE
    assert [name for name, _ in fake.order] == ["recording"] * len(fake.order)  # nothing is timed again
    assert NUM_STEPS - broken.one_step <= fake.one_step < NUM_STEPS
    again = fresh_trace_fake()
    assert make(again, tmp_path).answers == found.answers
    assert again.order == []


def test_another_answer_and_strayed_roots_are_counted(tmp_path):
    found = make(fresh_trace_fake(strays="(3,4,4)"), tmp_path)
    assert [answer.live[TREE] for answer in found.answers] == [None] * 4
    assert {answer.num_strayed for answer in found.answers} == {NUM_TOKENS - 1}
    assert check(found) == {
        "compared": 12,
        "same_steps": 12,
        "other_answer": 4,
        "roots": NUM_STEPS,
        "strayed": NUM_STEPS // 2,
    }


def test_a_server_that_runs_another_shape_is_found(tmp_path, monkeypatch):
    fake = fresh_trace_fake()
    monkeypatch.setattr(fake, "_steps", lambda self, body: [["(1,1,2)", 0, 0.5]] * 3)
    with pytest.raises(
        MeasureError, match=r"pinned to \(3,1,4\): found steps of \(1,1,2\); expected .* lower --parallel"
    ):
        make(fake, tmp_path)


def test_a_foreign_file_of_steps_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / STEPS_NAME).write_text('{"a": 1}\n')
    with pytest.raises(StoreError, match="a line that is no recorded step"):
        make(fresh_trace_fake(), tmp_path)


def test_answers_of_one_token_take_no_step(tmp_path):
    with pytest.raises(TraceError, match="found no answer of two tokens or more"):
        make(fresh_trace_fake(), tmp_path, max_new_tokens=1)
