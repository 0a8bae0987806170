"""Decoders under load, by SGLang's own `bench_serving`: throughput and latency at several concurrencies and arrival rates."""

import argparse
import hashlib
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from tqdm import tqdm

from adaptivespec.bench.configurations import VALID_NAMES, ServerPlan, parse_configurations, server_plans
from adaptivespec.bench.plan import write_config
from adaptivespec.bench.report import REPORT_NAME
from adaptivespec.bench.run import places_of, set_state
from adaptivespec.bench.store import StoreError, refuse_other_settings
from adaptivespec.command_line import EXIT_FAILED, EXIT_INTERRUPTED, end_on_sigterm, positive
from adaptivespec.errors import AdaptiveSpecError, ConfigError
from adaptivespec.launch import Server, ServerFailedError, named_failure
from adaptivespec.plots import SET_COLOURS, add_legend, new_axes, png
from adaptivespec.prompt_files import PromptFile, add_arguments, fill_in_pair
from adaptivespec.provenance import machine, provenance
from adaptivespec.reports import render_template, whole_lines, write_whole

DATASET_NAME, SETTINGS_NAME, ROWS_NAME = "prompts.jsonl", "run.json", "load.jsonl"
START_SECONDS = 900
LOAD_SECONDS = 3600
DESCRIPTION = """Decoders under load: SGLang's bench_serving against a real server of each, one server at a time.

Closed loop at each of --concurrencies, and open loop (Poisson arrivals) at each of --rates. Every load of a decoder gets the
same prompts, after the prefix cache has been flushed. Writes OUT/load.jsonl, a line for each load as it
is measured, load.csv, plots and report.html; the same command goes on where it was stopped. The last line of the output is one JSON object."""


class LoadError(AdaptiveSpecError, RuntimeError):
    """A load could not be measured."""


@dataclass(frozen=True)
class Load:
    """One load of one decoder; the figures are bench_serving's.

    Args:
        configuration: name of the decoder.
        concurrency: requests at once, at most; None for open loop.
        rate: requests per second on average; None for closed loop.
        output_tokens_per_s: of all requests together.
        median_ttft_ms, p99_ttft_ms: milliseconds to the first token.
        median_tpot_ms: milliseconds a token after the first, by request.
        median_latency_ms: milliseconds from sending to the end.
        accept_length: the server's running average, bonus token included; None without speculation.
        num_requests: n.
    """

    configuration: str
    concurrency: int | None
    rate: float | None
    output_tokens_per_s: float
    median_ttft_ms: float
    p99_ttft_ms: float
    median_tpot_ms: float
    median_latency_ms: float
    accept_length: float | None
    num_requests: int

    @classmethod
    def of(cls, configuration: str, concurrency: int | None, rate: float | None, result: dict[str, Any]) -> "Load":
        """From the line that bench_serving writes."""
        return cls(
            configuration=configuration,
            concurrency=concurrency,
            rate=rate,
            output_tokens_per_s=round(result["output_throughput"], 2),
            median_ttft_ms=round(result["median_ttft_ms"], 1),
            p99_ttft_ms=round(result["p99_ttft_ms"], 1),
            median_tpot_ms=round(result["median_tpot_ms"], 1),
            median_latency_ms=round(result["median_e2e_latency_ms"], 1),
            accept_length=result["accept_length"] and round(result["accept_length"], 3),
            num_requests=result["completed"],
        )


def write_dataset(source: PromptFile, count: int, skip: int, path: Path) -> None:
    """The prompts in the form that bench_serving calls custom; the second turn is required and not used."""
    rows = source.rows(count, skip)
    turns = [[{"content": row["text"]}, {"content": "unused"}] for row in rows]
    path.write_text("".join(json.dumps({"conversations": each}) + "\n" for each in turns), encoding="utf-8")


def bench_serving(
    url: str, target: str, dataset: Path, count: int, max_new_tokens: int, concurrency: int | None, rate: float | None
) -> dict[str, Any]:
    """Run SGLang's client once and return the line that it writes.

    Raises:
        LoadError: it failed, or some requests did.
    """
    out = dataset.with_name("bench_serving.jsonl")
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", url]
    command += ["--model", target, "--dataset-name", "custom", "--dataset-path", str(dataset), "--apply-chat-template"]
    command += ["--num-prompts", str(count), "--sharegpt-output-len", str(max_new_tokens), "--flush-cache"]
    # Answers end where the model ends them: past its end it repeats itself, and drafts of that are too easy.
    command += ["--disable-ignore-eos", "--seed", "0", "--output-file", str(out)]
    command += [] if concurrency is None else ["--max-concurrency", str(concurrency)]
    command += [] if rate is None else ["--request-rate", str(rate)]
    ended = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_SECONDS)
        if done.returncode:
            last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
            ended = f"exit code {done.returncode}, {last[0]}, "
    except subprocess.TimeoutExpired:
        ended = f"no end within {LOAD_SECONDS} s, "
    lines = whole_lines(out)
    result: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    if ended or result.get("completed") != count:
        raise LoadError(
            where=shlex.join(command),
            found=f"{ended}{result.get('completed', 0)} of {count} requests answered",
            expected="every request answered",
            fix="run that command by hand, and look at the server's log",
        )
    return result


