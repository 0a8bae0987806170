#!/usr/bin/env python
"""Every static shape, plain decoding and ADAPTIVE on the same prompts, interleaved request by request.

Two servers run: plain, and ADAPTIVE with a state for every shape that is asked for. For each prompt, plain decoding, each
shape pinned, and the policy take turns, the order rotating from prompt to prompt; prompts are in the prefix cache of both
servers, so that a request is decoding. Figures: tokens/s as a ratio to plain's on the same prompt, median over prompts
and rounds; accept length with the bonus token. The last line of the output is one JSON object.

    python scripts/compare_shapes.py --prompts gsm8k=gsm8k_test.jsonl --prompts code=humaneval.jsonl --num-prompts 8
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import AutoTokenizer

from adaptivespec.launch import Server
from adaptivespec.prompt_files import add_arguments, chat_text, fill_in_pair
from adaptivespec.shapes import TreeShape

STATIC_SHAPES = "3-1-4 5-1-6 7-1-8 3-4-4 3-4-8 5-4-8"


def main() -> int:
    args = _parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    sets = {
        source.name: [chat_text(tokenizer, row["text"]) for row in source.rows(args.num_prompts, args.skip)]
        for source in args.prompts
    }
    shapes = [TreeShape.parse(text) for text in args.shapes.split()]
    config: dict[str, Any] = {"shape": {"range": args.range, "extra": [shape.to_list() for shape in shapes]}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        common = ["--dtype", args.dtype, "--sleep-on-idle", "--max-total-tokens", "20000"]
        adaptive = ["--speculative-algorithm", "ADAPTIVE", "--speculative-draft-model-path", str(args.draft)]
        adaptive += ["--speculative-adaptive-config", str(path)]
        with (
            Server(args.target, common, log=args.out.with_suffix(".plain.log")) as plain,
            Server(args.target, [*common, *adaptive], log=args.out.with_suffix(".adaptive.log")) as speculative,
        ):
            records = _measure(plain, speculative, sets, shapes, args)
    report = _summarise(records, list(sets), args)
    args.out.write_text(json.dumps({"report": report, "records": records}, indent=1))
    _print_table(report, list(sets))
    print(json.dumps(report))
    return 0


def _measure(plain: Server, speculative: Server, sets: dict, shapes: list[TreeShape], args: Any) -> list[dict]:
    places = {text: place for place, text in enumerate(_adaptive_info(speculative)["shapes"])}
    turns: list[tuple[str, Server, int | None]] = [("plain", plain, None), ("ADAPTIVE", speculative, -1)]
    turns += [(str(shape), speculative, places[str(shape)]) for shape in shapes]
    total = args.rounds * sum(map(len, sets.values())) * len(turns)
    records = []
    with tqdm(total=total, desc="requests") as bar:
        for round_number in range(args.rounds):
            for name, prompts in sets.items():
                for number, prompt in enumerate(prompts):
                    for server in (plain, speculative):
                        _generate(server, prompt, 8)  # puts the prompt into the prefix cache
                    start = (number + round_number) % len(turns)
                    for label, server, place in turns[start:] + turns[:start]:
                        if place is not None:
                            server.post("/set_internal_state", {"server_args": {"adaptive_shape": place}})
                        meta = _generate(server, prompt, args.max_new_tokens)
                        records.append({"set": name, "prompt": number, "round": round_number, "label": label, **meta})
                        bar.update()
    return records


def _generate(server: Server, prompt: str, max_new_tokens: int) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": max_new_tokens}
    answer = server.post("/generate", {"text": prompt, "sampling_params": params})
    meta = answer["meta_info"]
    keys = ("completion_tokens", "e2e_latency", "spec_verify_ct", "spec_num_correct_drafts", "spec_shape_histogram")
    return {key: meta.get(key) for key in keys} | {"output_ids": answer["output_ids"]}


def _summarise(records: list[dict], names: list[str], args: Any) -> dict[str, Any]:
    speed = {
        (r["set"], r["prompt"], r["round"], r["label"]): r["completion_tokens"] / r["e2e_latency"] for r in records
    }
    labels = list(dict.fromkeys(r["label"] for r in records))
    rows = {}
    for label in labels:
        rows[label] = {}
        for name in names:
            mine = [r for r in records if r["set"] == name and r["label"] == label]
            ratios = [
                speed[name, r["prompt"], r["round"], label] / speed[name, r["prompt"], r["round"], "plain"]
                for r in mine
            ]
            verified = sum(r["spec_verify_ct"] or 0 for r in mine)
            rows[label][name] = {
                "ratio_to_plain": round(statistics.median(ratios), 3),
                "ratio_min": round(min(ratios), 3),
                "ratio_max": round(max(ratios), 3),
                "tokens_per_s": round(statistics.median(speed[name, r["prompt"], r["round"], label] for r in mine), 2),
                "accept_length": round(1 + sum(r["spec_num_correct_drafts"] or 0 for r in mine) / verified, 3)
                if verified
                else None,
                "n": len(mine),
            }
        ratios = [rows[label][name]["ratio_to_plain"] for name in names]
        rows[label]["geometric_mean"] = round(math.prod(ratios) ** (1 / len(ratios)), 3)
    shapes: Counter[str] = Counter()
    for record in records:
        if record["label"] == "ADAPTIVE":
            shapes.update(record["spec_shape_histogram"] or {})
    static = {label: row["geometric_mean"] for label, row in rows.items() if label not in ("plain", "ADAPTIVE")}
    best = max(static, key=static.__getitem__) if static else None
    return {
        "rows": rows,
        "best_static": best,
        "adaptive_over_best_static": round(rows["ADAPTIVE"]["geometric_mean"] / static[best], 3) if best else None,
        "adaptive_shape_share": {k: round(v / shapes.total(), 3) for k, v in shapes.most_common()},
        "range": args.range,
        "dtype": args.dtype,
        "max_new_tokens": args.max_new_tokens,
        "rounds": args.rounds,
        "skip": args.skip,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", "unset"),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
    }


def _print_table(report: dict[str, Any], names: list[str]) -> None:
    print(f"\n{'':12}" + "".join(f"{name:>22}" for name in names) + f"{'geometric mean':>18}")
    for label, row in report["rows"].items():
        cells = "".join(
            f"{row[n]['ratio_to_plain']:>12.2f} ({row[n]['accept_length'] or 1:.2f})" + " " * 3 for n in names
        )
        print(f"{label:12}{cells}{row['geometric_mean']:>14.3f}")
    print("tokens/s over plain, median; accept length in brackets, bonus token included\n")


def _adaptive_info(server: Server) -> dict[str, Any]:
    info: dict[str, Any] = server.get("/server_info")["internal_states"][0]["adaptive"]
    return info


def _parse_args() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--shapes", default=STATIC_SHAPES, help=f"static shapes to pin; default: {STATIC_SHAPES}")
    parser.add_argument(
        "--range", type=_range, help="shape.range: a name, or LOW:HIGH as 3-1-4:5-4-8; default: the package's"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("out/compare_shapes.json"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    fill_in_pair(args)
    return args


def _range(text: str) -> Any:
    low, separator, high = text.partition(":")
    return {"low": TreeShape.parse(low).to_list(), "high": TreeShape.parse(high).to_list()} if separator else text


if __name__ == "__main__":
    sys.exit(main())
