"""Serve the demo pair with real SGLang servers and compare decoders: plain, static EAGLE-3, ADAPTIVE.

Ends with a table, OUT/report.html with plots, and one JSON line as the last line of stdout.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from adaptivespec.command_line import EXIT_FAILED, EXIT_INTERRUPTED, positive, run_main
from adaptivespec.demo.configurations import speculative_configurations
from adaptivespec.demo.measure import Measurements
from adaptivespec.demo.prompts import SOURCES, TRACE_PROMPT, prompt_sets
from adaptivespec.demo.session import Plan, measure
from adaptivespec.launch import ServerFailedError

FULL = {"prompts": 4, "tokens": 64}
QUICK = {"prompts": 1, "tokens": 40}
TRACE_TOKENS = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code: 0, 1 for a failure, 130 when interrupted.

    Once measuring has begun, a report is written in each case.
    """
    options = parse(argv)
    return run_main(lambda: run(options, *prepare_pair(options)))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `--prompts` and `--tokens` are filled from `FULL` or `QUICK` where they are not given."""
    parser = argparse.ArgumentParser(
        prog="demo.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="OMP_NUM_THREADS, where set, reaches the servers. ADAPTIVESPEC_CACHE names the cache folder "
        "(default ~/.cache/adaptivespec).\nArguments after -- go to every server, for example: -- --attention-backend triton",
    )
    parser.add_argument("--quick", action="store_true", help="SGLang's default and ADAPTIVE only, 1 prompt a set")
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), help="folder for the results (default %(default)s)"
    )
    parser.add_argument("--target", help="folder or hub name of another target; needs --draft")
    parser.add_argument("--draft", help="folder or hub name of its EAGLE-3 draft; needs --target")
    parser.add_argument(
        "--prompts", type=positive, help=f"of each set, which hold 8, 11 and 10 (default {FULL['prompts']})"
    )
    parser.add_argument("--tokens", type=positive, help=f"cap of each answer (default {FULL['tokens']})")
    parser.add_argument("--rounds", type=positive, default=1, help="passes over the prompts (default %(default)s)")
    parser.add_argument("server_args", nargs="*", metavar="-- ARGUMENT", help="further arguments of every server")
    options = parser.parse_args(argv)
    if (options.target is None) != (options.draft is None):
        parser.error("found one of --target and --draft; expected both or neither; fix: give the other one as well")
    preset = QUICK if options.quick else FULL
    options.prompts = options.prompts or preset["prompts"]
    options.tokens = options.tokens or preset["tokens"]
    return options


def prepare_pair(options: argparse.Namespace) -> tuple[str, str, dict[str, str]]:
    """Target, draft, and where they come from: those of the command line, else the demo pair, made where absent."""
    if options.target is not None:
        return options.target, options.draft, {"target": options.target, "draft": options.draft}
    # Imported here: the conversion brings in torch.
    from adaptivespec.demo.draft import draft_folder
    from adaptivespec.demo.target import FOLDER_NAME, REQUIREMENT, prepare_target

    sources = {
        "target": f"{FOLDER_NAME} (Apache-2.0), dequantised from PyPI {REQUIREMENT}",
        "draft": "EAGLE-3 draft shipped with the package; its record is TRAINING.json beside it",
    }
    return str(prepare_target()), str(draft_folder()), sources


def run(options: argparse.Namespace, target: str, draft: str, sources: dict[str, str]) -> int:
    """Measure, then print the table, write the report and print the JSON line, also after a failure or Ctrl-C."""
    from rich.console import Console
    from transformers import AutoTokenizer

    from adaptivespec.demo.report import write_report
    from adaptivespec.demo.terminal import TerminalProgress, results_table
    from adaptivespec.prompt_files import chat_token_ids
    from adaptivespec.provenance import provenance, thread_note

    tokenizer = AutoTokenizer.from_pretrained(target)
    plan = Plan(
        target=target,
        configurations=speculative_configurations(draft, quick=options.quick),
        prompts={name: chat_token_ids(tokenizer, turns) for name, turns in prompt_sets(options.prompts).items()},
        max_new_tokens=options.tokens,
        rounds=options.rounds,
        trace_prompt=chat_token_ids(tokenizer, [TRACE_PROMPT])[0],
        trace_tokens=TRACE_TOKENS,
        server_args=options.server_args,
        logs=options.out / "logs",
    )
    found = Measurements([configuration.name for configuration in plan.configurations], list(plan.prompts))
    origin = provenance()
    exit_code = 0
    start = time.monotonic()
    with TerminalProgress(plan.num_pairs) as progress:
        progress.say(f"{plan.num_pairs} pairs of answers; {thread_note()}")
        try:
            measure(plan, found, progress)
        except KeyboardInterrupt:
            found.problem, exit_code = "it was interrupted.", EXIT_INTERRUPTED
        except OSError as error:
            found.problem, exit_code = f"{error}.", EXIT_FAILED
            progress.say(str(error))
        except ServerFailedError as error:
            found.problem, exit_code = f"{error}.", EXIT_FAILED
            progress.say(f"{error.log_tail}\n\n{error}")
    found.seconds = time.monotonic() - start
    Console(soft_wrap=True).print(results_table(found))
    report = None
    try:
        path = write_report(found, origin, {**sources, **SOURCES, "shapes over time": TRACE_PROMPT}, options.out)
        report = str(path.resolve())
        print(f"report: {report}")
    except OSError as error:
        exit_code = exit_code or EXIT_FAILED
        print(f"found {error}; expected to write the report; fix: free some space, then run it again", file=sys.stderr)
    print(json.dumps({**found.headline(), "report": report}))
    return exit_code
