"""The benchmark's command line."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from tqdm import tqdm

from adaptivespec.bench.configurations import VALID_NAMES, parse_configurations
from adaptivespec.bench.grading import Grader, grade, grader_of
from adaptivespec.bench.plan import Plan
from adaptivespec.bench.report import write_report
from adaptivespec.bench.run import measure
from adaptivespec.bench.store import Store
from adaptivespec.bench.tables import summarise
from adaptivespec.bench.terminal import BarProgress, results_tables
from adaptivespec.command_line import EXIT_FAILED, EXIT_INTERRUPTED, positive, run_main
from adaptivespec.errors import AdaptiveSpecError, ConfigError
from adaptivespec.launch import ServerFailedError
from adaptivespec.prompt_files import add_arguments, chat_token_ids, check_lengths, fill_in_pair, rows_by_name
from adaptivespec.provenance import provenance, thread_note

DEFAULT_CONFIGURATIONS = ("eagle3-default", "eagle3-3-1-4", "sglang-adaptive", "adaptive", "adaptive+kappa=0.2")
DESCRIPTION = """Decoders by name on real SGLang servers, interleaved, as a ratio to plain decoding on the same prompts.

Writes OUT/report.html, plots, results.json, results.csv and requests.jsonl, a row for each request as it is measured. The
same command goes on where it was stopped. The last line of the output is one JSON object."""
EPILOG = f"""configurations: {VALID_NAMES}.

OMP_NUM_THREADS, where set, reaches the servers. Arguments after -- go to every server.

    python scripts/bench.py --prompts gsm8k=gsm8k_test.jsonl --prompts code=humaneval.jsonl --rounds 5 \\
        --configurations eagle3-3-1-4 adaptive talon adaptive+drift --batch-sizes 1 4"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 0, 1 for a failure, 130 when interrupted.

    Once measuring has begun, a report is written in each case.
    """
    options = parse(argv)

    def command() -> int:
        plan, graders, words = prepare(options)
        return run(plan, Store.open(options.out, plan.settings(), provenance()), words, graders)

    return run_main(command)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench.py", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument(
        "--configurations",
        nargs="+",
        default=DEFAULT_CONFIGURATIONS,
        metavar="NAME",
        help=f"beside plain, see below (default {' '.join(DEFAULT_CONFIGURATIONS)})",
    )
    parser.add_argument(
        "--batch-sizes", type=positive, nargs="+", default=[1], help="requests at the same time (default 1)"
    )
    parser.add_argument(
        "--beside",
        type=positive,
        default=5,
        help="servers that are up at once beside plain's; more configurations follow in blocks (default %(default)s)",
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--grade",
        action="store_true",
        help="say which answers are right: mathematics by math-verify, HumanEval by running its tests, which runs what the "
        "model wrote on this machine, in a process of its own with a time limit",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/bench"), help="folder for the results (default %(default)s)"
    )
    parser.add_argument("server_args", nargs="*", metavar="-- ARGUMENT", help="further arguments of every server")
    return parser.parse_args(argv)


@dataclass(frozen=True)
class Words:
    """What a report needs beside the figures.

    Args:
        sources: where models and prompts come from, by name.
        decode: token ids to text.
    """

    sources: dict[str, str]
    decode: Callable[[list[int]], str]

    @classmethod
    def of(cls, tokenizer: Any, sources: dict[str, str]) -> "Words":
        """With a tokenizer's texts, special tokens left out."""
        return cls(sources, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)))


Graders = dict[str, list[Grader | None]]
"""Each task's, by the place of the prompt."""


def prepare(options: argparse.Namespace) -> tuple[Plan, Graders, Words]:
    """The plan of a command line, what grades the answers, if anything, and words for the report.

    Raises:
        AdaptiveSpecError: a wrong name, path or number, before any server is started.
    """
    rows = rows_by_name(options.prompts, options.num_prompts, options.skip)
    graders = {name: [grader_of(row) for row in some] for name, some in rows.items()} if options.grade else {}
    if options.grade and not any(filter(None, chain.from_iterable(graders.values()))):
        raise ConfigError(
            where="--grade",
            found=f"nothing to grade by in any row of {', '.join(graders)}",
            expected="an `answer` in text, or HumanEval's `test` and `entry_point`",
            fix="drop --grade, or give such rows",
        )
    # Names before models: a mistyped one costs no download.
    parse_configurations(list(options.configurations), "DRAFT")
    fill_in_pair(options)
    target, draft = str(options.target), str(options.draft)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ConfigError(
            where="--target", found=f"{target} ({error})", expected="a model with its tokenizer", fix="correct it"
        ) from error
    tasks = {name: chat_token_ids(tokenizer, [row["text"] for row in some]) for name, some in rows.items()}
    if "--context-length" not in options.server_args:
        check_lengths(options.prompts, tasks, options.skip, options.max_new_tokens, target)
    plan = Plan(
        target=target,
        draft=draft,
        configurations=parse_configurations(list(options.configurations), draft),
        tasks=tasks,
        batch_sizes=options.batch_sizes,
        max_new_tokens=options.max_new_tokens,
        rounds=options.rounds,
        num_beside=options.beside,
        dtype=options.dtype,
        server_args=options.server_args,
    )
    first, last = options.skip + 1, options.skip + options.num_prompts
    files = {
        source.name: f"{source.path.name}, rows {first}-{last}, each as one user turn of the chat template, no shots"
        for source in options.prompts
    }
    return plan, graders, Words.of(tokenizer, {"target": target, "draft": draft, **files})


def run(plan: Plan, store: Store, words: Words, graders: Graders | None = None) -> int:
    """Measure, write the report and print the JSON line, also after a failure or Ctrl-C; returns the exit code."""
    problem, exit_code = "", 0
    progress = BarProgress(plan.num_cells)
    progress.say(f"{plan.num_cells} cells; {thread_note()}\n")
    try:
        measure(plan, store, progress)
    except KeyboardInterrupt:
        problem, exit_code = "it was interrupted.", EXIT_INTERRUPTED
    except AdaptiveSpecError as error:
        problem, exit_code = f"{error}.", EXIT_FAILED
        tail = f"{error.log_tail}\n\n" if isinstance(error, ServerFailedError) else ""
        progress.say(f"{tail}{error}")
    except OSError as error:  # a log or a configuration file that cannot be written
        found = (
            f"{store.out}: found {error}; expected to be able to write there; fix: free some space, then run it again"
        )
        problem, exit_code = f"{found}.", EXIT_FAILED
        progress.say(found)
    finally:
        progress.close()
    grades = None
    try:
        answers = [row for rows in store.cells.values() for row in rows]
        if graders:
            grades = grade(tqdm(answers, desc="grading"), graders, words.decode)
    except KeyboardInterrupt:
        problem, exit_code = problem or "it was interrupted while answers were graded.", EXIT_INTERRUPTED
    summaries = summarise(store, [item.name for item in plan.configurations], grades)
    for table in results_tables(summaries):
        Console(soft_wrap=True).print(table)
    try:
        report, line = write_report(plan, store, summaries, words.sources, problem, words.decode)
    except OSError as error:
        print(
            f"{store.out}: found {error.strerror or error}; expected to write the report; fix: free some space and run the "
            "same command again; what was measured is in its requests.jsonl",
            file=sys.stderr,
        )
        print(json.dumps({"complete": False, "problem": problem or "the report could not be written", "report": None}))
        return exit_code or EXIT_FAILED
    print(f"report: {report.resolve()}")
    print(json.dumps({**line, "report": str(report.resolve())}))
    return exit_code
