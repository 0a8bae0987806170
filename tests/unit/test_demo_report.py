import base64
import json
import re

import pytest
from rich.console import Console

from adaptivespec.demo.figures import figures
from adaptivespec.demo.measure import Answer, Measurements, Pair
from adaptivespec.demo.report import write_report
from adaptivespec.demo.terminal import results_table
from adaptivespec.provenance import git_revision, provenance

SETS = ["word problems", "HumanEval"]
EVIL = '<script>alert("x")</script> & <b>'


def measured(problem: str = "") -> Measurements:
    found = Measurements(["EAGLE3 (3,1,4)", "ADAPTIVE"], SETS, problem=problem)
    for index in range(3):
        for prompt_set in SETS:
            plain = Answer((1, 2, 3), EVIL, 10.0 + index)
            static = Answer((1, 2, 3), EVIL, 12.0 + 3 * index, verify_steps=4, accepted=3)
            ours = Answer(
                (1, 2, index), EVIL, 18.0, verify_steps=4, accepted=5, shape_steps={"(3,4,4)": 3, "(7,1,8)": 1}
            )
            found.pairs.append(Pair("EAGLE3 (3,1,4)", prompt_set, index, plain, static))
            found.pairs.append(Pair("ADAPTIVE", prompt_set, index, plain, ours, split_gap=0.01 * index))
    found.commands = {"plain": f"python -m sglang.launch_server {EVIL}"}
    found.notes = {"plain": EVIL}
    found.shape_trace = ["(3,4,4)", "(7,1,8)", "(7,1,8)"]
    found.seconds = 61.0
    return found


def html_of(found: Measurements, tmp_path) -> str:
    report = write_report(found, {"processor": EVIL}, {"target": EVIL}, tmp_path)
    assert report == tmp_path / "report.html"
    return report.read_text("utf-8")


def test_the_report_holds_every_figure_inside_itself(tmp_path):
    html = html_of(measured(), tmp_path)
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    assert len(pictures) == len(figures(measured())) == 4
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    assert not re.findall(r'(?:src|href)="(?!data:)', html)
    assert 'name="viewport"' in html
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "accept_length.png",
        "shapes_by_set.png",
        "shapes_over_time.png",
        "speed.png",
    ]


def test_the_report_says_the_figures(tmp_path):
    html = " ".join(html_of(measured(), tmp_path).split())
    # 18 over 10, 11 and 12 in each of two sets
    assert "<strong>1.64x</strong> the speed of plain decoding (median of 6 pairs, 1.50-1.80)" in html
    assert "with 0 of 6 answers the same token for token" in html
    assert "1.50-1.80, n=6" in html
    assert "In the same run: EAGLE3 (3,1,4) 1.36x." in html
    assert "6 / 6" in html
    assert "in nats and at most: ADAPTIVE 0.020." in html
    assert "61 s" in html


def test_all_text_is_escaped(tmp_path):
    html = html_of(measured(problem=EVIL), tmp_path)
    assert "<script>" not in html
    assert "& <b>" not in html
    assert html.count("&lt;script&gt;") >= 5  # problem, command, note, source, processor


def test_an_early_end_is_said_and_what_was_measured_is_kept(tmp_path):
    found = measured(problem="it was interrupted.")
    found.pairs, found.shape_trace = found.pairs[:1], []
    html = html_of(found, tmp_path)
    assert "Not complete." in html
    assert "it was interrupted." in html
    assert "EAGLE3 (3,1,4)" in html
    assert "ADAPTIVE decodes at" not in html
    assert set(figures(found)) == {"speed", "accept_length"}
    assert len(json.loads((tmp_path / "measurements.json").read_text())["pairs"]) == 1


def test_a_report_of_nothing(tmp_path):
    html = html_of(Measurements(["ADAPTIVE"], SETS, problem="a server did not start."), tmp_path)
    assert "Nothing was measured." in html
    assert "data:image" not in html


def test_a_pair_without_speed_is_no_gap_in_the_figures(tmp_path):
    found = Measurements(["ADAPTIVE"], SETS)
    found.pairs = [Pair("ADAPTIVE", SETS[0], 0, Answer((1,), "a", None), Answer((1,), "a", None))]
    html = html_of(found, tmp_path)
    assert "(median of 0 pairs, ---)" in " ".join(html.split())


@pytest.mark.parametrize("width", [80, 140])
def test_the_terminal_table_names_every_decoder(width):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(results_table(measured()))
    text = capture.get()
    assert all(name in text for name in ("plain", "ADAPTIVE", "EAGLE3 (3,1,4)", "1.50-1.80", "6/6", "accept"))


def test_provenance_names_machine_versions_and_command():
    found = provenance()
    assert "cores" in found["processor"]
    assert "sglang" in found["versions"]
    assert found["command"]
    assert all(isinstance(text, str) and text for text in found.values())


def test_no_revision_outside_a_checkout(tmp_path):
    assert git_revision(tmp_path) == "not a git checkout"
