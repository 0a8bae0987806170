#!/usr/bin/env python
"""Plain decoding by SGLang on the CPU engine against `transformers.generate`: same model, dtype and threads, interleaved.

Both decode the same prompt greedily to the same length, one after the other, in pairs. The last line of the output is one
JSON object with the ratio of tokens/s (SGLang over transformers), median over pairs.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from tqdm import trange
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaptivespec.command_line import run_main
from adaptivespec.launch import Server

PROMPT = "Write a long story about a fox and a crow who share one tree through four seasons."


def main() -> int:
    args = _parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, args.dtype)).eval()
    ids = tokenizer(PROMPT, return_tensors="pt")

    def by_transformers() -> list[int]:
        with torch.inference_mode():
            out = model.generate(
                **ids, do_sample=False, min_new_tokens=args.num_tokens, max_new_tokens=args.num_tokens, pad_token_id=0
            )
        return out[0, ids["input_ids"].shape[1] :].tolist()

    params = {"temperature": 0, "max_new_tokens": args.num_tokens, "ignore_eos": True}
    command = ["--dtype", args.dtype, "--sleep-on-idle", "--max-total-tokens", "20000"]
    environment = {"OMP_NUM_THREADS": str(args.threads)}
    with Server(args.target, command, log=args.log, env=environment) as server:

        def by_sglang() -> list[int]:
            answer = server.post("/generate", {"input_ids": ids["input_ids"][0].tolist(), "sampling_params": params})
            return list(answer["output_ids"])

        ways = {"sglang": by_sglang, "transformers": by_transformers}
        for decode in ways.values():
            decode()  # warm-up
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for pair in trange(args.pairs, desc="pairs"):
            for name in list(ways)[:: 1 if pair % 2 else -1]:
                start = time.perf_counter()
                length = len(ways[name]())
                seconds[name].append(time.perf_counter() - start)
                if length != args.num_tokens:
                    sys.exit(f"{name}: found {length} tokens; expected {args.num_tokens}")
    ratios = [slow / fast for slow, fast in zip(seconds["transformers"], seconds["sglang"], strict=True)]
    result = {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        **{
            f"{name}_ms_per_token": round(statistics.median(s) / args.num_tokens * 1000, 1)
            for name, s in seconds.items()
        },
        "pairs": args.pairs,
        "num_tokens": args.num_tokens,
        "dtype": args.dtype,
        "threads": args.threads,
        "cores": os.cpu_count(),
    }
    print(json.dumps(result))
    return 0


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="default: the demo target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--num-tokens", type=int, default=64)
    parser.add_argument("--log", type=Path, default=Path("out/compare_transformers.log"))
    args = parser.parse_args()
    if args.target is None:
        from adaptivespec.demo.target import prepare_target

        args.target = str(prepare_target())
    return args


if __name__ == "__main__":
    sys.exit(run_main(main))
