"""The published tables, measured: AdaptiveSpec's speeds and task recovery, and DRIFT's speeds under domain shift.

Every pair of models and each of the two tables is one run of the benchmark in a folder of its own, so that all of it goes on
where it was stopped.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from adaptivespec.bench import command
from adaptivespec.bench.configurations import PLAIN
from adaptivespec.bench.report import REPORT_NAME, RESULTS_NAME
from adaptivespec.command_line import positive, run_main
from adaptivespec.errors import ConfigError
from adaptivespec.prompt_files import PromptFile
from adaptivespec.reports import file_name, render_template, write_whole
from adaptivespec.shapes import TreeShape

DESCRIPTION = """The published tables beside what this machine gives.

AdaptiveSpec's: EAGLE-3 with one shape, dynamic shapes, the margin, both, TALON's and FLy's rules, on --prompts, with accuracy
over plain decoding's. DRIFT's: one shape and dynamic shapes with and without the memory, on --shift. Writes OUT/report.html
and tables.json beside a folder for each pair and table, which `scripts/bench.py` could have made. The same command goes on where it was
stopped. The last line of the output is one JSON object."""
PAIRS = (
    "meta-llama/Llama-3.1-8B-Instruct,jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B",
    "Qwen/Qwen3-8B,Tengyunw/qwen3_8b_eagle3",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B,yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",
)
TABLES_NAME = "tables.json"
DEMO, DEMO_PAIR = {"num_prompts": 2, "max_new_tokens": 48, "rounds": 1}, "demo"
FULL = {"num_prompts": 80, "max_new_tokens": 1024, "rounds": 5}


@dataclass(frozen=True)
class Line:
    """One line of a table.

    Args:
        label: what it is.
        configuration: the benchmark's name for it.
        published_ratio: speed over plain decoding that its paper gives as the mean; None where we know of none.
        published_recovery: accuracy over plain decoding's, likewise.
    """

    label: str
    configuration: str
    published_ratio: float | None = None
    published_recovery: float | None = None


@dataclass(frozen=True)
class Table:
    """A published table.

    Args:
        name: of its folders.
        title: with what was published, on which machine.
        is_graded: whether answers are graded.
    """

    name: str
    title: str
    lines: tuple[Line, ...]
    is_graded: bool = False


@dataclass(frozen=True)
class Measured:
    """One line on one pair and set of prompts; figures as in the benchmark's summaries.

    Args:
        recovery: accuracy over plain decoding's; None where that is 0, or nothing was graded.
    """

    pair: str
    task: str
    ratio: float | None
    accept_length: float | None
    agreement: float
    accuracy: float | None
    recovery: float | None


def tables(static: str, kappa: float) -> tuple[Table, Table]:
    """Both tables, for the shape that stands for EAGLE-3 and the margin's kappa."""
    one, margin = f"adaptive-static-{static}", f"kappa={kappa:g}"
    return (
        Table(
            "adaptivespec",
            "AdaptiveSpec; published for an A100, kappa 0.2, mean of three targets and three tasks",
            (
                Line("EAGLE-3, one shape", f"eagle3-{static}"),
                Line("dynamic", "adaptive+range=paper"),
                Line("margin, one shape", f"{one}+{margin}", 2.10, 0.93),
                Line("dynamic and margin", f"adaptive+range=paper+{margin}", 2.42, 0.95),
                Line("TALON", "talon+range=paper"),
                Line("FLy", "adaptive+range=paper+fly"),
            ),
            is_graded=True,
        ),
        Table(
            "drift",
            "DRIFT under domain shift; published for chains, a 1.1B draft of a 32B target: drafts accepted 0.42 without, 0.63 with",
            (
                Line("one shape", f"{one}+drift=off", 1.6),
                Line("one shape and memory", f"{one}+drift", 2.3),
                Line("dynamic", "adaptive+drift=off"),
                Line("dynamic and memory", "adaptive+drift"),
            ),
        ),
    )


def main(argv: Sequence[str] | None = None, benchmark: Callable[[list[str]], int] = command.main) -> int:
    """Measure both tables; returns the exit code, that of the benchmark where it ended early."""
    options = parse(argv)
    return run_main(lambda: run(options, benchmark))


def run(options: argparse.Namespace, benchmark: Callable[[list[str]], int]) -> int:
    """Every stage, then report and JSON line, also after a stage that ended early; nothing is measured after that."""
    exit_code = 0
    found: dict[str, dict[str, list[Measured]]] = {}
    reports = []
    for table, pair, folder, arguments in stages(options):
        print(f"{table.name}, {pair}", flush=True)
        before = _written(folder / RESULTS_NAME)
        exit_code = benchmark(arguments)
        # One that was refused leaves the results of whatever ran in that folder before.
        if _written(folder / RESULTS_NAME) != before:
            reports.append(str((folder / REPORT_NAME).relative_to(options.out)))
            for line, measured in read_results(table, pair, folder / RESULTS_NAME):
                found.setdefault(table.name, {}).setdefault(line.label, []).append(measured)
        if exit_code:
            break
    rows = {
        table.name: [_row(line, found.get(table.name, {}).get(line.label, [])) for line in table.lines]
        for table in tables(options.static, options.kappa)
    }
    result: dict[str, Any] = {"complete": not exit_code, "tables": rows, "report": None}
    if found:  # else nothing is known that an earlier report does not have
        result["report"] = str((options.out / REPORT_NAME).resolve())
        write_report(options, rows, reports, is_complete=not exit_code)
        write_whole(options.out / TABLES_NAME, json.dumps(result, indent=1).encode())
        _print(rows)
    print(json.dumps(result))
    return exit_code


