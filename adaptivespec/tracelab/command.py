"""The trace lab's command line."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adaptivespec.bench.command import BarProgress, prepare
from adaptivespec.bench.configurations import range_in_json
from adaptivespec.bench.plan import Plan
from adaptivespec.bench.run import measure
from adaptivespec.bench.store import Store
from adaptivespec.command_line import EXIT_FAILED, positive, run_main
from adaptivespec.config import AdaptiveConfig
from adaptivespec.config_checks import shape_range
from adaptivespec.errors import ConfigError
from adaptivespec.launch import Server
from adaptivespec.policy import POLICY_NAMES
from adaptivespec.prompt_files import add_arguments
from adaptivespec.provenance import provenance
from adaptivespec.reports import write_whole
from adaptivespec.shapes import TreeShape
from adaptivespec.tracelab import timing
from adaptivespec.tracelab.figure import figure
from adaptivespec.tracelab.record import SERVER_NAME, record
from adaptivespec.tracelab.report import Row, check, objections, rankings, replay_all
from adaptivespec.tracelab.trace import Trace

TRACE_NAME = "trace.json"
DESCRIPTION = (
    """Record, from real serving, what every tree shape accepts at every token and costs; replay any policy on it."""
)
EPILOG = """    python scripts/replay.py record --prompts gsm8k=gsm8k_train.jsonl --shapes 1-1-2 3-4-8 --range short --out out/trace
    python scripts/replay.py run --trace out/trace/trace.json --policy dcs talon --range short 1-1-2:2-1-3"""
RECORD = """Greedy answers and times from plain decoding and from each shape, pinned, in turn on the same prompts (as
scripts/bench.py measures), then each shape's steps at every token of the answers, from a server with a prefix cache.

Writes OUT/trace.json; the same command goes on where it was stopped. The last line of the output is one JSON object."""
RUN = """Every static shape of the trace, each --policy in each --range, each --config, and the best shape at every step in
hindsight, replayed without a server: accepted drafts as recorded, each step at its shape's median time.

Says too whether replaying a shape gives the steps that the server took when it was pinned to it, and whether the shapes rank
as they did live, in rounds that no cost is from; exit code 1 where either does not hold, or cannot be told. Writes replay.json and replay.png. The last line of the output is one JSON object."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    options = parse(argv)
    return run_main(lambda: int(options.command(options)))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="replay.py", description=DESCRIPTION, epilog=EPILOG, formatter_class=form)
    commands = parser.add_subparsers(required=True, metavar="record|run")
    recording = commands.add_parser("record", help="from real servers", description=RECORD, formatter_class=form)
    add_arguments(recording)
    recording.set_defaults(rounds=2)  # costs are of one, the live order of the other
    recording.add_argument("--shapes", nargs="+", default=[], metavar="S-K-N", help="shapes to record")
    recording.add_argument("--dtype", default="bfloat16")
    recording.add_argument(
        "--parallel", type=positive, default=8, help="requests at a time while steps are recorded (default %(default)s)"
    )
    recording.add_argument("--out", type=Path, default=Path("out/trace"), help="folder (default %(default)s)")
    recording.add_argument("server_args", nargs="*", metavar="-- ARGUMENT", help="further arguments of every server")
    recording.set_defaults(command=command_record)
    replaying = commands.add_parser("run", help="without a server", description=RUN, formatter_class=form)
    replaying.add_argument("--trace", type=Path, required=True, metavar="FILE", help="what `record` wrote")
    replaying.add_argument(
        "--policy", nargs="+", choices=POLICY_NAMES, default=["dcs"], help="in every range (default dcs)"
    )
    replaying.add_argument(
        "--config", nargs="+", type=Path, default=[], metavar="FILE", help="as for --speculative-adaptive-config"
    )
    replaying.add_argument("--out", type=Path, help="folder (default the trace's)")
    replaying.set_defaults(command=command_run)
    whose = "of the policies; default short, or none beside --config"
    for each, what in ((recording, "whose shapes are recorded too"), (replaying, whose)):
        each.add_argument(
            "--range", nargs="+", default=[], metavar="RANGE", help=f"{what}: LOW:HIGH as 1-1-2:3-1-4, short or paper"
        )
    return parser.parse_args(argv)


