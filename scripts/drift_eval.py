#!/usr/bin/env python
"""What the DRIFT memory brings on text that the draft was not trained on: accept length with and without it, offline.

For each set of prompts: the target's greedy answers (made once, kept in the out folder), then decoding with chains of
`--num-steps` drafts over the answers in their order, replayed exactly (see `adaptivespec.offline.chain`), by the draft
alone and with a memory that starts empty. Prompts are taken in an order drawn with `--seed`, since files are sorted by kind:
the first `--skip` of each set are for choosing settings, and for tuning; those after them are reported.

`--vary NAME=V,V` adds runs that differ from the setting in that one value. `--tune STEPS` adds two references that train:
a draft tuned beforehand on the answers to the skipped prompts, and one that takes an optimizer step on every answer once it
is given (on all its tokens). Recovery is what the memory gains over the draft alone as a share of what tuning beforehand gains,
told where that is 0.03 or more on four prompts at least, of everything and of the prompts that begin after 600 verify steps. `--general NAME` says which
set is what the draft was trained on, and adds a slow blend from it into each other set, and a sequence that switches sets every
three prompts. The last line of the output is one JSON object.

    python scripts/drift_eval.py --prompts law=law.jsonl --prompts code=code.jsonl --skip 32 --num-prompts 32 --tune 60
    python scripts/drift_eval.py --prompts law=law.jsonl --num-prompts 32 --vary threshold=0.8,0.9,0.95
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from adaptivespec.command_line import run_main
from adaptivespec.draft_training.model import Eagle3Draft
from adaptivespec.draft_training.ttt import Batch
from adaptivespec.offline.chain import Trace, decode, rejected_residuals
from adaptivespec.offline.pair import Pair
from adaptivespec.offline.statistics import Case, Interval, Steps, accept_length, gain, recovery
from adaptivespec.offline.tuning import Tuner, tuned_draft
from adaptivespec.prompt_files import PromptFile, add_arguments, fill_in_pair
from drift.memory import DriftMemory
from drift.params import DriftParams

ALONE, BASE, TUNED, ONLINE = "draft alone", "memory", "tuned beforehand", "tuned while serving"
WINDOW = 50  # steps that a point of the curves is the mean of
SWITCH_EVERY = 3  # prompts
SETTLED = 600  # verify steps of the draft alone
MIN_PROMPTS = 4  # for a share to be told of them
MIN_WHOLE = 0.03  # what tuning must gain for a share of it to be told


def main() -> int:
    args = _parse_args()
    pair = Pair(str(args.target), str(args.draft))
    sets = {source.name: _batches(pair, source, args, args.skip, args.num_prompts) for source in args.prompts}
    tuned: dict[str, Eagle3Draft] = {}
    if args.tune:
        for source in args.prompts:
            before = _batches(pair, source, args, 0, args.skip)
            tuned[source.name] = tuned_draft(
                pair.draft, pair.embed, before, args.tune, args.learning_rate, args.num_steps
            )
    report: dict[str, Any] = {"setting": vars(args.params), "num_steps": args.num_steps, "sets": {}}
    found: dict[str, dict[str, list[list[int]]]] = {}
    blends = {_blend(args.general, name): name for name in sets}
    for name, answers in (sets | _sequences(sets, args.general)).items():
        found[name], memories, spectrum = _replay(pair, answers, args, tuned.get(blends.get(name, name)), name)
        report["sets"][name] = _summary(found[name], memories) | {"energy_of_top_directions": spectrum}
    shifted = [name for name in sets if name != args.general]
    report["mean_gain"] = {
        label: round(fmean(report["sets"][name]["runs"][label]["gain"][0] for name in shifted), 4) for label in memories
    }
    if args.tune:
        report["mean_recovery"] = {
            label: _recoveries([found[name] for name in shifted], label)
            for label in found[shifted[0]]
            if label not in (ALONE, TUNED)
        }
    if args.general is not None:
        of_general = report["sets"][args.general]["accept_length_alone"]
        report["shift_penalty"] = {
            name: round(of_general - report["sets"][name]["accept_length_alone"], 4) for name in shifted
        }
    curves = {
        name: {label: runs[label] for label in (ALONE, BASE, TUNED, ONLINE) if label in runs}
        for name, runs in found.items()
    }
    (args.out / "drift_eval.json").write_text(json.dumps(report, indent=1))
    _plot(curves, args.out / "drift_eval.png")
    _print_table(report)
    print(json.dumps(report))
    return 0


def _batches(pair: Pair, source: PromptFile, args: Any, skip: int, count: int) -> list[Batch]:
    answers = pair.answers(source, args.out, skip, count, args.max_new_tokens)
    return [
        pair.batch(answer) for answer in tqdm(answers, desc=f"{source.name}: states") if len(answer.answer_ids) >= 2
    ]


def _blend(general: str | None, name: str) -> str:
    return f"{general} into {name}"


def _sequences(sets: dict[str, list[Batch]], general: str | None) -> dict[str, list[Batch]]:
    """Traffic that changes: blends of the general set into each other, and all sets by turns."""
    if general is None:
        return {}
    rng, found = random.Random(0), {}
    for name, answers in sets.items():
        if name != general:
            count = min(len(answers), len(sets[general]))
            found[_blend(general, name)] = [
                answers[i] if rng.random() < i / (count - 1) else sets[general][i] for i in range(count)
            ]
    rounds = min(map(len, sets.values())) // SWITCH_EVERY
    found["switching"] = [
        answer
        for turn in range(rounds)
        for answers in sets.values()
        for answer in answers[turn * SWITCH_EVERY : (turn + 1) * SWITCH_EVERY]
    ]
    return found


def _replay(
    pair: Pair, answers: list[Batch], args: Any, tuned: Eagle3Draft | None, name: str
) -> tuple[dict[str, list[list[int]]], dict[str, DriftMemory], dict[str, float]]:
    """Accepted drafts by prompt and step, of each method; the memories; the energy of the residuals' directions."""
    hidden, vocab = pair.draft.config["hidden_size"], pair.draft.config["draft_vocab_size"]
    settings = {BASE: args.params} | args.variants
    ids, target_vocab = pair.draft.draft_token_ids, len(pair.embed)
    memories = {
        label: DriftMemory(params, hidden, vocab, "cpu", ids, target_vocab) for label, params in settings.items()
    }
    methods: dict[str, Callable[[Batch, Trace], list[int]]] = {ALONE: lambda answer, trace: decode(trace)}
    for label, memory in memories.items():
        methods[label] = lambda answer, trace, memory=memory: decode(trace, memory)
    if tuned is not None:
        methods[TUNED] = lambda answer, trace: decode(pair.trace(answer, args.num_steps, tuned))
    if args.tune:
        tuner = Tuner(pair.draft, pair.embed, args.learning_rate, args.num_steps)

        def online(answer: Batch, trace: Trace) -> list[int]:
            steps = decode(pair.trace(answer, args.num_steps, tuner.draft))
            tuner.step([answer])
            return steps

        methods[ONLINE] = online
    runs: dict[str, list[list[int]]] = {label: [] for label in methods}
    residuals = []
    for answer in tqdm(answers, desc=f"{name}: decoding"):
        trace = pair.trace(answer, args.num_steps)
        residuals.append(rejected_residuals(trace, args.params))
        for label, method in methods.items():
            runs[label].append(method(answer, trace))
    return runs, memories, _energy(torch.cat(residuals))


