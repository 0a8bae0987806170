#!/usr/bin/env python
"""SpecForge's `benchmarks/bench_eagle3.py`, its files untouched, against a running SGLang server, without a network.

It wants its data where Hugging Face and GitHub keep it; here the files of the tasks are laid out so that it finds them. Use it
for speed and accept length: its accuracy figures are not to be relied on (its MATH-500 scorer misses gold answers, and its
HumanEval scorer runs what the model wrote in its own process). The last line of the output is one JSON object.

    git clone https://github.com/sgl-project/SpecForge
    python scripts/run_bench_eagle3.py --specforge SpecForge --model TARGET --port 30000 \\
        --task gsm8k:20=gsm8k_test.jsonl --task humaneval:20=humaneval.jsonl
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from adaptivespec.command_line import run_main

# Where `datasets` and the harness look, from the current folder on.
PLACES = {
    "gsm8k": "test.jsonl",
    "math500": "HuggingFaceH4/MATH-500/test.jsonl",
    "humaneval": "openai/openai_humaneval/test.jsonl",
    "mtbench": "mtbench.jsonl",
}
# The harness hands on a host with its scheme, which the SGLang it was written for took as it is and 0.5.23 puts another
# scheme before. What it would download is taken from the current folder; SGLang would keep it under a fixed name in /tmp.
RUN = """
import runpy, sys
import sglang.test.test_utils, sglang.utils
theirs = sglang.utils.normalize_base_url

def normalize(host, port):
    return f"{host}:{port}" if "://" in host else theirs(host, port)

sglang.utils.normalize_base_url = sglang.test.test_utils.normalize_base_url = normalize
sglang.utils.download_and_cache_file = lambda url, filename=None: filename or url.rpartition("/")[2]
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main() -> int:
    args = _parse_args()
    before = set(args.out.glob("*.jsonl"))
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder) / "cwd"
        for name, _, file in args.task:
            target = cwd / PLACES[name]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
        command = [sys.executable, "-c", RUN, str(args.specforge / "benchmarks" / "bench_eagle3.py")]
        command += ["--model-path", args.model, "--host", "127.0.0.1", "--port", str(args.port), "--skip-launch-server"]
        command += ["--config-list", f"{args.batch_size},0,0,0", "--output-dir", str(args.out)]
        command += ["--benchmark-list", *(f"{name}:{count}" for name, count, _ in args.task)]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": f"{folder}/hf"}
        done = subprocess.run(command, cwd=cwd, env=os.environ | offline)
        files = [path for path in sorted(args.out.glob("*.jsonl")) if path not in before]
        if done.returncode or not files:
            print(
                f"bench_eagle3.py: found exit code {done.returncode} and {len(files)} result files; expected 0 and one; "
                "fix: read what it says above",
                file=sys.stderr,
            )
            return 1
        found = json.loads(files[-1].read_text(encoding="utf-8"))
    print(json.dumps({name: found[name][0]["metrics"] for name, _, _ in args.task}))
    return 0


def _task(text: str) -> tuple[str, int, Path]:
    task, separator, file = text.partition("=")
    name, colon, count = task.partition(":")
    if not separator or not colon or name not in PLACES or not count.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME:COUNT=FILE.jsonl, NAME among {', '.join(PLACES)}")
    if not Path(file).is_file():
        raise argparse.ArgumentTypeError(f"{text!r}: found no file {file}")
    return name, int(count), Path(file)


def _parse_args() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--specforge", type=Path, required=True, help="checkout of SpecForge")
    parser.add_argument(
        "--model",
        required=True,
        help="the target, for its tokenizer; the template is chosen by the name that the server was started with",
    )
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--batch-size", type=int, default=1, help="requests at the same time (%(default)s)")
    parser.add_argument("--task", type=_task, action="append", required=True, metavar="NAME:COUNT=FILE.jsonl")
    parser.add_argument(
        "--out", type=Path, default=Path("out/bench_eagle3"), help="folder for the harness's own results (%(default)s)"
    )
    args = parser.parse_args()
    args.specforge, args.out = args.specforge.resolve(), args.out.resolve()
    if not (args.specforge / "benchmarks" / "bench_eagle3.py").is_file():
        parser.error(
            f"--specforge: found no benchmarks/bench_eagle3.py in {args.specforge}; fix: give SpecForge's checkout"
        )
    return args


if __name__ == "__main__":
    sys.exit(run_main(main))