def command_record(options: argparse.Namespace, make_server: Callable[..., Server] = Server) -> int:
    """Record a trace, or go on with one."""
    shapes = [TreeShape.parse(text, "--shapes") for text in options.shapes]
    for text in options.range:
        shapes += shape_range(range_in_json(text, "--range"), "--range").reachable()
    if not shapes:
        raise ConfigError(where="--shapes", found="no shape", expected="one at least", fix="give --shapes or --range")
    names = ["adaptive-static-" + "-".join(map(str, shape.to_list())) for shape in dict.fromkeys(shapes)]
    # All pinned shapes share one server, so one block holds everything.
    fixed = {"configurations": names, "batch_sizes": [1], "beside": 1, "grade": False}
    plan, _, _ = prepare(argparse.Namespace(**vars(options), **fixed))
    store = Store.open(options.out, plan.settings(), provenance())
    path = options.out / TRACE_NAME
    trace = make_trace(plan, store, options.parallel, make_server)
    trace.save(path)
    checked = check(trace)
    print(_said(checked))
    print(json.dumps({"trace": str(path.resolve()), "shapes": list(map(str, trace.step_ms)), "check": checked}))
    return 0


def make_trace(plan: Plan, store: Store, parallel: int, make_server: Callable[..., Server] = Server) -> Trace:
    """Measure and record what the store does not have yet.

    Raises:
        ServerFailedError, MeasureError, StoreError: see `measure` and `record`.
        TraceError: what was recorded does not add up.
    """
    pieces = sum(map(len, plan.tasks.values())) * sum(item.pinned is not None for item in plan.configurations)
    progress = BarProgress(plan.num_cells + pieces)
    try:
        measure(plan, store, progress, make_server)
        answers = timing.answers(store)
        recording = record(plan, store, answers, parallel, progress, make_server)
    finally:
        progress.close()
    costs = timing.step_ms(store, plan.configurations)
    server = store.servers[SERVER_NAME]
    return Trace(
        settings=plan.settings(),
        sessions=store.sessions,
        device=server["device"],
        lag=int(server["overlap"]),
        plain_ms=timing.plain_ms(store),
        step_ms=costs,
        live=timing.live_ratios(store, plan.configurations),
        answers=list(recording.traced(list(costs), answers)),
    )


def command_run(options: argparse.Namespace) -> int:
    """Replay a trace."""
    trace = Trace.load(options.trace)
    rows = replay_all(trace, _configs(options, trace.device))
    ranks, checked = rankings(trace, rows), check(trace)
    against = objections(checked, ranks)
    best_static = max((row for row in rows if row.shape), key=lambda row: row.mean)
    report: dict[str, Any] = {
        "trace": str(options.trace),
        "cost_ms": {"plain": round(trace.plain_ms, 2), **{str(k): round(v, 2) for k, v in trace.step_ms.items()}},
        "check": checked,
        "ranking": ranks,
        "objections": against,
        "best_static": best_static.label,
        "rows": {row.label: row.to_dict(best_static) for row in rows},
    }
    out = options.out or options.trace.parent
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "replay.json", json.dumps({**report, "provenance": provenance()}, indent=1).encode())
    write_whole(out / "replay.png", figure(trace, rows))
    _print_table(trace, rows, best_static)
    print(_said(checked))
    for name, found in ranks.items():
        print(f"{name}: {found['clear_alike']} of {found['clear_pairs']} clear pairs of shapes rank as live ({found})")
    for objection in against:
        print(f"not to be relied on: {objection}")
    print(json.dumps(report))
    return EXIT_FAILED if against else 0


def _configs(options: argparse.Namespace, device: str) -> dict[str, AdaptiveConfig]:
    found = {}
    for text in options.range or ([] if options.config else ["short"]):
        ends = range_in_json(text, "--range")
        for policy in options.policy:
            found[f"{policy} {text}"] = AdaptiveConfig.from_dict({"policy": policy, "shape": {"range": ends}})
    for path in options.config:
        config = AdaptiveConfig.from_json_file(path).on(device)
        if config.margin.kappa is not None or config.drift.enabled:
            raise ConfigError(
                where=str(path),
                found="margin.kappa or drift.enabled",
                expected="neither: a trace says what a strict server without a memory accepts",
                fix="leave them out",
            )
        found[str(path)] = config
    return found


def _print_table(trace: Trace, rows: Sequence[Row], best_static: Row) -> None:
    print(f"{'decoder':32}{'of plain':>10}{'of hindsight':>14}{'of static':>11}  tokens/s by set")
    for row in rows:
        figures = row.to_dict(best_static)
        sets = "  ".join(f"{name} {value:.1f}" for name, value in figures["tokens_per_s"].items())
        numbers = f"{row.mean:10.3f}{figures['of_hindsight_best']:14.3f}{figures['of_best_static']:11.3f}"
        print(f"{row.label:32}{numbers}  {sets}")


def _said(checked: dict[str, Any]) -> str:
    return (
        f"trace: {checked['same_steps']} of {checked['compared']} live answers have the replayed steps; "
        f"{checked['other_answer']} were another answer; {checked['strayed']} of {checked['roots']} roots strayed"
    )
