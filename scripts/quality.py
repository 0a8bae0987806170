#!/usr/bin/env python
"""What near misses cost in quality and bring in speed: strict answers and those at several kappas, to the same prompts.

One ADAPTIVE server runs; kappa is changed between requests, the order rotating from prompt to prompt, and every prompt is
in the prefix cache, so that a request is decoding. Of each answer: agreement with the strict one until they part, the
target's log-likelihood per token against the strict answer's, length ratio, share of repeated 4-grams, whether it hit the
length cap, the promoted tokens, and, where the rows have an `answer` that is a number or ends in one after `####` as GSM8K's, whether the
last number of the answer is that number. The last line of the output is one JSON object.

    python scripts/quality.py --prompts gsm8k=gsm8k_test.jsonl --prompts humaneval=humaneval.jsonl --num-prompts 8

FLy's rule, `{"verifier": "fly"}` in a --config file, takes misses at any kappa above 0: one is enough, `--kappas 1e-9`.
"""

import argparse
import json
import re
import statistics
import sys
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import AutoTokenizer

from adaptivespec.bench.run import set_state
from adaptivespec.command_line import run_main
from adaptivespec.config import AdaptiveConfig, MarginConfig
from adaptivespec.errors import AdaptiveSpecError
from adaptivespec.launch import Server, named_failure, speculation_args
from adaptivespec.prompt_files import add_arguments, chat_token_ids, fill_in_pair, rows_by_name
from adaptivespec.provenance import provenance
from adaptivespec.reports import write_whole
from adaptivespec.sglang_plugin.admin import KAPPA_KEY, STRICT

KAPPAS = (0.9, 0.7, 0.5, 0.3, 0.2, 0.1)
_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
PANELS = {
    "agreement": "tokens before the answers part, share",
    "log_likelihood_gap": "target's log-likelihood against strict, nats a token",
    "length_ratio": "length over strict's",
    "repetition": "repeated 4-grams, share",
    "hit_cap": "answers at the length cap, share",
    "promoted_per_1000": "promoted tokens per 1000",
}


@dataclass(frozen=True)
class Record:
    """One answer. `log_likelihood` is the target's, nats a token; `is_right` None where there is no gold answer."""

    prompt_set: str
    prompt: int
    round: int
    kappa: float
    ids: list[int]
    seconds: float
    verify_steps: int
    accepted: int
    promoted: int
    hit_cap: bool
    log_likelihood: float
    is_right: bool | None


def main() -> int:
    args = _parse_args()
    rows = rows_by_name(args.prompts, args.num_prompts, args.skip)
    fill_in_pair(args)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    config = AdaptiveConfig.from_json_file(args.config)
    command = ["--dtype", args.dtype, "--sleep-on-idle", "--max-total-tokens", "20000"]
    command += speculation_args("ADAPTIVE", args.draft)
    if args.config is not None:
        command += ["--speculative-adaptive-config", str(args.config)]
    records: list[Record] = []
    problem: AdaptiveSpecError | OSError | KeyboardInterrupt | None = None
    try:
        with Server(args.target, command, log=args.out.with_suffix(".log")) as server:
            _measure(server, tokenizer, rows, args, records)
    except (AdaptiveSpecError, OSError, KeyboardInterrupt) as error:
        problem = error  # raised again once what was measured is written
    if problem is not None and not records:
        raise problem
    report = {
        "complete": problem is None,
        "by_set": {name: summarise([r for r in records if r.prompt_set == name]) for name in rows},
        "all": summarise(records),
        "config": config.to_dict(),
        **{name: getattr(args, name) for name in ("dtype", "rounds", "skip")},
        **provenance(),
        "num_prompts": args.num_prompts,
        "max_new_tokens": args.max_new_tokens,
    }
    _print_table(report["all"])
    print(json.dumps(report | {"out": str(args.out)}), flush=True)
    write_whole(args.out, json.dumps(report, indent=1).encode())
    names = ", ".join(source.path.name for source in args.prompts)
    write_whole(args.out.with_suffix(".png"), figure(report["all"], f"{names}; {args.out.name}"))
    if problem is not None:
        raise problem
    return 0