def _energy(residuals: torch.Tensor, directions: tuple[int, ...] = (16, 64)) -> dict[str, float]:
    """Share of the squared length of the residuals in their top singular directions."""
    squares = torch.linalg.svdvals(residuals).square()
    return {str(count): round((squares[:count].sum() / squares.sum()).item(), 3) for count in directions}


def _summary(runs: dict[str, list[list[int]]], memories: dict[str, DriftMemory]) -> dict[str, Any]:
    alone = runs[ALONE]

    def of(label: str, steps: Steps) -> dict[str, Any]:
        found: dict[str, Any] = {
            "accept_length": round(accept_length(steps), 4),
            "gain": _rounded(gain(steps, alone)),
        }
        start = _settled(alone)
        if len(alone) - start >= MIN_PROMPTS:
            found["gain_settled"] = _rounded(gain(steps[start:], alone[start:]))
        if TUNED in runs and label != TUNED:
            found |= _recoveries([runs], label)
        if label in memories:
            counts = dict(zip(DriftMemory.COUNTERS, memories[label].counters.sum(0).tolist(), strict=True))
            found["hit_rate"] = round(counts["hits"] / max(1, counts["lookups"]), 3)
            found["slots"] = memories[label].occupancy()[0]
        return found

    return {
        "num_prompts": len(alone),
        "verify_steps": sum(map(len, alone)),
        "accept_length_alone": round(accept_length(alone), 4),
        "runs": {label: of(label, steps) for label, steps in runs.items() if label != ALONE},
    }


def _settled(alone: Steps) -> int:
    """The first prompt that begins after `SETTLED` verify steps."""
    before = list(accumulate(map(len, alone), initial=0))
    return next((place for place, steps in enumerate(before) if steps >= SETTLED), len(alone))


