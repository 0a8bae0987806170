"""What is to be measured, in which order."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptivespec.bench.configurations import Configuration, ServerPlan, server_plans
from adaptivespec.bench.rows import Cell
from adaptivespec.errors import ConfigError
from adaptivespec.provenance import machine

MIN_TOTAL_TOKENS = 20_000
NO_PREFIX_CACHE = "--disable-radix-cache"


@dataclass(frozen=True)
class Plan:
    """A run of the benchmark.

    Args:
        target: folder or hub name of the target.
        draft: folder or hub name of the draft.
        configurations: the decoders, plain first.
        tasks: token ids of the prompts, by the name of their task.
        batch_sizes: requests at the same time; each divides the number of prompts of every task.
        max_new_tokens: cap of each answer.
        rounds: how often each prompt is measured with each decoder.
        num_beside: servers that are up beside plain's at once.
        dtype: of target and draft.
        server_args: further arguments of every server.
        asks_gaps: where an answer of a strict decoder parts from plain's, plain is asked how near a tie that was; batch size 1.

    Raises:
        ConfigError: a batch size that does not divide the number of prompts.
    """

    target: str
    draft: str
    configurations: Sequence[Configuration]
    tasks: dict[str, list[list[int]]]
    batch_sizes: Sequence[int]
    max_new_tokens: int
    rounds: int
    num_beside: int
    dtype: str
    server_args: Sequence[str]
    asks_gaps: bool = False

    def __post_init__(self) -> None:
        for name, prompts in self.tasks.items():
            for size in self.batch_sizes:
                if len(prompts) % size:
                    raise ConfigError(
                        where="--batch-sizes",
                        found=f"{size} with {len(prompts)} prompts of {name}",
                        expected="a divisor of the number of prompts",
                        fix="change --batch-sizes or --num-prompts",
                    )

    def blocks(self) -> list[list[ServerPlan]]:
        """The servers that are up at once: plain's, and `num_beside` others."""
        plain, *others = server_plans(self.configurations)
        starts = range(0, len(others), self.num_beside)
        return [[plain, *others[start : start + self.num_beside]] for start in starts] or [[plain]]

    def turns(self, block: int) -> Iterator[list[Cell]]:
        """The cells of each turn of a block, all on the same prompts; the first place goes round.

        Tasks take turns too, so that an early end leaves some of each; a round goes from one batch size to the next.
        """
        names = [item.name for server in self.blocks()[block] for item in server.configurations]
        most = max(map(len, self.tasks.values()))
        for round_number in range(self.rounds):
            for size in self.batch_sizes:
                for group in range(most):
                    for place, (task, prompts) in enumerate(self.tasks.items()):
                        if (group + 1) * size > len(prompts):
                            continue
                        # Within each task too, whatever the numbers of tasks and decoders have in common.
                        start = (place + group + round_number) % len(names)
                        order = names[start:] + names[:start]
                        yield [Cell(block, task, size, group, round_number, name) for name in order]

    def prompts(self, cell: Cell) -> list[list[int]]:
        """Token ids of the prompts of a cell."""
        start = cell.group * cell.batch_size
        return self.tasks[cell.task][start : start + cell.batch_size]

    @property
    def num_cells(self) -> int:
        """Cells of a complete run."""
        return sum(len(turn) for block in range(len(self.blocks())) for turn in self.turns(block))

    @property
    def common_args(self) -> list[str]:
        """Arguments of every server."""
        longest = max(len(prompt) for prompts in self.tasks.values() for prompt in prompts)
        tokens = max(MIN_TOTAL_TOKENS, 2 * max(self.batch_sizes) * (longest + self.max_new_tokens))
        return [
            *("--dtype", self.dtype),
            "--sleep-on-idle",  # an idle scheduler would take a core from the server being measured
            NO_PREFIX_CACHE,  # every prompt is prefilled each time, or time to first token would be the cache's
            *("--max-total-tokens", str(tokens)),  # several servers share the machine
            *self.server_args,
        ]

    def settings(self) -> dict[str, Any]:
        """All that must be equal for two sessions to belong to one run, as JSON types."""
        prompts = {
            name: f"{len(ids)} prompts, sha256 {hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]}"
            for name, ids in self.tasks.items()
        }
        return {
            "target": self.target,
            "draft": self.draft,
            "draft weights": _fingerprint(Path(self.draft) / "model.safetensors"),
            "configurations": [item.name for item in self.configurations],
            "servers": [[[item.name for item in each.configurations] for each in block] for block in self.blocks()],
            "tasks": prompts,
            "batch_sizes": list(self.batch_sizes),
            "max_new_tokens": self.max_new_tokens,
            "rounds": self.rounds,
            "num_beside": self.num_beside,
            "server_args": self.common_args,
            **machine(),
        }


def _fingerprint(path: Path) -> str:
    if not path.is_file():
        return "not a local model.safetensors"
    with path.open("rb") as file:
        return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"


def write_config(server: ServerPlan, folder: Path) -> list[str]:
    """Write a server's configuration file and return the arguments that name it; none where it needs no file."""
    if not server.adaptive:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{server.slug}.json"
    path.write_text(json.dumps(server.adaptive, indent=1))
    return ["--speculative-adaptive-config", str(path)]
