"""`adaptivespec.tracelab.trace`: a trace survives its file, and what is none is refused by name."""

import json

import pytest

from adaptivespec.shapes import PRESETS, TreeShape
from adaptivespec.tracelab.trace import Trace, TraceError, covering, shapes_to_record
from tests.unit.trace_fakes import C1, C2, C3, TREE, trace, traced


def test_a_trace_survives_its_file(tmp_path):
    before = trace(answers=[traced(live={C1: [1, 0, 2], TREE: None}, num_strayed=2)])
    before.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == before


def test_the_longest_chain_stands_for_all_and_each_tree_for_itself():
    assert shapes_to_record([C1, TREE, C3, C2, C1, TreeShape(3, 4, 8)]) == [TREE, C3, TreeShape(3, 4, 8)]
    assert covering([C3, TREE], C1) == C3
    assert covering([C3, TREE], TREE) == TREE
    assert covering([C1, TREE], C2) is None
    assert len(shapes_to_record(PRESETS["paper"].reachable())) == 7  # (6,1,7) is a part of (7,1,8)


def test_a_shorter_chain_accepts_what_the_longest_does_up_to_its_length():
    answer = traced(accepted={C3: [0, 1, 2, 3, 3, 2, 1, 0, 0, 0, 0], TREE: [1] * 11})
    assert [answer.accepted_at(C2, root) for root in range(5)] == [0, 1, 2, 2, 2]
    assert answer.accepted_at(TREE, 4) == 1
    with pytest.raises(KeyError, match="4,1,5"):
        answer.accepted_at(TreeShape(4, 1, 5), 0)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "Expecting value"),
        ("[1]", "another kind of file"),
        ('{"format": "another"}', "another kind of file"),
        ('{"format": "adaptivespec trace", "version": 9}', "version 9"),
        ('{"format": "adaptivespec trace", "version": 2, "step_ms": {}}', "no whole trace ('live')"),
    ],
)
def test_other_files_are_refused(tmp_path, content, found):
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(TraceError, match=r"trace\.json: found .*expected a whole trace of version 2; fix: ") as caught:
        Trace.load(path)
    assert found in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"none\.json: found No such file"):
        Trace.load(tmp_path / "none.json")


def damage(data: dict, what: str) -> None:
    answer = data["answers"][1]
    if what == "short column":
        answer["accepted"]["(3,4,4)"].pop()
    elif what == "impossible count":
        answer["accepted"]["(3,1,4)"][2] = 4
    elif what == "missing shape":
        del answer["accepted"]["(3,4,4)"]
    elif what == "no shape":
        data["step_ms"]["(3,4"] = 1.0
    elif what == "free":
        data["step_ms"]["(3,4,4)"] = 0
    elif what == "one token":
        answer["token_ids"] = [1]
    elif what == "unknown key":
        answer["extra"] = 1


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("short column", "answer 1 of x with columns of other lengths than its 11 roots"),
        ("impossible count", "answer 1 of x with a step of (3,1,4) that accepts more than it drafts"),
        ("missing shape", "answer 1 of x without (3,4,4)"),
        ("no shape", "tree shape: found '(3,4'"),
        ("free", "a cost that is not positive"),
        ("one token", "answer 1 of x of 1 tokens"),
        ("unknown key", "'extra'"),
    ],
)
def test_a_trace_that_does_not_add_up_is_refused(tmp_path, what, found):
    path = tmp_path / "trace.json"
    trace().save(path)
    data = json.loads(path.read_text())
    damage(data, what)
    path.write_text(json.dumps(data))
    with pytest.raises(TraceError) as caught:
        Trace.load(path)
    assert str(caught.value).startswith(str(path))
    assert found in str(caught.value)


def test_shapes_that_were_not_recorded_are_named():
    with pytest.raises(
        TraceError, match=r"dcs: found a trace without \(4,4,5\) \(5,3,6\); expected .*\(1,1,2\) \(2,1,3\)"
    ):
        trace().require([TREE, TreeShape(4, 4, 5), TreeShape(5, 3, 6)], "dcs")
    trace().require([C1, TREE], "dcs")