def former(options: argparse.Namespace) -> list[Load]:
    """The loads that OUT holds of a run like this one; a folder without any is begun. Decoders and loads may be others.

    Raises:
        StoreError: the folder holds loads of a run with other settings, or none that can be read.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    dataset = options.out / DATASET_NAME
    write_dataset(options.prompts[0], options.num_prompts, options.skip, dataset)
    names = ("target", "draft", "max_new_tokens", "dtype", "server_args")
    settings = {name: getattr(options, name) for name in names} | machine()
    settings = {key: value if isinstance(value, list) else str(value) for key, value in settings.items()}
    settings["prompts"] = hashlib.sha256(dataset.read_bytes()).hexdigest()[:16]
    path, rows = options.out / SETTINGS_NAME, options.out / ROWS_NAME
    lines = whole_lines(rows)
    try:
        before = json.loads(path.read_text("utf-8")) if lines else settings
        found = [Load(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(
            where=str(options.out), found=f"what is no run ({error})", expected="none", fix="give another --out"
        ) from error
    refuse_other_settings(options.out, before, settings)
    write_whole(path, json.dumps(settings, indent=1).encode())
    return found


def measure(
    servers: Sequence[ServerPlan],
    options: argparse.Namespace,
    done: Sequence[Load],
    keep: Callable[[Load], None],
    make_server: Callable[..., Server] = Server,
    client: Callable[..., dict[str, Any]] = bench_serving,
) -> None:
    """Measure every load that is not done with one server after the other, keeping each as soon as it is.

    Raises:
        ServerFailedError: a server did not start, or died.
        LoadError: see `bench_serving`.
    """
    loads: list[tuple[int | None, float | None]] = [(value, None) for value in options.concurrencies]
    loads += [(None, value) for value in options.rates]
    dataset = options.out / DATASET_NAME
    known = {(load.configuration, load.concurrency, load.rate) for load in done}
    # So that the accept length that the server shows is of the load that was measured.
    common = ["--dtype", options.dtype, "--sleep-on-idle", "--decode-log-interval", "1"]
    missing = {
        item.name: [load for load in loads if (item.name, *load) not in known]
        for plan in servers
        for item in plan.configurations
    }
    with tqdm(total=sum(map(len, missing.values())), unit="load") as bar:
        for plan in servers:
            if not any(missing[item.name] for item in plan.configurations):
                continue
            args = [*common, *plan.args, *write_config(plan, options.out / "configs"), *options.server_args]
            log = options.out / "logs" / f"{plan.slug}.log"
            with make_server(options.target, args, log=log, timeout=START_SECONDS) as server:
                with named_failure(server):
                    places = places_of(server.get("/server_info"))
                for item in plan.configurations:
                    for key, value in plan.settings(item, places).items():
                        set_state(server, key, value)
                    for concurrency, rate in missing[item.name]:
                        bar.set_description(f"{item.name}, {_name(concurrency, rate)}")
                        figures = (options.num_prompts, options.max_new_tokens, concurrency, rate)
                        try:
                            result = client(server.url, str(options.target), dataset, *figures)
                        except LoadError:
                            with named_failure(server):
                                server.get("/health_generate")
                            raise
                        keep(Load.of(item.name, concurrency, rate, result))
                        bar.update()


def _name(concurrency: int | None, rate: float | None) -> str:
    return f"{concurrency} at once" if rate is None else f"{rate:g} a second"


def figures(loads: Sequence[Load], caption: str) -> dict[str, bytes]:
    """PNG by name: load-concurrency and load-rate, throughput and latency against each, as far as it was measured."""
    kinds = {"concurrency": "requests at once", "rate": "requests per second"}
    names = list(dict.fromkeys(load.configuration for load in loads))
    made = {}
    for key, label in kinds.items():
        chosen = [load for load in loads if getattr(load, key) is not None]
        if chosen:
            made[f"load-{key}"] = _figure(chosen, names, key, label, caption)
    return made


def _figure(loads: Sequence[Load], names: Sequence[str], key: str, label: str, caption: str) -> bytes:
    panels = {
        "output_tokens_per_s": "output tokens/s",
        "median_tpot_ms": "ms a token, median",
        "p99_ttft_ms": "ms to the first, p99",
    }
    column = new_axes(7.5, rows=len(panels))
    ticks = sorted({getattr(load, key) for load in loads})
    for axes, (panel, title) in zip(column, panels.items(), strict=True):
        for name, colour in zip(names, cycle(SET_COLOURS), strict=False):
            mine = [load for load in loads if load.configuration == name]
            points = sorted((getattr(load, key), getattr(load, panel)) for load in mine)
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=colour, label=name if axes is column[0] else None)
        axes.set_ylabel(title)
        axes.set_ylim(0, 1.08 * max(getattr(load, panel) for load in loads))
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    column[-1].set_xlabel(label)
    add_legend(column[0], columns=2)
    column[0].figure.supxlabel(caption, fontsize=8, color="#555555")
    return png(column[0].figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the loads; returns the exit code: 0, or 1 for a failure, after which what was measured is kept."""
    options = parse(argv)
    found: list[Load] = []
    rows = options.out / ROWS_NAME

    def keep(load: Load) -> None:
        found.append(load)
        with rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(load)) + "\n")

    problem, exit_code, origin = None, 0, provenance()
    end_on_sigterm()
    try:
        for item in parse_configurations(options.configurations, "DRAFT"):  # a mistyped name costs no download
            if item.does_without:
                raise ConfigError(
                    where=f"configuration {item.name}",
                    found="+drift=off",
                    expected="a decoder whose requests need no option, since bench_serving sends none",
                    fix="drop it here; bench.py has it",
                )
        fill_in_pair(options)
        servers = server_plans(parse_configurations(options.configurations, str(options.draft)))
        found += former(options)
        measure(servers, options, tuple(found), keep)
    except KeyboardInterrupt:
        problem, exit_code = "interrupted", EXIT_INTERRUPTED
    except (AdaptiveSpecError, OSError) as error:
        problem, exit_code = str(error), EXIT_FAILED
        tail = f"{error.log_tail}\n\n" if isinstance(error, ServerFailedError) else ""
        print(f"{tail}{error}", file=sys.stderr)
    if found:
        source = f"sglang.bench_serving on {options.prompts[0].path.name}, n = {options.num_prompts} requests a point"
        sizes = f"at most {options.max_new_tokens} tokens, {options.dtype}"
        try:
            pictures = figures(found, f"{source}\n{sizes}")
            write_whole(options.out / "load.csv", _csv(found).encode())
            for name, picture in pictures.items():
                write_whole(options.out / f"{name}.png", picture)
            html = render_template(
                "load.html",
                pictures=pictures,
                problem=problem,
                target=options.target,
                draft=options.draft,
                caption=f"{source}, {sizes}",
                loads=[asdict(load) | {"name": _name(load.concurrency, load.rate)} for load in found],
                origin=origin,
            )
            write_whole(options.out / REPORT_NAME, html.encode())
        except OSError as error:
            problem, exit_code = problem or str(error), exit_code or EXIT_FAILED
            print(error, file=sys.stderr)
    print(
        json.dumps(
            {"complete": problem is None, "problem": problem, "loads": [asdict(load) for load in found], **origin}
        )
    )
    return exit_code


