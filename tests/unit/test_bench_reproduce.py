"""The published tables: which runs they take, what is read from them, and what an early end leaves."""

import json
from pathlib import Path

import pytest

from adaptivespec.bench import command
from adaptivespec.bench.configurations import parse_configurations
from adaptivespec.bench.reproduce import PAIRS, main, parse, stages, tables

SETS = ["--prompts", "gsm8k=g.jsonl", "--prompts", "humaneval=h.jsonl", "--shift", "law=l.jsonl"]


class FakeBenchmark:
    """Writes results as the benchmark does: ratio 2, and half of plain decoding's right answers; may fail."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.calls: list[list[str]] = []
        self._fail_at = fail_at

    def __call__(self, argv: list[str]) -> int:
        options = command.parse(argv)
        self.calls.append(argv)
        summaries = [
            {
                "configuration": name,
                "task": source.name,
                "ratio": 1.0 if name == "plain" else 2.0,
                "accept_length": None if name == "plain" else 1.5,
                "agreement": 1.0,
                "accuracy": (0.8 if name == "plain" else 0.4) if options.grade else None,
            }
            for source in options.prompts
            for name in ("plain", *options.configurations)
        ]
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.json").write_text(json.dumps({"summaries": summaries}))
        return 1 if len(self.calls) == self._fail_at else 0


def last_line(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_every_configuration_is_one_that_the_benchmark_knows() -> None:
    for table in tables("3-1-4", 0.3):
        parse_configurations([line.configuration for line in table.lines], "DRAFT")


def test_a_run_for_each_pair_and_table(tmp_path: Path) -> None:
    options = parse([*SETS, "--out", str(tmp_path), "--num-prompts", "4", "--", "--mem-fraction-static", "0.2"])
    runs = list(stages(options))
    assert len(runs) == 2 * len(PAIRS)
    assert len({folder for _, _, folder, _ in runs}) == len(runs)
    for (table, pair, folder, argv), named in zip(runs, [pair for pair in PAIRS for _ in range(2)], strict=True):
        known = command.parse(argv)
        assert f"{known.target},{known.draft}" == named
        assert pair == known.target
        assert (known.out, known.num_prompts, known.rounds) == (folder, 4, 5)
        assert known.grade == (table.name == "adaptivespec")
        assert [source.name for source in known.prompts] == (["gsm8k", "humaneval"] if known.grade else ["law"])
        assert known.server_args == ["--mem-fraction-static", "0.2"]


def test_published_beside_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = FakeBenchmark()
    assert main(["--demo", *SETS, "--out", str(tmp_path)], benchmark) == 0
    assert len(benchmark.calls) == 2
    result = last_line(capsys)
    assert result["complete"]
    both = {row["label"]: row for row in result["tables"]["adaptivespec"]}["dynamic and margin"]
    assert (both["published_ratio"], both["published_recovery"]) == (2.42, 0.95)
    assert (both["ratio"], both["recovery"], both["accept_length"], len(both["cells"])) == (2.0, 0.5, 1.5, 2)
    memory = {row["label"]: row for row in result["tables"]["drift"]}["one shape and memory"]
    assert (memory["ratio"], memory["recovery"], len(memory["cells"])) == (2.0, None, 1)
    html = Path(result["report"]).read_text()
    assert "2.42x" in html
    assert "drift-demo/report.html" in html
    assert "Not complete" not in html


def test_an_early_end_is_said_and_what_was_measured_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = FakeBenchmark(fail_at=1)
    assert main(["--demo", *SETS, "--out", str(tmp_path)], benchmark) == 1
    assert len(benchmark.calls) == 1
    result = last_line(capsys)
    assert not result["complete"]
    assert len(result["tables"]["adaptivespec"][0]["cells"]) == 2
    assert result["tables"]["drift"][0]["cells"] == []
    assert "Not complete" in Path(result["report"]).read_text()


def test_a_refused_run_leaves_no_other_runs_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--demo", *SETS, "--out", str(tmp_path)], FakeBenchmark()) == 0
    report = Path(last_line(capsys)["report"])
    kept = report.read_text(), (tmp_path / "tables.json").read_text()
    assert main(["--demo", *SETS, "--out", str(tmp_path)], lambda argv: 1) == 1
    result = last_line(capsys)
    assert all(row["cells"] == [] for rows in result["tables"].values() for row in rows)
    assert result["report"] is None
    assert kept == (report.read_text(), (tmp_path / "tables.json").read_text()), "it told nothing new"


def test_nothing_right_in_plain_decoding_gives_no_recovery(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Hopeless(FakeBenchmark):
        def __call__(self, argv: list[str]) -> int:
            code = super().__call__(argv)
            path = command.parse(argv).out / "results.json"
            path.write_text(path.read_text().replace("0.8", "0.0").replace("0.4", "0.0"))
            return code

    assert main(["--demo", *SETS, "--out", str(tmp_path)], Hopeless()) == 0
    assert last_line(capsys)["tables"]["adaptivespec"][0]["recovery"] is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--prompts"),
        (["--demo", "--pair", "a,b", *SETS], "--pair"),
        (["--pair", "a", *SETS], "TARGET,DRAFT"),
        (["--static", "3-1", *SETS], "--static"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert named in capsys.readouterr().err
