"""What the registry asks of a device, and the backend without graphs.

`EagerBackend` here needs no torch; `cuda_graphs.cuda.CudaBackend` is imported only by those who use it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class StateBackend(Protocol):
    """Memory of a device, as far as building and releasing states needs it."""

    name: str

    def bytes_in_use(self) -> int:
        """Bytes taken on the device now, after all queued work; 0 where the device is not measured. May sync."""

    def reported_bytes(self, made: object) -> int:
        """Bytes that a state or part says it holds, beyond what `bytes_in_use` sees and without its shared parts."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether `error`, or an error that led to it, says that the device's memory ran out."""

    def release(self) -> None:
        """Returns to the device the memory of states that nobody refers to any more."""


class Graph(Protocol):
    """Recorded work that can be run again on the same buffers."""

    def replay(self) -> None:
        """Runs the recorded work on the buffers it was recorded with. Host sync: none."""


class GraphBackend(StateBackend, Protocol):
    """A `StateBackend` that also records work for replay."""

    num_captures: int
    """Graphs captured so far; stays 0 where capturing only remembers the callable."""

    def capture(self, run: Callable[[], None]) -> Graph:
        """Records `run`, which must be graph-safe: fixed shapes and addresses, results written into existing buffers."""

    def forbid_host_sync(self) -> AbstractContextManager[None]:
        """A context in which an operation that makes the host wait for the device raises, where the device can tell."""


class _Rerun:
    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class EagerBackend:
    """Runs states without graphs, on any device.

    Nothing is measured: a state costs the bytes that `size_of` says (0 without it), and a budget holds against those.
    `capture` remembers the callable and a replay calls it again, so code written for graphs runs unchanged.
    """

    name = "eager"

    def __init__(self, size_of: Callable[[object], int] | None = None) -> None:
        self.num_captures = 0
        self._size_of = size_of

    def bytes_in_use(self) -> int:
        return 0

    def reported_bytes(self, made: object) -> int:
        return self._size_of(made) if self._size_of else 0

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def release(self) -> None:
        """Nothing to return: Python frees the states once they are dropped."""

    def capture(self, run: Callable[[], None]) -> Graph:
        return _Rerun(run)

    def forbid_host_sync(self) -> AbstractContextManager[None]:
        return nullcontext()