def _csv(loads: Sequence[Load]) -> str:
    table = [asdict(load) for load in loads]
    lines = [",".join(table[0])]
    lines += [",".join("" if value is None else str(value) for value in row.values()) for row in table]
    return "\n".join(lines) + "\n"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="load.py",
        description=DESCRIPTION,
        epilog=f"configurations: {VALID_NAMES}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser, rounds=False)
    parser.set_defaults(num_prompts=32)
    parser.add_argument(
        "--configurations", nargs="+", default=["eagle3-3-1-4", "adaptive"], metavar="NAME", help="beside plain"
    )
    parser.add_argument("--concurrencies", type=positive, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument(
        "--rates", type=float, nargs="*", default=[], help="requests per second, open loop (default none)"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("out/load"), help="folder (default %(default)s)")
    parser.add_argument("server_args", nargs="*", metavar="-- ARGUMENT", help="further arguments of every server")
    options = parser.parse_args(argv)
    if not options.concurrencies and not options.rates:
        parser.error("found neither --concurrencies nor --rates; expected one load at least; fix: give either")
    if not all(0 < rate < math.inf for rate in options.rates):
        parser.error(f"found rates {options.rates}; expected positive numbers; fix: correct --rates")
    if max(options.concurrencies, default=1) > options.num_prompts:
        parser.error(
            f"found {max(options.concurrencies)} requests at once, and {options.num_prompts} prompts; expected as many prompts at "
            "least; fix: raise --num-prompts"
        )
    if len(options.prompts) > 1:
        parser.error("found several --prompts; expected one; fix: run it once for each")
    return options
