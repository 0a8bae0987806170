"""Loads: what is asked of bench_serving, what is kept of it, and what a failure leaves."""

import csv
import functools
import json
from pathlib import Path

import pytest

from adaptivespec.bench import load
from adaptivespec.errors import AdaptiveSpecError
from tests.unit.bench_fakes import fresh_fake

RESULT = {
    "output_throughput": 40.0,
    "median_ttft_ms": 100.0,
    "p99_ttft_ms": 300.0,
    "median_tpot_ms": 25.0,
    "median_e2e_latency_ms": 900.0,
    "completed": 2,
    "accept_length": None,
}


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a run with a fake server and a fake client, whose calls are in the list."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"question": f"{n}?"}) + "\n" for n in range(3)))
    calls: list[tuple] = []

    Server = fresh_fake()

    def client(url, target, dataset, count, max_new_tokens, concurrency, rate):
        assert len(Server.alive) == 1
        calls.append((Server.alive[0].log.stem, Server.alive[0].pinned, concurrency, rate))
        return RESULT | {"output_throughput": 10.0 * len(calls)}

    measure = load.measure
    monkeypatch.setattr(load, "fill_in_pair", lambda options: None)
    monkeypatch.setattr(load, "end_on_sigterm", lambda: None)
    monkeypatch.setattr(load, "measure", functools.partial(measure, make_server=Server, client=client))
    text = ["--prompts", f"ask={prompts}", "--num-prompts", "2", "--out", str(tmp_path / "out"), "--target", "T"]
    return [
        *text,
        "--draft",
        "D",
        "--configurations",
        "adaptive",
        "adaptive-static-3-1-4",
        "--concurrencies",
        "1",
        "2",
    ], calls


def test_every_decoder_gets_every_load_alone(arguments, tmp_path: Path, capsys):
    options, calls = arguments
    assert load.main([*options, "--rates", "0.5"]) == 0
    loads = [(1, None), (2, None), (None, 0.5)]
    servers = [("plain", None), ("adaptive", -1), ("adaptive", 1)]  # the static shape is pinned on ADAPTIVE's
    assert calls == [(*server, *each) for server in servers for each in loads]
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["complete"]
    assert [each["output_tokens_per_s"] for each in line["loads"]] == [10.0 * n for n in range(1, 10)]
    kept = [json.loads(row) for row in (tmp_path / "out" / "load.jsonl").read_text().splitlines()]
    assert kept == line["loads"]
    table = list(csv.DictReader((tmp_path / "out" / "load.csv").open()))
    assert [row["rate"] for row in table] == ["", "", "0.5"] * 3
    for name in ("load-concurrency.png", "load-rate.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    assert "0.5 a second" in (tmp_path / "out" / "report.html").read_text()
    sent = [json.loads(row) for row in (tmp_path / "out" / "prompts.jsonl").read_text().splitlines()]
    assert [row["conversations"][0]["content"] for row in sent] == ["0?", "1?"]
    assert load.main([*options, "--rates", "0.5", "2"]) == 0
    assert calls[9:] == [(*server, None, 2.0) for server in servers], "what was measured is not measured again"
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["loads"]) == 12
    assert load.main([*options, "--max-new-tokens", "7"]) == 1
    assert "found a run with max_new_tokens '96'; expected max_new_tokens '7'" in capsys.readouterr().err
    assert len(calls) == 12


def test_a_failure_keeps_what_was_measured(arguments, tmp_path: Path, monkeypatch, capsys):
    options, calls = arguments
    measure = load.measure

    def failing(servers, args, done, keep):
        def keep_two(each):
            keep(each)
            if len(calls) == 2:
                raise AdaptiveSpecError(found="an end", expected="none", fix="go on")

        measure(servers, args, done, keep_two)

    monkeypatch.setattr(load, "measure", failing)
    assert load.main(options) == 1
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert not line["complete"]
    assert "found an end" in line["problem"]
    kept = tmp_path / "out" / "load.jsonl"
    assert len(line["loads"]) == len(kept.read_text().splitlines()) == 2
    kept.write_text(kept.read_text() + '{"configuration": "cut o')
    monkeypatch.setattr(load, "measure", measure)
    assert load.main(options) == 0
    assert len(calls) == len(kept.read_text().splitlines()) == 6


@pytest.mark.parametrize(
    "extra",
    [["--concurrencies"], ["--concurrencies", "0"], ["--concurrencies", "3"], ["--rates", "nan"]],
)
def test_loads_that_make_no_sense_are_refused(arguments, extra, capsys):
    with pytest.raises(SystemExit):
        load.main([*arguments[0], *extra])
    assert "expected" in capsys.readouterr().err


def test_a_client_that_fails_says_how_to_see_it(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(load.sys, "executable", "false")
    with pytest.raises(
        load.LoadError, match=r"found exit code 1, nothing, 0 of 2 requests answered; expected every request"
    ):
        load.bench_serving("http://127.0.0.1:9", "T", tmp_path / "prompts.jsonl", 2, 8, 1, None)
