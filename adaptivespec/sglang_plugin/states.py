"""Runtime states: what a tree shape needs to run, built once at start and swapped between steps.

A state has three parts, each shared by all shapes that agree in the part's key: the draft (num_steps, topk,
num_draft_tokens), draft-extend (num_draft_tokens) and verify (num_draft_tokens); the last two also depend on whether the
tree is a chain, which SGLang's attention backends look at. Swapping sets attributes of SGLang's workers and runners;
its configuration stays at the envelope of all shapes from start to end.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend, with_phase
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_context, get_exec, get_spec
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from sglang.srt.speculative.spec_utils import draft_tp_context

from adaptivespec.config import GraphConfig
from adaptivespec.errors import RefusedError
from adaptivespec.sglang_plugin import refusals
from adaptivespec.shapes import TreeShape
from cuda_graphs import EagerBackend, RegistryReport, StateBackend, StateRegistry, prune_batch_sizes

if TYPE_CHECKING:
    from adaptivespec.sglang_plugin.worker import AdaptiveWorker

logger = logging.getLogger(__name__)
_Part = TypeVar("_Part")


@dataclass(frozen=True)
class DraftPart:
    """Multi-step attention backend (None up to one step), captured draft graphs (None without), and the constant parent
    and score tensors of a chain (None for a tree)."""

    attn_backend: Any
    graph_runner: Any
    chain_parents: torch.Tensor | None
    chain_score_indices: torch.Tensor | None


@dataclass(frozen=True)
class ForwardPart:
    """Attention backend and captured graphs (None without) of draft-extend or of verify."""

    attn_backend: Any
    graph_runner: Any


@dataclass(frozen=True)
class RuntimeState:
    """Everything that a step of this shape runs with."""

    shape: TreeShape
    draft: DraftPart
    draft_extend: ForwardPart
    verify: ForwardPart


class RuntimeStates:
    """Builds the states of a worker and swaps them.

    Args:
        worker: whose attributes are set.
        config: memory budget and capture sizes.
    """

    def __init__(self, worker: "AdaptiveWorker", config: GraphConfig) -> None:
        self._worker = worker
        self._draft = worker.draft_worker
        self._target_runner = worker.target_worker.model_runner
        self._config = config
        self._has_graphs = worker.device == "cuda" and not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)
        # Where it was asked for it has been refused; SGLang may also have decided so itself.
        if worker.device == "cuda" and check_cuda_graph_backend(Phase.PREFILL, Backend.FULL):
            raise RefusedError(
                reason="prefill_graph",
                where="--cuda-graph-backend-prefill",
                found="'full'",
                expected=f"'breakable' or 'disabled': {refusals.PREFILL_GRAPH}",
                fix="leave it out",
            )
        self._max_batch_sizes: dict[TreeShape, int] = {}
        self._registry: StateRegistry[TreeShape, RuntimeState] = StateRegistry(
            self._build,
            backend=_make_backend(worker.device),
            budget_bytes=config.memory_budget_bytes,
            activate=self._activate,
        )

    def build_all(self, shapes: tuple[TreeShape, ...]) -> None:
        """Build the state of every shape, the widest first so that the rest fits its memory.

        Raises:
            BudgetError: the states need more than the budget; says how much.
        """
        largest_first = sorted(shapes, key=lambda shape: (shape.num_draft_tokens, shape), reverse=True)
        with _many_specialisations():
            report = self._registry.build_all(largest_first)
        logger.info(
            "ADAPTIVE: %d states in %.2f s, %.1f MiB: %s",
            len(report.states),
            report.total_seconds,
            report.total_bytes / 2**20,
            ", ".join(str(state.key) for state in report.states),
        )

    def swap(self, shape: TreeShape) -> None:
        """Make the next step run with this shape. Host sync: none; microseconds of attribute writes."""
        self._registry.swap(shape)

    def fitting(self, shape: TreeShape, batch_size: int) -> TreeShape:
        """The shape itself where its graphs were captured for this batch size, else the widest shape whose were.

        Without such a shape, and without graphs, the shape itself: the step then runs eagerly. Host sync: none.
        """
        if not self._has_graphs or self._max_batch_sizes[shape] >= batch_size:
            return shape
        captured = [other for other, largest in self._max_batch_sizes.items() if largest >= batch_size]
        return max(captured, key=lambda other: (other.num_draft_tokens, other), default=shape)

    def report(self) -> RegistryReport:
        """Bytes and seconds of each state and part."""
        return self._registry.report()

    def attention_backends(self) -> list[Any]:
        """Every attention backend that some step may use."""
        states = [self._registry.lookup(key) for key in self._registry.keys]
        parts = [part for state in states for part in (state.draft, state.draft_extend, state.verify)]
        return [part.attn_backend for part in parts if part.attn_backend is not None]

    def _build(self, shape: TreeShape) -> RuntimeState:
        parts = self._registry.parts
        width_key = (shape.num_draft_tokens, shape.topk == 1)
        with self._as_if(shape):
            return RuntimeState(
                shape,
                parts.get("draft", shape, lambda: self._as_draft(lambda: self._build_draft(shape))),
                parts.get("draft_extend", width_key, lambda: self._as_draft(self._build_draft_extend)),
                parts.get("verify", width_key, lambda: self._build_verify(shape)),
            )

    def _as_draft(self, build: Callable[[], _Part]) -> _Part:
        """Build a part under the draft's parallel layout and experts' kernels, which are not the target's."""
        with (
            draft_tp_context(self._draft.parallel_layout),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            return build()

    def _build_draft(self, shape: TreeShape) -> DraftPart:
        draft = self._draft
        draft._rebuild_topk1_chain_buffers()
        backend = self._backend_factory(shape).create_decode_backend()
        draft.draft_attn_backend = draft.draft_runner.draft_attn_backend = backend
        draft.draft_extend_attn_backend = None  # so that only the draft is captured
        draft.capture_cuda_graphs()
        is_chain = shape.topk == 1
        return DraftPart(
            backend,
            draft.cuda_graph_runner,
            draft._topk1_parents_prealloc if is_chain else None,
            draft._topk1_score_indices_prealloc if is_chain else None,
        )

    def _build_draft_extend(self) -> ForwardPart:
        draft = self._draft
        backend = self._backend_factory(TreeShape(1, 1, 2)).create_draft_extend_backend()
        draft.draft_extend_attn_backend = backend
        if backend is not None:
            draft.draft_runner.attn_backend = backend
        draft.speculative_num_steps = 1  # so that only draft-extend is captured
        draft.capture_cuda_graphs()
        return ForwardPart(backend or draft.draft_runner.attn_backend, draft.cuda_graph_runner_for_draft_extend)

    def _build_verify(self, shape: TreeShape) -> ForwardPart:
        runner = self._target_runner
        # The workspace is everyone's: no two states run at once.
        backend = runner._get_attention_backend(init_new_workspace=False)
        graphs = None
        if self._has_graphs:
            graphs = DecodeCudaGraphRunner(
                runner,
                attn_backend=backend,
                speculative_num_steps=shape.num_steps,
                speculative_num_draft_tokens=shape.num_draft_tokens,
            )
        return ForwardPart(backend, graphs)

    def _backend_factory(self, shape: TreeShape) -> DraftBackendFactory:
        return DraftBackendFactory(self._draft.draft_runner, shape.topk, shape.num_steps)

    @contextmanager
    def _as_if(self, shape: TreeShape) -> Iterator[None]:
        """SGLang's configuration and workers as if they had been started with this shape; for building only."""
        names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
        before = {name: getattr(get_spec(), name) for name in names}
        if self._has_graphs:
            before["cuda_graph_config"] = get_exec().graph.cuda_graph_config
        now = dict(zip(names, shape.to_list(), strict=True)) | self._capture_sizes(shape)
        get_context().override("adaptivespec.build", **now)
        set_shape(self._worker, shape)
        try:
            yield
        finally:
            get_context().override("adaptivespec.built", **before)

    def _capture_sizes(self, shape: TreeShape) -> dict[str, Any]:
        if not self._has_graphs:
            return {}
        config = get_exec().graph.cuda_graph_config
        sizes = prune_batch_sizes(
            config.decode.bs,
            max_batch_size=self._config.max_batch_size,
            max_rows=self._config.max_rows,
            rows_per_request=shape.num_draft_tokens,
        )
        self._max_batch_sizes[shape] = max(sizes)
        return {"cuda_graph_config": with_phase(config, Phase.DECODE, bs=sizes)}

    def _activate(self, state: RuntimeState) -> None:
        set_shape(self._worker, state.shape)
        draft, runner = self._draft, self._draft.draft_runner
        draft.draft_attn_backend = runner.draft_attn_backend = state.draft.attn_backend
        draft.cuda_graph_runner = state.draft.graph_runner
        if state.draft.chain_parents is not None:
            draft._topk1_parents_prealloc = state.draft.chain_parents
            draft._topk1_score_indices_prealloc = state.draft.chain_score_indices
        draft.draft_extend_attn_backend = runner.attn_backend = state.draft_extend.attn_backend
        draft.cuda_graph_runner_for_draft_extend = state.draft_extend.graph_runner
        self._target_runner.attn_backend = state.verify.attn_backend
        self._target_runner.decode_cuda_graph_runner = state.verify.graph_runner


@contextmanager
def _many_specialisations() -> Iterator[None]:
    """Let SGLang's compiled tree step be specialised for every shape and batch size; torch stops after eight, and would
    capture the rest unfused."""
    from torch._dynamo import config

    with config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
        yield


def set_shape(worker: "AdaptiveWorker", shape: TreeShape) -> None:
    """Set the three shape attributes that SGLang's workers read at every step."""
    for owner in (worker, worker.draft_worker):
        owner.speculative_num_steps = shape.num_steps
        owner.topk = shape.topk
        owner.speculative_num_draft_tokens = shape.num_draft_tokens


def _make_backend(device: str) -> StateBackend:
    if device != "cuda":
        return EagerBackend()
    from cuda_graphs.cuda import CudaBackend

    return CudaBackend()