def _recoveries(scenarios: Sequence[dict[str, list[list[int]]]], label: str) -> dict[str, Any]:
    """Over the scenarios in which tuning beforehand gains enough; with how many these are."""
    cases = [Case(runs[label], runs[ALONE], runs[TUNED]) for runs in scenarios if TUNED in runs]
    settled = [Case(*(steps[_settled(case.without) :] for steps in case)) for case in cases]
    found = {}
    for key, some in (("recovery", cases), ("recovery_settled", settled)):
        told = [
            case
            for case in some
            if len(case.without) >= MIN_PROMPTS and gain(case.reference, case.without).value >= MIN_WHOLE
        ]
        if told:
            found |= {key: _rounded(recovery(told)), f"{key}_scenarios": len(told)}
    return found


def _rounded(interval: Interval) -> list[float]:
    return [round(x, 4) for x in interval]


def _plot(curves: dict[str, dict[str, list[list[int]]]], file: Path) -> None:
    import matplotlib.pyplot as plt

    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4 * columns, 3 * rows), sharey=True, squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(curves) :]:
        axis.set_visible(False)
    for axis, (name, lines) in zip(axes.flat, curves.items(), strict=False):
        for label, steps in lines.items():
            # By tokens, not by steps: so that at one place all methods are at the same text.
            flat = torch.tensor([float(1 + count) for prompt in steps for count in prompt])
            means = flat.unfold(0, min(WINDOW, len(flat)), 1).mean(1)
            axis.plot(flat.cumsum(0)[len(flat) - len(means) :], means, label=label, linewidth=1)
        axis.set_title(f"{name}, n = {len(lines[ALONE])} prompts", fontsize=9)
        axis.set_xlabel("tokens", fontsize=8)
    axes[0][0].set_ylabel(f"accept length, mean of {WINDOW} steps", fontsize=8)
    axes[0][0].legend(fontsize=7)
    figure.savefig(file, dpi=120)


def _print_table(report: dict[str, Any]) -> None:
    for name, each in report["sets"].items():
        print(f"\n{name}: {each['num_prompts']} prompts, draft alone {each['accept_length_alone']:.3f}")
        for label, run in each["runs"].items():
            value, low, high = run["gain"]
            line = f"  {label:22}{run['accept_length']:8.3f}  {value:+.3f} ({low:+.3f} to {high:+.3f})"
            if "recovery" in run:
                line += "  recovery {:.2f} ({:.2f} to {:.2f})".format(*run["recovery"])
            print(line)
    for label, found in report.get("mean_recovery", {}).items():
        if found:
            print(f"\nrecovery over the sets, {label}: {found}")
    print(
        "\naccept length, bonus token included; what a method adds, and its share of what tuning beforehand adds, with "
        "95% bootstrap intervals over prompts\n"
    )


def _setting(text: str) -> tuple[str, list[float]]:
    name, separator, values = text.partition("=")
    if not separator or name not in vars(DriftParams()):
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE, NAME among {', '.join(vars(DriftParams()))}")
    kind = type(getattr(DriftParams(), name))
    return name, [kind(value) for value in values.split(",")]


def _parse_args() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, rounds=False)
    parser.add_argument("--num-steps", type=int, default=3, help="drafts of a chain (%(default)s)")
    parser.add_argument("--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="of the memory")
    parser.add_argument("--vary", type=_setting, action="append", default=[], metavar="NAME=V,V", help="one at a time")
    parser.add_argument(
        "--tune", type=int, default=0, metavar="STEPS", help="of the draft tuned beforehand; 0: no tuning"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of all tuning (%(default)s)")
    parser.add_argument("--general", metavar="NAME", help="the set that is like what the draft was trained on")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the prompts (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/drift"), help="folder (%(default)s)")
    args = parser.parse_args()
    args.prompts = [replace(source, seed=args.seed) for source in args.prompts]
    args.params = replace(DriftParams(num_banks=1), **{name: values[0] for name, values in args.set})
    args.variants = {
        f"{name} {value:g}": replace(args.params, **{name: value})
        for name, values in args.vary
        for value in values
        if value != getattr(args.params, name)
    }
    if args.tune and not args.skip:
        parser.error("--tune: found no prompts to tune on; expected --skip of at least 1; fix: give --skip")
    if args.general is not None and args.general not in {source.name for source in args.prompts}:
        parser.error(f"--general: found {args.general!r}; expected the name of one of --prompts; fix: correct it")
    if args.general is not None and args.num_prompts < SWITCH_EVERY:
        parser.error(
            f"--general: found {args.num_prompts} prompts; expected {SWITCH_EVERY} or more; fix: raise --num-prompts"
        )
    if args.general is not None and len(args.prompts) == 1:
        parser.error("--general: found no other set; expected one that traffic shifts to; fix: give more --prompts")
    args.out.mkdir(parents=True, exist_ok=True)
    fill_in_pair(args)
    return args


if __name__ == "__main__":
    sys.exit(run_main(main))
