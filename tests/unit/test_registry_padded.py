"""Functions recorded per batch size on static buffers, the toy pair, and the CUDA backend as far as a CPU can tell."""

from collections import namedtuple

import pytest
import torch

from cuda_graphs import EagerBackend, RegistryError
from cuda_graphs.cuda import CudaBackend
from cuda_graphs.padded import PaddedGraphs
from cuda_graphs.toy import ToyModel, draft, eager_step, toy_registry, verify

Shape = namedtuple("Shape", "num_steps topk num_draft_tokens")


class Recorder(EagerBackend):
    """Notes what is captured and replayed; a captured callable is run once, as a warm-up does."""

    def __init__(self) -> None:
        super().__init__()
        self.replayed: list[int] = []

    def capture(self, run):
        run()
        self.num_captures += 1
        number, graph = self.num_captures, super().capture(run)
        self.replayed = []

        class Graph:
            def replay(_):
                self.replayed.append(number)
                graph.replay()

        return Graph()


def double(tensors):
    return {"y": tensors["x"] * 2}


def test_a_batch_runs_on_the_next_larger_recorded_size_and_returns_its_own_rows():
    backend = Recorder()
    graphs = PaddedGraphs(double, {"x": torch.zeros(8, 3)}, [1, 4, 8], backend)
    assert backend.num_captures == 3
    for rows, number in [(1, 3), (2, 2), (4, 2), (5, 1), (8, 1)]:  # captured largest first
        backend.replayed.clear()
        x = torch.randn(rows, 3)
        assert torch.equal(graphs({"x": x})["y"], x * 2)
        assert backend.replayed == [number]


def test_results_stay_in_one_place_until_the_next_call():
    graphs = PaddedGraphs(double, {"x": torch.zeros(4, 1)}, [2, 4], EagerBackend())
    first = graphs({"x": torch.ones(2, 1)})["y"]
    second = graphs({"x": torch.full((4, 1), 3.0)})["y"]
    assert first.data_ptr() == second.data_ptr() == graphs.outputs["y"].data_ptr()
    assert first.tolist() == [[6.0], [6.0]]


@pytest.mark.parametrize("rows", [0, 5])
def test_a_batch_that_no_recorded_size_holds_is_refused(rows):
    graphs = PaddedGraphs(double, {"x": torch.zeros(4, 1)}, [2, 4], EagerBackend())
    with pytest.raises(RegistryError, match=rf"found a batch of {rows}; expected 1 to 4"):
        graphs({"x": torch.zeros(rows, 1)})


def test_wrong_names_and_wrong_sizes_are_refused():
    graphs = PaddedGraphs(double, {"x": torch.zeros(4, 1)}, [4], EagerBackend())
    with pytest.raises(RegistryError, match=r"found inputs \['z'\]; expected \['x'\]"):
        graphs({"z": torch.zeros(1, 1)})
    for sizes in ([], [0], [5]):
        with pytest.raises(RegistryError, match=r"input buffers of 4 rows"):
            PaddedGraphs(double, {"x": torch.zeros(4, 1)}, sizes, EagerBackend())


@pytest.mark.parametrize("shape", [Shape(3, 4, 4), Shape(4, 3, 5), Shape(5, 2, 6), Shape(7, 1, 8), Shape(1, 2, 3)])
def test_the_toy_drafts_trees_and_accepts_the_target_path(shape):
    model = ToyModel.random(torch.device("cpu"), vocab=64, hidden=16)
    inputs = {"hidden": torch.randn(32, 16, dtype=torch.float64), "token": torch.arange(32)}
    drafted = draft(model, shape, inputs)
    tokens, parents = drafted["tokens"], drafted["parents"]
    assert tokens.shape == parents.shape == (32, shape.num_draft_tokens)
    assert torch.equal(tokens[:, 0], inputs["token"])
    assert (parents[:, 1:] < torch.arange(1, shape.num_draft_tokens)).all()
    if shape.topk == 1:
        assert (parents[:, 1:] == torch.arange(shape.num_steps)).all()
    got = verify(model, {"hidden": inputs["hidden"], **drafted})
    for row in range(32):  # walk the tree by hand
        node, length = 0, 1
        while True:
            wanted = got["predicted"][row, node]
            children = [i for i in range(1, shape.num_draft_tokens) if parents[row, i] == node]
            match = [i for i in children if tokens[row, i] == wanted]
            if not match:
                break
            node, length = match[0], length + 1
        assert (got["accept_len"][row], got["bonus"][row]) == (length, wanted)
    assert got["accept_len"].max() > 1  # something is accepted, so the walk was tested


def test_a_swapped_state_equals_a_freshly_built_one_also_between_shapes_of_equal_num_steps():
    model = ToyModel.random(torch.device("cpu"), vocab=64, hidden=16)
    shapes = [Shape(6, 2, 7), Shape(6, 1, 7), Shape(4, 4, 5), Shape(4, 3, 5)]
    swapped = toy_registry(model, Recorder(), [2])
    report = swapped.build_all(shapes)
    assert [(p.key, p.num_users) for p in report.parts] == [((7, False), 1), ((7, True), 1), ((5, False), 2)]
    for turn in range(3):
        for shape in shapes:
            inputs = {"hidden": torch.randn(2, 16, dtype=torch.float64), "token": torch.tensor([turn, 7])}
            fresh = toy_registry(model, Recorder(), [2])
            fresh.build_all([shape])
            got, expected = swapped.swap(shape).step(inputs), fresh.swap(shape).step(inputs)
            eager = eager_step(model, shape, inputs)
            assert got.keys() == expected.keys() == eager.keys()
            for name in got:
                assert torch.equal(got[name], expected[name])
                assert torch.allclose(got[name].double(), eager[name].double(), rtol=1e-9)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a CUDA GPU")
def test_the_cuda_backend_refuses_a_machine_without_a_gpu():
    with pytest.raises(RegistryError, match=r"found no CUDA device in torch .* Fix: use EagerBackend"):
        CudaBackend()


def test_an_out_of_memory_error_is_recognised_through_wrappers():
    wrapped = Exception("Capture cuda graph failed")
    wrapped.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert CudaBackend.is_out_of_memory(wrapped)
    assert CudaBackend.is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not CudaBackend.is_out_of_memory(ValueError("an essay about being out of memory"))
    assert not CudaBackend.is_out_of_memory(RuntimeError("shape mismatch"))