def _measure(server: Server, tokenizer: Any, rows: dict[str, list[dict]], args: Any, records: list[Record]) -> None:
    """Append a record for each answer, those of a prompt in one go."""
    kappas = [STRICT, *args.kappas]
    with tqdm(total=args.rounds * len(kappas) * sum(map(len, rows.values())), desc="answers") as bar:
        for round_number in range(args.rounds):
            for name, some in rows.items():
                for number, row in enumerate(some):
                    (ids,) = chat_token_ids(tokenizer, [row["text"]])
                    _generate(server, ids, 8)  # puts the prompt into the prefix cache
                    start = (number + round_number) % len(kappas)
                    of_prompt = []
                    for kappa in kappas[start:] + kappas[:start]:
                        set_state(server, KAPPA_KEY, kappa)
                        answer = _generate(server, ids, args.max_new_tokens)
                        meta = answer["meta_info"]
                        of_prompt.append(
                            Record(
                                prompt_set=name,
                                prompt=number,
                                round=round_number,
                                kappa=kappa,
                                ids=answer["output_ids"],
                                seconds=meta["e2e_latency"],
                                verify_steps=meta.get("spec_verify_ct", 0),
                                accepted=meta.get("spec_num_correct_drafts", 0),
                                promoted=meta.get("spec_margin", {}).get("num_promoted", 0),
                                hit_cap=meta["finish_reason"]["type"] == "length",
                                log_likelihood=_log_likelihood(server, ids, answer["output_ids"]),
                                is_right=is_right(answer["text"], row.get("answer")),
                            )
                        )
                        bar.update()
                    records += of_prompt
                    with args.out.with_suffix(".jsonl").open("a", encoding="utf-8") as file:
                        file.write("".join(json.dumps(asdict(record)) + "\n" for record in of_prompt))


def _generate(server: Server, ids: list[int], max_new_tokens: int) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": max_new_tokens}
    return _post(server, {"input_ids": ids, "sampling_params": params})


def _post(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    with named_failure(server):
        answer: dict[str, Any] = server.post("/generate", body)
    return answer


def _log_likelihood(server: Server, prompt: list[int], answer: list[int]) -> float:
    body = {"input_ids": prompt + answer, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    body |= {"return_logprob": True, "logprob_start_len": len(prompt) - 1}
    scored = _post(server, body)["meta_info"]["input_token_logprobs"][-len(answer) :]
    return statistics.fmean(each[0] for each in scored)


def is_right(text: str, gold: Any) -> bool | None:
    """Whether the last number of an answer is the gold answer; None where that, after GSM8K's ``####``, is no number."""
    wanted = gold.rpartition("####")[2].strip() if isinstance(gold, str) else ""
    if not re.fullmatch(_NUMBER, wanted):
        return None
    found = re.findall(_NUMBER, text)
    return bool(found) and float(found[-1].replace(",", "")) == float(wanted.replace(",", ""))


def repetition(ids: list[int]) -> float:
    """Share of an answer's 4-grams that occurred in it before."""
    grams = list(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def summarise(records: list[Record]) -> dict[str, dict[str, Any]]:
    """Figures by kappa, each against the strict answer to the same prompt in the same round."""
    strict = {(r.prompt_set, r.prompt, r.round): r for r in records if r.kappa == STRICT}
    out = {}
    for kappa in sorted({r.kappa for r in records}, key=lambda kappa: (kappa != STRICT, -kappa)):
        mine = [r for r in records if r.kappa == kappa]
        pairs = [(r, strict[r.prompt_set, r.prompt, r.round]) for r in mine]
        speeds = [len(r.ids) / r.seconds / (len(s.ids) / s.seconds) for r, s in pairs]
        graded = [r.is_right for r in mine if r.is_right is not None]
        tokens = sum(len(r.ids) for r in mine)
        lengths = [len(r.ids) / r.verify_steps for r in mine if r.verify_steps]
        out["strict" if kappa == STRICT else f"{kappa:g}"] = {
            "speed_over_strict": round(statistics.median(speeds), 3),
            "speed_min": round(min(speeds), 3),
            "speed_max": round(max(speeds), 3),
            "accept_length": round(statistics.fmean(lengths), 3) if lengths else None,
            "promoted_per_1000": round(1000 * sum(r.promoted for r in mine) / tokens, 1),
            "agreement": round(statistics.fmean(_agreement(r.ids, s.ids) for r, s in pairs), 3),
            "log_likelihood_gap": round(statistics.fmean(r.log_likelihood - s.log_likelihood for r, s in pairs), 4),
            "length_ratio": round(statistics.fmean(len(r.ids) / len(s.ids) for r, s in pairs), 3),
            "repetition": round(statistics.fmean(repetition(r.ids) for r in mine), 3),
            "hit_cap": round(statistics.fmean(r.hit_cap for r in mine), 3),
            "accuracy": round(statistics.fmean(graded), 3) if graded else None,
            "n": len(mine),
        }
    return out


def _agreement(ids: list[int], strict: list[int]) -> float:
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, strict, strict=False)))
    return same / max(len(ids), len(strict))


