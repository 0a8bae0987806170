#!/usr/bin/env python
"""Shape policies replayed on the target's own answers, with a cost table instead of a clock.

A machine's noise can exceed what separates two policies. Which drafts a chain gets accepted does not depend on time, so
it is taken from the answers exactly (see `adaptivespec.offline.chain`), and each step is charged what the table says:
`--cost A,ROW,STEP,PLAIN` milliseconds for a verify step, more for each verified row and draft step, and a plain token.
Every `--policy` in every `--range`, and every static chain up to `--num-steps`, is replayed. The last line of the output
is one JSON object.

    python scripts/replay_policies.py --prompts gsm8k=gsm8k_train.jsonl --range 1-1-2:3-1-4 --range 3-1-4:7-1-8
"""

import argparse
import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from adaptivespec.command_line import run_main
from adaptivespec.config import AdaptiveConfig, resolve_start
from adaptivespec.offline.chain import confidence, hits
from adaptivespec.offline.pair import Pair
from adaptivespec.policy import POLICY_NAMES, StepResult, make_policy
from adaptivespec.prompt_files import add_arguments, fill_in_pair
from adaptivespec.shapes import TreeShape


class Cost(NamedTuple):
    """Milliseconds: of a verify step, of each row and draft step in it, and of a token of plain decoding."""

    verify: float
    row: float
    step: float
    plain: float

    @classmethod
    def parse(cls, text: str) -> "Cost":
        """For argparse."""
        return cls(*map(float, text.split(",")))

    def of(self, shape: TreeShape) -> float:
        """Milliseconds of a decode step."""
        return self.verify + self.row * shape.num_draft_tokens + self.step * shape.num_steps


class Chains(NamedTuple):
    """One answer: drafts accepted after each token, and the draft's confidence there."""

    hits: list[int]
    confidence: list[float]


def replay(config: AdaptiveConfig, answers: list[Chains], cost: Cost) -> tuple[float, float, Counter[str]]:
    """Speed over plain decoding, accept length (bonus token included), steps by shape."""
    policy = make_policy(config, resolve_start(config, None))
    tokens, milliseconds = 0, 0.0
    shapes: Counter[str] = Counter()
    for number, answer in enumerate(answers):
        policy.start(number, answer.confidence[0])
        at, last = 0, len(answer.hits) - 1
        while at < last:
            shape = policy.choose([number])
            accepted = min(answer.hits[at], shape.num_steps)
            shapes[str(shape)] += 1
            milliseconds += cost.of(shape)
            tokens += accepted + 1
            at += accepted + 1
            policy.observe(StepResult(number, shape, accepted, answer.confidence[min(at, last)]))
        policy.finish(number)
    return tokens * cost.plain / milliseconds, tokens / shapes.total(), shapes


def main() -> int:
    args = _parse_args()
    pair = Pair(str(args.target), str(args.draft))
    sets = {}
    for source in args.prompts:
        answers = pair.answers(source, args.out, args.skip, args.num_prompts, args.max_new_tokens)
        batches = (pair.batch(answer) for answer in tqdm(answers, desc=source.name) if answer.answer_ids)
        traces = (pair.trace(batch, args.num_steps) for batch in batches)
        sets[source.name] = [Chains(hits(trace), confidence(trace)) for trace in traces]
    report: dict[str, Any] = {"cost": args.cost._asdict(), "rows": {}}
    for label, config in _configs(args).items():
        results = {name: replay(config, answers, args.cost) for name, answers in sets.items()}
        shapes = sum((result[2] for result in results.values()), Counter())
        mean = math.prod(result[0] for result in results.values()) ** (1 / len(results))
        report["rows"][label] = {
            "geometric_mean": round(mean, 3),
            "ratio_to_plain": {name: round(result[0], 3) for name, result in results.items()},
            "accept_length": {name: round(result[1], 2) for name, result in results.items()},
            "shape_share": {shape: round(count / shapes.total(), 2) for shape, count in shapes.most_common()},
        }
        print(f"{label:24}{mean:8.3f}  {report['rows'][label]['ratio_to_plain']}  {dict(shapes.most_common(8))}")
    print(json.dumps(report))
    return 0


def _configs(args: Any) -> dict[str, AdaptiveConfig]:
    chains = [TreeShape(steps, 1, steps + 1) for steps in range(1, args.num_steps + 1)]
    found = {
        f"static {chain}": AdaptiveConfig.from_dict({"policy": "static", "shape": {"start": chain.to_list()}}).on("cpu")
        for chain in chains
    }
    for text in args.range:
        low, high = (TreeShape.parse(end).to_list() for end in text.split(":"))
        for policy in args.policy:
            data = {"policy": policy, "shape": {"range": {"low": low, "high": high}}}
            found[f"{policy} {text}"] = AdaptiveConfig.from_dict(data)
    return found


def _parse_args() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--num-steps", type=int, default=7, help="longest chain (%(default)s)")
    parser.add_argument("--range", action="append", default=[], metavar="LOW:HIGH", help="of chains, as 1-1-2:3-1-4")
    parser.add_argument(
        "--policy",
        nargs="+",
        choices=POLICY_NAMES,
        default=["dcs"],
        help="in every range (%(default)s); among chains talon always takes the deepest",
    )
    parser.add_argument(
        "--cost",
        type=Cost.parse,
        default=Cost(40.0, 6.0, 4.5, 50.0),
        help="the demo pair's on two CPU cores: %(default)s",
    )
    parser.add_argument("--out", type=Path, default=Path("out/replay"), help="folder for the answers (%(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    fill_in_pair(args)
    return args


if __name__ == "__main__":
    sys.exit(run_main(main))
