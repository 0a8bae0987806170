"""A function on tensors, recorded once per batch size and run on the next larger one."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import torch

from cuda_graphs.backend import Graph, GraphBackend
from cuda_graphs.errors import RegistryError

Tensors = Mapping[str, torch.Tensor]


class PaddedGraphs:
    """`run`, recorded by `backend` for each of `batch_sizes`, largest first, on static buffers.

    Args:
        run: graph-safe function from named inputs to named results; dimension 0 of each is the batch, and no row may
            influence another, since padding rows hold whatever was there before.
        inputs: static input buffers with at least as many rows as the largest batch size. Several `PaddedGraphs` may use
            the same ones, as long as they run one after the other.
        batch_sizes: at least one, each 1 or more.
        backend: records and replays.

    Effects: overwrites nothing in `inputs`; allocates one result buffer per name outside any capture, so results stay
    valid, whatever other graphs are replayed, until this object runs again. Host sync: as the backend's captures do.
    """

    def __init__(
        self,
        run: Callable[[Tensors], Tensors],
        inputs: Tensors,
        batch_sizes: Sequence[int],
        backend: GraphBackend,
    ) -> None:
        self.batch_sizes = sorted(set(batch_sizes))
        self._inputs = dict(inputs)
        rows = min((buffer.shape[0] for buffer in self._inputs.values()), default=0)
        if not self.batch_sizes or self.batch_sizes[0] < 1 or self.batch_sizes[-1] > rows:
            raise RegistryError(
                f"found batch sizes {self.batch_sizes} and input buffers of {rows} rows; expected sizes from 1 to the"
                " number of rows. Fix: allocate larger buffers or drop the size."
            )
        largest = self.batch_sizes[-1]
        first = run(self._first_rows(self._inputs, largest))
        self.outputs = {name: torch.empty_like(value) for name, value in first.items()}
        self._graphs: dict[int, Graph] = {}
        for size in reversed(self.batch_sizes):
            self._graphs[size] = backend.capture(self._recorded(run, size))

    def _recorded(self, run: Callable[[Tensors], Tensors], size: int) -> Callable[[], None]:
        inputs = self._first_rows(self._inputs, size)
        outputs = self._first_rows(self.outputs, size)

        def record() -> None:
            for name, value in run(inputs).items():
                outputs[name].copy_(value)

        return record

    @staticmethod
    def _first_rows(tensors: Tensors, size: int) -> dict[str, torch.Tensor]:
        return {name: value[:size] for name, value in tensors.items()}

    def padded_size(self, batch_size: int) -> int:
        """The smallest recorded size that holds `batch_size` rows; RegistryError if none does. Host sync: none."""
        at = bisect_left(self.batch_sizes, batch_size)
        if batch_size < 1 or at == len(self.batch_sizes):
            raise RegistryError(
                f"found a batch of {batch_size}; expected 1 to {self.batch_sizes[-1]}. Fix: capture a larger batch size,"
                " or run this batch without a graph."
            )
        return self.batch_sizes[at]

    def __call__(self, values: Tensors) -> dict[str, torch.Tensor]:
        """Copies `values` into the static inputs, replays, and returns views of the static results.

        Args:
            values: one tensor per input buffer, all with the same number of rows, on the buffers' device.

        Host sync: none. Graph-safe: no, it replays a graph.
        """
        if values.keys() != self._inputs.keys():
            raise RegistryError(
                f"found inputs {sorted(values)}; expected {sorted(self._inputs)}. Fix: pass exactly these names."
            )
        batch_size = next(iter(values.values())).shape[0]
        size = self.padded_size(batch_size)
        for name, value in values.items():
            self._inputs[name][:batch_size].copy_(value, non_blocking=True)
        self._graphs[size].replay()
        return self._first_rows(self.outputs, batch_size)
