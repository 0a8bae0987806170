"""What the CUDA backend asks of torch and in which order, with torch.cuda replaced; the real one runs in tests/gpu."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from cuda_graphs import RegistryError
from cuda_graphs.cuda import NUM_WARMUPS, CudaBackend


class FakeCuda:
    """Stands for the functions of torch.cuda that the backend calls, and notes the calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_capturing = False
        self.sync_mode: int | str = 0
        self.num_pools = 0

    def note(self, name: str):
        return lambda *args, **kwargs: self.calls.append(name)

    def new_pool(self) -> int:
        self.num_pools += 1
        return self.num_pools

    @contextmanager
    def graph(self, graph, pool, stream):
        self.calls.append(f"begin capture in pool {pool}")
        yield
        self.calls.append("end capture")

    def set_sync_mode(self, mode) -> None:
        self.sync_mode = mode


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()

    class Stream:
        def __init__(self, name="side"):
            self.name = name

        def wait_stream(self, other):
            fake.calls.append(f"{self.name} waits for {other.name}")

    replacements = {
        "is_available": lambda: True,
        "current_device": lambda: 1,
        "graph_pool_handle": fake.new_pool,
        "is_current_stream_capturing": lambda: fake.is_capturing,
        "synchronize": fake.note("synchronize"),
        "empty_cache": fake.note("empty cache"),
        "mem_get_info": lambda device: fake.calls.append(f"measure {device}") or (300, 1000),
        "Stream": lambda device: Stream(),
        "current_stream": lambda device: Stream("main"),
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": object,
        "graph": fake.graph,
        "get_sync_debug_mode": lambda: fake.sync_mode,
        "set_sync_debug_mode": fake.set_sync_mode,
    }
    for name, value in replacements.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return fake


def test_memory_is_measured_after_all_work_and_without_the_cache(cuda):
    assert CudaBackend().bytes_in_use() == 700
    assert cuda.calls == ["synchronize", "empty cache", "measure cuda:1"]


def test_memory_is_not_measured_inside_a_capture(cuda):
    cuda.is_capturing = True
    with pytest.raises(RegistryError, match=r"found a graph capture in progress"):
        CudaBackend().bytes_in_use()
    assert cuda.calls == []


def test_a_capture_follows_warm_ups_on_the_same_side_stream(cuda):
    backend = CudaBackend()
    backend.capture(cuda.note("run"))
    assert cuda.calls == [
        "side waits for main",
        *["run"] * NUM_WARMUPS,
        "main waits for side",
        "begin capture in pool 1",
        "run",
        "end capture",
    ]
    assert backend.num_captures == 1


def test_captures_share_one_pool_and_a_release_starts_another(cuda):
    backend = CudaBackend()
    backend.capture(lambda: None)
    backend.capture(lambda: None)
    backend.release()
    backend.capture(lambda: None)
    pools = [call for call in cuda.calls if call.startswith("begin")]
    assert pools == [f"begin capture in pool {pool}" for pool in (1, 1, 2)]
    assert backend.num_captures == 3


def test_a_failed_capture_is_not_counted(cuda):
    backend = CudaBackend()
    with pytest.raises(ZeroDivisionError):
        backend.capture(lambda: 1 / 0)
    assert backend.num_captures == 0


def test_the_sync_mode_is_put_back_also_after_an_error(cuda):
    cuda.sync_mode = 1
    seen = []

    def step() -> None:
        with CudaBackend().forbid_host_sync():
            seen.append(cuda.sync_mode)
            raise RuntimeError("a sync")

    with pytest.raises(RuntimeError, match=r"a sync"):
        step()
    assert (seen, cuda.sync_mode) == (["error"], 1)
