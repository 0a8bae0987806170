"""A server without a process: it starts at once and says what its subclass says."""

from pathlib import Path
from typing import Any

FIXED_SHAPE = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}


class FakeServer:
    """Stands in for `adaptivespec.launch.Server`; a subclass has a list `alive` of its own, of those that run."""

    alive: list["FakeServer"]
    dies_after = 10**9

    def __init__(self, model: Any, args: list[str], *, log: Path, timeout: float) -> None:
        self.args, self.log = args, log
        self.command = ["launch", str(model), *args]
        self.url = f"http://{log.stem}"

    def __enter__(self) -> "FakeServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self.alive.append(self)

    def stop(self) -> None:
        if self in self.alive:
            self.alive.remove(self)

    def wait_until_ready(self) -> None:
        assert self in self.alive

    def exit_code(self) -> int | None:
        return 137

    def log_tail(self) -> str:
        return "last words"
