#!/usr/bin/env python
"""What the DRIFT memory brings on text that the draft was not trained on: accept length with and without it, offline.

For each set of prompts: the target's greedy answers (made once, kept in the out folder), then decoding with chains of
`--num-steps` drafts over the answers in their order, replayed exactly (see `adaptivespec.offline.chain`), by the draft
alone and with a memory that starts empty. `--skip` separates the prompts that settings are chosen on from those reported.
Each `--vary NAME=V,V,...` adds runs that differ from the setting in that one value. The last line of the output is one
JSON object.

    python scripts/drift_eval.py --prompts law=law.jsonl --prompts code=code.jsonl --num-prompts 16 --set gain=1.0 \\
        --vary threshold=0.8,0.9,0.95
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from adaptivespec.offline.chain import decode
from adaptivespec.offline.pair import Answer, Pair
from adaptivespec.offline.statistics import Interval, accept_length, gain
from adaptivespec.prompt_files import add_arguments, fill_in_pair
from drift.memory import DriftMemory
from drift.params import DriftParams

BASE = "memory"
WINDOW = 50  # steps that a point of the curves is the mean of


def main() -> int:
    args = _parse_args()
    settings = {BASE: args.params} | args.variants
    pair = Pair(str(args.target), str(args.draft))
    report: dict[str, Any] = {"setting": vars(args.params), "num_steps": args.num_steps, "sets": {}}
    curves = {}
    for source in args.prompts:
        answers = pair.answers(source, args)
        alone, runs, memories = _replay(pair, answers, settings, args.num_steps, source.name)
        report["sets"][source.name] = _summary(alone, runs, memories)
        curves[source.name] = {"draft alone": alone, BASE: runs[BASE]}
    report["mean_gain"] = {
        name: round(sum(each["runs"][name]["gain"][0] for each in report["sets"].values()) / len(report["sets"]), 4)
        for name in settings
    }
    (args.out / "drift_eval.json").write_text(json.dumps(report, indent=1))
    _plot(curves, args.out / "drift_eval.png")
    _print_table(report)
    print(json.dumps(report))
    return 0


def _replay(
    pair: Pair, answers: list[Answer], settings: dict[str, DriftParams], num_steps: int, name: str
) -> tuple[list[list[int]], dict[str, list[list[int]]], dict[str, DriftMemory]]:
    """Accepted drafts by prompt and step, of the draft alone and with each memory."""
    hidden, vocab = pair.draft.config["hidden_size"], pair.draft.config["draft_vocab_size"]
    memories = {label: DriftMemory(params, hidden, vocab, "cpu") for label, params in settings.items()}
    alone: list[list[int]] = []
    runs: dict[str, list[list[int]]] = {label: [] for label in settings}
    for answer in tqdm(answers, desc=f"{name}: decoding"):
        if len(answer.answer_ids) < 2:
            continue
        trace = pair.trace(answer, num_steps)
        alone.append(decode(trace))
        for label, memory in memories.items():
            runs[label].append(decode(trace, memory))
    return alone, runs, memories


def _summary(alone: list[list[int]], runs: dict[str, list[list[int]]], memories: dict[str, DriftMemory]) -> dict:
    return {
        "num_prompts": len(alone),
        "verify_steps": sum(map(len, alone)),
        "accept_length_alone": round(accept_length(alone), 4),
        "runs": {
            label: {
                "accept_length": round(accept_length(steps), 4),
                "gain": [round(x, 4) for x in gain(steps, alone)],
                "gain_last_half": [round(x, 4) for x in _last_half(steps, alone)],
                "hit_rate": round(_share(memories[label], "hits", "lookups"), 3),
                "slots": memories[label].occupancy()[0],
            }
            for label, steps in runs.items()
        },
    }


def _last_half(steps: list[list[int]], alone: list[list[int]]) -> Interval:
    half = len(alone) // 2
    return gain(steps[half:], alone[half:])


def _share(memory: DriftMemory, part: str, whole: str) -> float:
    count = dict(zip(memory.COUNTERS, memory.counters.sum(0).tolist(), strict=True))
    return count[part] / max(1, count[whole])


def _plot(curves: dict[str, dict[str, list[list[int]]]], file: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, len(curves), figsize=(4 * len(curves), 3.4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (name, lines) in zip(axes[0], curves.items(), strict=True):
        for label, steps in lines.items():
            flat = torch.tensor([float(1 + count) for prompt in steps for count in prompt])
            means = flat.unfold(0, min(WINDOW, len(flat)), 1).mean(1)
            axis.plot(range(len(flat) - len(means), len(flat)), means, label=label)
        axis.set_title(f"{name}, n = {len(steps)} prompts")
        axis.set_xlabel("verify steps")
    axes[0][0].set_ylabel(f"accept length, mean of {WINDOW} steps")
    axes[0][0].legend()
    figure.savefig(file, dpi=120)


def _print_table(report: dict[str, Any]) -> None:
    sets = report["sets"]
    print(f"\n{'':22}" + "".join(f"{name:>26}" for name in sets) + f"{'mean gain':>12}")
    print(f"{'draft alone':22}" + "".join(f"{each['accept_length_alone']:>26.3f}" for each in sets.values()))
    for label, mean in report["mean_gain"].items():
        cells = ""
        for each in sets.values():
            value, low, high = each["runs"][label]["gain"]
            cells += f"{f'{value:+.3f} ({low:+.3f} {high:+.3f})':>26}"
        print(f"{label:22}{cells}{mean:>+12.4f}")
    print(
        "accept length, bonus token included; below it what a memory adds, with 95% bootstrap intervals over prompts\n"
    )


def _setting(text: str) -> tuple[str, list[float]]:
    name, separator, values = text.partition("=")
    if not separator or name not in vars(DriftParams()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE, NAME among {', '.join(vars(DriftParams()))}")
    kind = type(getattr(DriftParams(), name))
    return name, [kind(value) for value in values.split(",")]


def _parse_args() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--num-steps", type=int, default=3, help="drafts of a chain (%(default)s)")
    parser.add_argument("--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="of the memory")
    parser.add_argument("--vary", type=_setting, action="append", default=[], metavar="NAME=V,V", help="one at a time")
    parser.add_argument("--out", type=Path, default=Path("out/drift"), help="folder (%(default)s)")
    args = parser.parse_args()
    args.params = replace(DriftParams(num_banks=1), **{name: values[0] for name, values in args.set})
    args.variants = {
        f"{name} {value:g}": replace(args.params, **{name: value})
        for name, values in args.vary
        for value in values
        if value != getattr(args.params, name)
    }
    args.out.mkdir(parents=True, exist_ok=True)
    fill_in_pair(args)
    return args


if __name__ == "__main__":
    sys.exit(main())