def stages(options: argparse.Namespace) -> Iterator[tuple[Table, str, Path, list[str]]]:
    """Table, name of the pair, folder, and the benchmark's command line, of each run."""
    adaptivespec, drift = tables(options.static, options.kappa)
    for pair, arguments in _pairs(options):
        for table, sources in ((adaptivespec, options.prompts), (drift, options.shift)):
            if not sources:
                continue
            folder = options.out / f"{table.name}-{file_name(pair)}"
            prompts = [part for source in sources for part in ("--prompts", f"{source.name}={source.path}")]
            sizes = [f"--{key.replace('_', '-')}={getattr(options, key)}" for key in DEMO]
            names = ["--configurations", *(line.configuration for line in table.lines)]
            graded = ["--grade"] if table.is_graded else []
            rest = ["--beside", str(options.beside), "--out", str(folder), *graded, "--", *options.server_args]
            yield table, pair, folder, [*arguments, *prompts, *sizes, *names, *rest]


def _pairs(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    if options.demo:
        yield DEMO_PAIR, []
        return
    for pair in options.pair or PAIRS:
        target, _, draft = pair.partition(",")
        yield target, ["--target", target, "--draft", draft]


def _written(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def read_results(table: Table, pair: str, path: Path) -> Iterator[tuple[Line, Measured]]:
    """What a run of the benchmark found for each line and set of prompts."""
    summaries = json.loads(path.read_text("utf-8"))["summaries"]
    plain = {item["task"]: item["accuracy"] for item in summaries if item["configuration"] == PLAIN}
    for line in table.lines:
        for item in summaries:
            if item["configuration"] == line.configuration:
                accuracy, reference = item["accuracy"], plain.get(item["task"])
                recovery = accuracy / reference if accuracy is not None and reference else None
                task, ratio, length = item["task"], item["ratio"], item["accept_length"]
                yield line, Measured(pair, task, ratio, length, item["agreement"], accuracy, recovery)


def _row(line: Line, cells: list[Measured]) -> dict[str, Any]:
    """A line with the means of its cells, as JSON types."""
    return asdict(line) | {
        "ratio": mean(cell.ratio for cell in cells),
        "recovery": mean(cell.recovery for cell in cells),
        "agreement": mean(cell.agreement for cell in cells),
        "accept_length": mean(cell.accept_length for cell in cells),
        "cells": [asdict(cell) for cell in cells],
    }


def mean(values: Iterable[float | None]) -> float | None:
    """Arithmetic, as published, of those that are there."""
    there = [value for value in values if value is not None]
    return round(fmean(there), 4) if there else None


def write_report(
    options: argparse.Namespace, rows: dict[str, list[dict[str, Any]]], reports: list[str], *, is_complete: bool
) -> None:
    """OUT/report.html."""
    options.out.mkdir(parents=True, exist_ok=True)
    titles = {table.name: table.title for table in tables(options.static, options.kappa)}
    html = render_template(
        "reproduce.html",
        pictures={},
        titles=titles,
        rows=rows,
        reports=reports,
        options=options,
        is_complete=is_complete,
    )
    write_whole(options.out / REPORT_NAME, html.encode())


def _print(rows: dict[str, list[dict[str, Any]]]) -> None:
    def text(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    for name, lines in rows.items():
        print(f"\n{name:24}{'speed over plain':>24}{'recovery':>24}{'accept length':>16}{'cells':>8}")
        print(f"{'':24}{'published':>12}{'measured':>12}{'published':>12}{'measured':>12}")
        for row in lines:
            keys = ("published_ratio", "ratio", "published_recovery", "recovery")
            columns = "".join(f"{text(row[key]):>12}" for key in keys)
            print(f"{row['label']:24}{columns}{text(row['accept_length']):>16}{len(row['cells']):>8}")
    print()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, sizes filled in."""
    parser = argparse.ArgumentParser(
        prog="reproduce.py", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--demo", action="store_true", help=f"the demo pair, and small sizes: {DEMO}")
    parser.add_argument(
        "--pair", action="append", metavar="TARGET,DRAFT", help="default: the published three, " + " ".join(PAIRS)
    )
    for option, what in (("--prompts", "a task of AdaptiveSpec's table"), ("--shift", "a domain of DRIFT's")):
        parser.add_argument(
            option, type=PromptFile.parse, action="append", default=[], metavar="NAME=FILE.jsonl", help=what
        )
    for key, value in FULL.items():
        parser.add_argument(f"--{key.replace('_', '-')}", type=positive, help=f"default {value}, or {DEMO[key]}")
    parser.add_argument("--static", default="5-4-8", metavar="S-K-N", help="EAGLE-3's one shape (default %(default)s)")
    parser.add_argument("--kappa", type=float, default=0.2, help="of the margin (default %(default)s, as published)")
    parser.add_argument(
        "--beside", type=positive, default=5, help="servers beside plain's at once (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("out/reproduce"), help="folder (default %(default)s)")
    parser.add_argument("server_args", nargs="*", metavar="-- ARGUMENT", help="further arguments of every server")
    options = parser.parse_args(argv)
    for key, value in (DEMO if options.demo else FULL).items():
        if getattr(options, key) is None:
            setattr(options, key, value)
    if not options.prompts and not options.shift:
        parser.error("found neither --prompts nor --shift; expected one table's prompts at least; fix: give either")
    if options.demo and options.pair:
        parser.error("found --pair beside --demo; expected one of them; fix: drop one")
    for pair in options.pair or ():
        if pair.count(",") != 1 or not all(pair.split(",")):
            parser.error(f"found --pair {pair}; expected TARGET,DRAFT; fix: write both with one comma between")
    try:
        TreeShape.parse(options.static, where="--static")
    except ConfigError as error:
        parser.error(str(error))
    return options
