"""The backend that measures a CUDA device and captures graphs into one shared memory pool."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from cuda_graphs.errors import RegistryError

NUM_WARMUPS = 2  # the first run picks kernels and allocates workspaces, the second one runs as every later one will


class CudaBackend:
    """Measures the memory of the device that is current when this is made, and captures graphs on it.

    All graphs share one pool: what one graph needs between its own kernels may lie where another graph keeps its results.
    Hence graphs of one backend never replay at the same time, and captured work writes whatever is read later into
    buffers allocated outside the capture; then the order of replays is free.

    Raises:
        RegistryError: torch sees no CUDA device.
    """

    name = "cuda"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise RegistryError(
                f"found no CUDA device in torch {torch.__version__}; expected one. Fix: use EagerBackend, or check the"
                " driver with nvidia-smi."
            )
        self.device = torch.device("cuda", torch.cuda.current_device())
        # One stream for all captures: cuBLAS keeps a workspace of megabytes for every stream that it has seen.
        self._stream = torch.cuda.Stream(self.device)
        self.num_captures = 0
        self._new_pool()

    def _new_pool(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def bytes_in_use(self) -> int:
        """Bytes taken on the whole device: graphs and workspaces outside torch count, and so do other processes.

        Memory that torch caches but nobody uses is returned to the device first, so that states which fit into it are
        charged like others. Host sync: one. Graph-safe: no, refused while the current stream is capturing.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RegistryError(
                "found a graph capture in progress while memory was to be measured; expected none. Fix: build parts"
                " before the capture begins, not inside it."
            )
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def reported_bytes(self, made: object) -> int:
        """0: the device itself is measured."""
        return 0

    @staticmethod
    def is_out_of_memory(error: BaseException) -> bool:
        """Also True for an error raised from, or while handling, one that said so. Host sync: none."""
        seen: BaseException | None = error
        while seen is not None:
            out_of_memory = (
                "out of memory" in str(seen).lower()
            )  # CUDA's own errors, raised while instantiating a graph
            if isinstance(seen, torch.OutOfMemoryError) or (isinstance(seen, RuntimeError) and out_of_memory):
                return True
            seen = seen.__cause__ or seen.__context__
        return False

    def release(self) -> None:
        """Frees unreferenced graphs and the pool's memory, and starts a new pool. Host sync: one. Graph-safe: no."""
        torch.cuda.synchronize(self.device)
        gc.collect()  # graphs and their buffers often sit in reference cycles
        torch.cuda.empty_cache()
        self._new_pool()

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Warms `run` up on a side stream, captures it there and returns the graph.

        `run` must be graph-safe: no read of a device value on the host, no shape that depends on one, inputs and results
        in buffers that outlive the graph. Every replay runs it on the same addresses. It runs `NUM_WARMUPS` times for
        real and is then recorded without running, so the buffers hold the warm-up's results.

        Host sync: one. Graph-safe: no.
        """
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARMUPS):
                run()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            run()
        self.num_captures += 1
        return graph

    @contextmanager
    def forbid_host_sync(self) -> Iterator[None]:
        """Inside, most operations that make the host wait for the device raise RuntimeError.

        torch's own mode: it sees reads such as `.item()`, boolean indexing and copies to pageable host memory, not an
        explicit `synchronize`. It holds for the whole process. Host sync: none.
        """
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
