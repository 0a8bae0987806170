"""The training loop: micro-batches on worker threads, AdamW, warm-up, plateau, linear decay, checkpoints."""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from adaptivespec.draft_training.model import Eagle3Draft
from adaptivespec.draft_training.target_states import TargetStates
from adaptivespec.draft_training.ttt import Batch, LossOptions, count_agreement, ttt_loss
from adaptivespec.errors import AdaptiveSpecError


class TrainingError(AdaptiveSpecError, ValueError):
    """The training cannot go on as asked."""


@dataclass(frozen=True)
class LoopOptions:
    """Length and pace of a training.

    Attributes:
        num_steps: optimizer steps in all.
        decay_steps: of these, the last ones, over which the learning rate falls linearly to zero.
        warmup_steps: the first ones, over which it rises linearly.
        learning_rate: its plateau.
        micro_batch: rows whose gradient is computed at once, on one thread.
        micro_batches: how many of them make one optimizer step.
        num_workers: threads that compute gradients; the result does not depend on it.
        checkpoint_every: optimizer steps between two checkpoints.
        seed: of the order of rows and of every draw.
    """

    num_steps: int
    decay_steps: int
    warmup_steps: int = 50
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.01
    micro_batch: int = 2
    micro_batches: int = 4
    num_workers: int = 2
    checkpoint_every: int = 100
    seed: int = 0


def learning_rate(step: int, options: LoopOptions) -> float:
    """Rate of optimizer step `step` (from 0). A longer training shares every step before its decay with this one."""
    rise = (step + 1) / options.warmup_steps
    fall = (options.num_steps - step) / options.decay_steps
    return options.learning_rate * min(1.0, rise, fall)