def figure(summary: dict[str, dict[str, Any]], source: str) -> bytes:
    """PNG: speed over strict against each measure of quality, a point a kappa; the source under it."""
    import io

    from matplotlib.figure import Figure

    fig = Figure(figsize=(9, 6), layout="constrained")
    for axes, (key, title) in zip(fig.subplots(2, 3).flat, PANELS.items(), strict=True):
        for kappa, row in summary.items():
            axes.plot(row["speed_over_strict"], row[key], "o", color="#D55E00" if kappa == "strict" else "#0072B2")
            axes.annotate(
                kappa, (row["speed_over_strict"], row[key]), xytext=(4, 4), textcoords="offset points", fontsize=8
            )
        axes.set_title(title, fontsize=9)
        axes.margins(0.15)  # room for the labels
        if key in ("agreement", "hit_cap"):
            axes.set_ylim(-0.05, 1.1)
        axes.set_xlabel("tokens/s over strict", fontsize=9)
    n = next(iter(summary.values()))["n"]
    fig.suptitle(f"kappa, n = {n} answers a point", fontsize=10)
    fig.supxlabel(f"source: {source}", fontsize=8, color="#555555")
    out = io.BytesIO()
    fig.savefig(out, format="png", dpi=150)
    return out.getvalue()


def _print_table(summary: dict[str, dict[str, Any]]) -> None:
    columns = ["speed_over_strict", "accept_length", *PANELS, "accuracy"]
    print("\n" + f"{'kappa':8}" + "".join(f"{name:>20}" for name in columns))
    for kappa, row in summary.items():
        print(f"{kappa:8}" + "".join(f"{row[name] if row[name] is not None else '-':>20}" for name in columns))


def _kappa(text: str) -> float:
    try:
        MarginConfig(kappa=float(text))  # as the server checks it
    except ValueError as error:
        wanted = "a number above 0, at most 1"
        raise argparse.ArgumentTypeError(f"found {text}; expected {wanted}; fix: correct it") from error
    return float(text)


def _parse_args() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--kappas", type=_kappa, nargs="+", default=KAPPAS, help="beside strict (default %(default)s)")
    parser.add_argument(
        "--config", type=Path, help="of the server, as --speculative-adaptive-config; its kappa is not used"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/quality.json"),
        help="the answers, written as they are measured, plot and server log lie beside it (default %(default)s)",
    )
    args = parser.parse_args()
    if args.out.suffix != ".json":
        parser.error(f"--out: found {args.out}; expected a name that ends in .json; fix: correct it")
    answers = args.out.with_suffix(".jsonl")
    if answers.exists():
        parser.error(f"--out: found {answers} of a former run; expected none; fix: give another --out")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    sys.exit(run_main(main))
