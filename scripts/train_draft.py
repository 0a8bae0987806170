"""Train an EAGLE-3 draft for the demo target on its own answers, or measure a draft's agreement with it.

Train (goes on from its last checkpoint when started again with the same --out):
    python scripts/train_draft.py --out runs/draft
Measure any draft folder on the held-out rows:
    python scripts/train_draft.py --out runs/draft --evaluate FOLDER
"""

import argparse
import json
import logging
import platform
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaptivespec.command_line import run_main
from adaptivespec.demo.target import prepare_target
from adaptivespec.draft_training.corpus import Row, count_draft_vocab, file_sha256, load_rows, split_rows
from adaptivespec.draft_training.loop import LoopOptions, Trainer, measure_agreement
from adaptivespec.draft_training.model import Eagle3Draft, draft_config, init_from_target, load_draft, save_draft
from adaptivespec.draft_training.target_states import TargetStates
from adaptivespec.draft_training.ttt import LossOptions

log = logging.getLogger("train_draft")
NUM_AGREEMENT_STEPS = 5
NUM_PROGRESS_ROWS = 32


@dataclass(frozen=True)
class Material:
    """Target and corpus of one training."""

    model: Any
    states: TargetStates
    rows: list[Row]
    train: list[int]
    held_out: list[int]
    corpus_sha256: str

    @property
    def held_out_greedy(self) -> list[int]:
        return [i for i in self.held_out if self.rows[i].greedy]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    loop, loss = LoopOptions(num_steps=3300, decay_steps=2200), LossOptions()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--corpus",
        type=Path,
        default=Path(__file__).with_name("draft_corpus.jsonl.gz"),
        help="JSON lines, plain or gzip, an answer of the target each: prompt (user turn), ids (the answer's tokens, the end "
        "included), greedy (default: the corpus that the shipped draft was trained on)",
    )
    add("--out", type=Path, required=True, help="folder for checkpoint, target states (about 4 GB) and draft")
    add("--target", type=Path, help="folder of the target; default: the demo target, fetched if need be")
    add(
        "--evaluate",
        type=Path,
        metavar="DRAFT",
        help="train nothing; print this draft's agreement on the held-out rows",
    )
    add("--steps", type=int, default=loop.num_steps, help="optimizer steps in all (%(default)s)")
    add(
        "--decay-steps",
        type=int,
        default=loop.decay_steps,
        help="last steps, over which the rate falls to zero (%(default)s); --steps may be raised later all the same",
    )
    add("--learning-rate", type=float, default=loop.learning_rate, help="plateau of the rate (%(default)s)")
    add("--micro-batch", type=int, default=loop.micro_batch, help="rows a thread works on at once (%(default)s)")
    add("--micro-batches", type=int, default=loop.micro_batches, help="of these, in one optimizer step (%(default)s)")
    add("--workers", type=int, default=loop.num_workers, help="threads (%(default)s); no effect on the result")
    add(
        "--row-share",
        type=float,
        default=loss.row_share,
        help="share of the rows that draft steps after the first are trained on (%(default)s)",
    )
    add(
        "--feature-weight",
        type=float,
        default=loss.feature_weight,
        help="weight of the distance to the target's own state (%(default)s)",
    )
    add(
        "--dropout",
        type=float,
        default=loss.dropout,
        help="share of what attention and MLP add to the residual that is dropped in training (%(default)s)",
    )
    add("--train-on", choices=("greedy", "all"), default="all", help="rows to train on (%(default)s)")
    add("--draft-vocab", type=int, default=8192, help="size of the draft vocabulary (%(default)s)")
    add("--held-out", type=int, default=200, help="rows kept out of training, drawn by the seed (%(default)s)")
    add("--seed", type=int, default=loop.seed, help="of split, order and draws (%(default)s)")
    return parser.parse_args(argv)


def load_material(args: argparse.Namespace) -> Material:
    folder = args.target or prepare_target()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False).model
    rows = load_rows(args.corpus, tokenizer)
    train, held_out = split_rows(rows, args.held_out, args.seed)
    if args.train_on == "greedy":
        train = [i for i in train if rows[i].greedy]
    corpus_sha256 = file_sha256(args.corpus)
    fingerprint = f"target {file_sha256(folder / 'model.safetensors')} corpus {corpus_sha256}"
    states = TargetStates(args.out / "target_states", model, rows, fingerprint)
    return Material(model, states, rows, train, held_out, corpus_sha256)


def train(args: argparse.Namespace, material: Material) -> dict[str, Any]:
    """Train, save the draft and its record in the out folder, and return the record."""
    loop = LoopOptions(
        num_steps=args.steps,
        decay_steps=args.decay_steps,
        learning_rate=args.learning_rate,
        micro_batch=args.micro_batch,
        micro_batches=args.micro_batches,
        num_workers=args.workers,
        seed=args.seed,
    )
    loss = LossOptions(row_share=args.row_share, feature_weight=args.feature_weight, dropout=args.dropout)
    torch.manual_seed(args.seed)
    token_ids, coverage = count_draft_vocab(
        [material.rows[i] for i in material.train], material.model.config.vocab_size, args.draft_vocab
    )
    draft = Eagle3Draft(draft_config(material.model.config, args.draft_vocab), token_ids)
    init_from_target(draft, material.model)
    trainer = Trainer(draft, material.states, material.train, args.out, loop, loss)
    trainer.run(lambda trainer: report_progress(trainer, material))
    save_draft(draft, args.out / "draft")
    record = {
        "command": command_line(sys.argv),
        "agreement_held_out_greedy": agreement(draft, material),
        "held_out_rows": material.held_out,
        "num_held_out_greedy": len(material.held_out_greedy),
        "num_train_rows": len(material.train),
        "num_train_answer_tokens": sum(len(material.rows[i].answer_ids) for i in material.train),
        "draft_vocab_coverage": round(coverage, 4),
        "seconds": round(trainer.seconds),
        "corpus_sha256": material.corpus_sha256,
        "loop": asdict(loop),
        "loss": asdict(loss),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers", "adaptivespec")},
    }
    (args.out / "draft" / "TRAINING.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def command_line(argv: list[str]) -> str:
    """The command with each path cut to its name: the record is for other machines than this one."""
    return shlex.join(["python", "scripts/" + Path(argv[0]).name, *(arg.rpartition("/")[2] or arg for arg in argv[1:])])


def report_progress(trainer: Trainer, material: Material) -> None:
    rows = material.held_out_greedy[:NUM_PROGRESS_ROWS]
    figures = " ".join(f"{x:.3f}" for x in measure_agreement(trainer.draft, material.states, rows, NUM_AGREEMENT_STEPS))
    log.info("step %d, %.0f s: agreement on %d held-out rows %s", trainer.step, trainer.seconds, len(rows), figures)


def agreement(draft: Eagle3Draft, material: Material) -> list[float]:
    figures = measure_agreement(draft, material.states, material.held_out_greedy, NUM_AGREEMENT_STEPS)
    return [round(x, 4) for x in figures]


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    args = parse_args()
    started = time.monotonic()
    material = load_material(args)
    if args.evaluate:
        draft, figures = args.evaluate, agreement(load_draft(args.evaluate), material)
    else:
        draft, figures = args.out / "draft", train(args, material)["agreement_held_out_greedy"]
    seconds = round(time.monotonic() - started)
    print(json.dumps({"draft": str(draft), "agreement_held_out_greedy": figures, "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