class BatchOrder:
    """Which rows make micro-batch n, a pure function of the seed: rows of like length together, mixed every epoch."""

    def __init__(self, lens: dict[int, int], micro_batch: int, seed: int) -> None:
        """
        Args:
            lens: row index to its number of tokens.
        """
        self.lens, self.micro_batch, self.seed = lens, micro_batch, seed
        # Mixed here and again every epoch: in just this order the shipped draft was trained.
        self.mixed = list(lens)
        random.Random(f"{seed}-rank").shuffle(self.mixed)
        self._first, self._epoch = 0, 0
        self._batches = self.epoch(0)

    def rows(self, index: int) -> list[int]:
        """Row indices of micro-batch `index`; cheap where indices come in ascending order."""
        if index < self._first:
            self._first, self._epoch, self._batches = 0, 0, self.epoch(0)
        while index >= self._first + len(self._batches):
            self._first += len(self._batches)
            self._epoch += 1
            self._batches = self.epoch(self._epoch)
        return self._batches[index - self._first]

    def epoch(self, epoch: int) -> list[list[int]]:
        """The micro-batches of one epoch, all full; rows that fill none are left out of this epoch."""
        rng = random.Random(f"{self.seed}-{epoch}")
        rows = rng.sample(self.mixed, len(self.mixed))
        rows = rows[: max(1, len(rows) // self.micro_batch) * self.micro_batch]
        # Noise on the length keeps the same rows from meeting in every epoch.
        rows.sort(key=lambda row: self.lens[row] * rng.uniform(0.9, 1.1))
        batches = [rows[i : i + self.micro_batch] for i in range(0, len(rows), self.micro_batch)]
        rng.shuffle(batches)
        return batches


def make_batch(states: TargetStates, indices: list[int]) -> Batch:
    """Fetch rows with their target states."""
    tokens, hidden = states.get(indices)
    rows = [states.rows[i] for i in indices]
    prompt_lens = torch.tensor([len(row.prompt_ids) for row in rows])
    return Batch(tokens, hidden, prompt_lens, torch.tensor([len(row) for row in rows]))


class Trainer:
    """A draft in training; `run` goes on from the checkpoint in the folder, where there is one.

    The state before the decay is kept beside it: asked for more steps later, the training goes on from there, and ends as
    if it had been asked for them at once.
    """

    def __init__(
        self,
        draft: Eagle3Draft,
        states: TargetStates,
        train_rows: list[int],
        folder: Path,
        loop: LoopOptions,
        loss: LossOptions,
    ) -> None:
        self.draft, self.states, self.loop, self.loss = draft, states, loop, loss
        self.embed = states.model.embed_tokens.weight.detach()
        self.order = BatchOrder({i: len(states.rows[i]) for i in train_rows}, loop.micro_batch, loop.seed)
        self.params = [p for p in draft.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.params, lr=loop.learning_rate, betas=(0.9, 0.95), weight_decay=loop.weight_decay
        )
        self.step, self.seconds = 0, 0.0
        self.checkpoint = folder / "checkpoint.pt"
        self.plateau = folder / "plateau.pt"
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, on_checkpoint: Callable[["Trainer"], None] = lambda trainer: None) -> None:
        """Train up to `num_steps`, with a progress bar; saves a checkpoint and calls back at each interval."""
        if self.checkpoint.exists():
            self._load(self.checkpoint)
        with (
            ThreadPoolExecutor(self.loop.num_workers, initializer=torch.set_num_threads, initargs=(1,)) as pool,
            tqdm(total=self.loop.num_steps, initial=self.step, desc="training", mininterval=5) as bar,
        ):
            while self.step < self.loop.num_steps:
                started = time.monotonic()
                loss = self._optimizer_step(pool)
                self.seconds += time.monotonic() - started
                bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                bar.update()
                if self.step == self._decay_start:
                    self._save(self.plateau)
                if self.step % self.loop.checkpoint_every == 0 or self.step == self.loop.num_steps:
                    self._save(self.checkpoint)
                    on_checkpoint(self)

    @property
    def _decay_start(self) -> int:
        return self.loop.num_steps - self.loop.decay_steps

    def _optimizer_step(self, pool: ThreadPoolExecutor) -> float:
        first = self.step * self.loop.micro_batches
        numbers = range(first, first + self.loop.micro_batches)
        rows = [self.order.rows(number) for number in numbers]
        results = list(pool.map(self._gradients, numbers, rows))
        # Summed in the order of the micro-batches, whichever thread was first: runs repeat bit for bit.
        for parameter, *grads in zip(self.params, *(grads for _, grads in results), strict=True):
            parameter.grad = sum(grads[1:], grads[0]).div_(len(grads))
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.loop)
        self.optimizer.step()
        self.step += 1
        return sum(loss for loss, _ in results) / len(results)

    def _gradients(self, number: int, rows: list[int]) -> tuple[float, tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(self.loop.seed * 1_000_003 + number)
        loss = ttt_loss(self.draft, self.embed, make_batch(self.states, rows), self.loss, generator)
        return loss.item(), torch.autograd.grad(loss, self.params)

    def _lasting_options(self) -> dict[str, Any]:
        """Options that may not change between two parts of one training."""
        may_change = {"num_steps", "decay_steps", "num_workers", "checkpoint_every"}
        loop = {name: value for name, value in asdict(self.loop).items() if name not in may_change}
        return loop | {f"loss_{name}": value for name, value in asdict(self.loss).items()}

    def _save(self, file: Path) -> None:
        part = file.with_suffix(".part")
        torch.save(
            {
                "draft": self.draft.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "seconds": self.seconds,
                "decay_start": self._decay_start,
                "options": self._lasting_options(),
            },
            part,
        )
        part.rename(file)

    def _load(self, file: Path) -> None:
        saved: dict[str, Any] = torch.load(file, weights_only=True)
        if saved["options"] != self._lasting_options():
            raise TrainingError(
                where=str(file),
                found=f"a training with {saved['options']}",
                expected=f"one with {self._lasting_options()}",
                fix="give the same options, or another --out",
            )
        if saved["step"] > min(saved["decay_start"], self._decay_start) and saved["decay_start"] != self._decay_start:
            if file == self.plateau or not self.plateau.exists():
                raise TrainingError(
                    where=str(file),
                    found=f"a training whose decay began at step {saved['decay_start']}, now at step {saved['step']}",
                    expected=f"a decay that begins at step {self._decay_start}, as the options say",
                    fix="give --steps and --decay-steps as before, or a later beginning",
                )
            self._load(self.plateau)
            return
        self.draft.load_state_dict(saved["draft"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.seconds = saved["step"], saved["seconds"]


@torch.no_grad()
def measure_agreement(draft: Eagle3Draft, states: TargetStates, rows: list[int], num_steps: int) -> list[float]:
    """Share of the rows' answer tokens at which the draft's top-1 is the target's argmax, per step (see
    `count_agreement`)."""
    embed = states.model.embed_tokens.weight
    hits, total = torch.zeros(num_steps, dtype=torch.long), 0
    rows = sorted(rows, key=lambda i: len(states.rows[i]))
    for start in range(0, len(rows), 8):
        batch_hits, positions = count_agreement(draft, embed, make_batch(states, rows[start : start + 8]), num_steps)
        hits, total = hits + batch_hits, total + positions
    return (hits / total).tolist()
