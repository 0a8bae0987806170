"""The worker behind ADAPTIVE: one decode step, readable in one place."""

import functools
import weakref
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.managers.auxiliary_output import append_auxiliary_output
from sglang.srt.runtime_context import get_exec, get_observability, get_spec
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

from adaptivespec.config import AdaptiveConfig
from adaptivespec.metrics import Promotion, RequestCounts
from adaptivespec.policy import StepResult, make_policy
from adaptivespec.sglang_plugin import admin, contract
from adaptivespec.sglang_plugin.draft_worker import MIN_RELAY_WIDTH, AdaptiveDraftWorker
from adaptivespec.sglang_plugin.drift_link import DriftLink
from adaptivespec.sglang_plugin.report import Reporter, install_in_scheduler
from adaptivespec.sglang_plugin.request_rows import has_penalties, options_of
from adaptivespec.sglang_plugin.resolve import effective_settings
from adaptivespec.sglang_plugin.signals import StepSignal
from adaptivespec.sglang_plugin.start_errors import say_in_one_line_in_scheduler
from adaptivespec.sglang_plugin.states import RuntimeStates
from adaptivespec.sglang_plugin.verify_step import VerifyStep
from adaptivespec.sglang_plugin.weight_updates import after_weight_updates
from adaptivespec.shapes import TreeShape


class AdaptiveWorker(EAGLEWorkerV2):
    """EAGLE-3 worker that chooses the tree shape of every step.

    A step: the policy chooses a shape from what earlier steps revealed; its runtime state is swapped in; SGLang drafts,
    verifies and extends the draft; the step's signals travel back to the policy with its tokens.
    """

    config: AdaptiveConfig

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        say_in_one_line_in_scheduler()
        contract.check(contract.WORKER)
        super().__init__(server_args, gpu_id, nccl_port, target_worker)
        settings = effective_settings(get_spec().speculative_adaptive_config, server_args, self.device)
        self.config = settings.config
        self.start_shape = settings.start
        self.shapes = settings.shapes
        self.policy = make_policy(settings.config, settings.start)
        self._draft_worker.__class__ = AdaptiveDraftWorker
        self._draft_worker.relay_width = max(MIN_RELAY_WIDTH, get_spec().speculative_eagle_topk)
        self.pinned_shape: TreeShape | None = None  # by an operator, see `admin`
        self.drift: DriftLink | None = None
        self._widths: dict[TreeShape, torch.Tensor] = {}
        admin.install(self)
        self.reporter = Reporter(self)
        install_in_scheduler(self.reporter)
        wait_for_penalised_output()
        if get_observability().enable_metrics:
            self.reporter.start_prometheus()
        for runner in (target_worker.model_runner, self._draft_worker.draft_runner):
            # A state's graphs stay right when weights are updated in place; captured anew they would be the envelope's.
            runner.weight_updater = replace(runner.weight_updater, recapture_cuda_graph=lambda: None)
        # Each state captures the target's verify graphs for its own width; SGLang's start-up capture would be for the
        # envelope, which no step runs with.
        target_worker.init_cuda_graphs = functools.partial(
            target_worker.init_cuda_graphs, capture_decode_cuda_graph=False
        )

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        self.verify_step = VerifyStep(self.target_worker.model_runner, self.device, self.config)
        self._draft_worker.verify_step = self.verify_step
        if self.config.drift.enabled:
            self._draft_worker.drift = self.drift = self._make_memory()
        self.states = RuntimeStates(self, self.config.graphs)
        self.states.build_all(self.shapes)
        self.states.swap(self.start_shape)

    def _make_memory(self) -> DriftLink:
        decode = getattr(get_exec().graph.cuda_graph_config, "decode", None)
        max_requests = max(getattr(decode, "max_bs", None) or 0, self.target_worker.model_runner.req_to_token_pool.size)
        drift = DriftLink(
            self._draft_worker,
            self.shapes,
            max_requests,
            self.config.drift,
            draft_folder=get_spec().speculative_draft_model_path,
        )
        after_weight_updates(drift.on_new_weights)  # the target's and the draft's
        return drift

    def clear_cache_pool(self) -> None:
        super().clear_cache_pool()
        if self.drift is not None and self.config.drift.learn:
            self.drift.reset()

    @property
    def spec_v2_attn_backends(self) -> tuple:
        return tuple(self.states.attention_backends())

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_idle():
            return super().forward_batch_generation(batch, *args, **kwargs)
        self.verify_step.begin(batch.reqs)
        corrected = self._begin_drift(batch.reqs)
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            result = super().forward_batch_generation(batch, *args, **kwargs)
            self._attach_signal(result, None, None)
            return result

        shape = self.pinned_shape or self.policy.choose([request.rid for request in batch.reqs])
        shape = self.states.fitting(shape, len(batch.reqs))
        self.states.swap(shape)
        result = super().forward_batch_generation(batch, *args, **kwargs)
        result.cap_lens = self._proposed(shape, len(batch.reqs))
        self._attach_signal(result, shape, corrected)
        return result

    def _proposed(self, shape: TreeShape, batch_size: int) -> torch.Tensor:
        """``[B]`` int32 drafts proposed to each request; SGLang calls it the cap and reports it. A shared constant."""
        widths = self._widths.get(shape)
        if widths is None or widths.shape[0] < batch_size:
            widths = torch.full((batch_size,), shape.num_drafts, dtype=torch.int32, device=self.device)
            self._widths[shape] = widths
        return widths[:batch_size]

    def _begin_drift(self, requests: list[Any]) -> list[bool | None] | None:
        if self.drift is None:
            return None
        self.drift.begin(requests)
        return self.drift.corrected_rows()

    def _attach_signal(self, result: Any, shape: TreeShape | None, corrected: list[bool | None] | None) -> None:
        top1_probs = result.next_draft_input.topk_p[:, 0].clone()
        promotions = self.verify_step.promotions if shape else None
        kappas = self.verify_step.rows.kappas
        signal = StepSignal(
            top1_probs, result.accept_lens if shape else None, shape, promotions, kappas, self, corrected
        )
        output = result.logits_output
        output.auxiliary_device_output = append_auxiliary_output(output.auxiliary_device_output, signal)

    # -- what the signals bring back, see `signals.SignalSink`

    def on_prefill(self, requests: list[Any], top1_probs: list[float]) -> None:
        for request, top1_prob in zip(requests, top1_probs, strict=True):
            if not hasattr(request, "adaptive_counts"):  # a retracted request is prefilled again
                request.adaptive_counts = RequestCounts.of(
                    self.verify_step.rows.kappa_of(request), details=options_of(request).details
                )
            request.adaptive_counts.root_prob = top1_prob
            # One that ended with its first token is never said to have finished.
            if options_of(request).enabled and not request.finished():
                self.policy.start(request.rid, top1_prob)
                # SGLang does not tell of every end: not of a request that is aborted after it was retracted.
                weakref.finalize(request, self.policy.finish, request.rid)

    def on_step(self, requests: list[Any], shape: TreeShape, num_accepted: list[int], top1_probs: list[float]) -> None:
        for request, accepted, top1_prob in zip(requests, num_accepted, top1_probs, strict=True):
            request.adaptive_counts.record(shape, accepted)
            request.adaptive_counts.root_prob = top1_prob
            self.policy.observe(StepResult(request.rid, shape, accepted, top1_prob))
        self.reporter.record_step(shape, num_accepted)  # last, so that it sees the breakers that this step tripped

    def on_corrected(self, requests: list[Any], corrected: list[bool | None], num_accepted: list[int]) -> None:
        assert self.drift is not None
        for request, was_corrected, accepted in zip(requests, corrected, num_accepted, strict=True):
            if was_corrected is not None:
                self.drift.record(request, was_corrected, accepted)
                self.reporter.record_corrected(was_corrected, accepted)

    def on_promotions(self, request: Any, promotions: list[Promotion], kappa: float) -> None:
        counts: RequestCounts = request.adaptive_counts
        before = counts.promoted, counts.promoted_cut
        num_returned = len(request.output_ids) if request.finished_len is None else request.finished_len
        counts.record_promotions(promotions, num_returned, kappa)
        self.reporter.record_promotions(counts.promoted - before[0], counts.promoted_cut - before[1])

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        self.policy.finish(rid)


def wait_for_penalised_output() -> None:
    """Have the scheduler commit a step before the next where a request has penalties, which depend on its every token.

    Without it, overlap would start the step while the last tokens are still on their way to the host. SGLang does the
    same for grammars. Once, in the scheduler's process.
    """
    from sglang.srt.managers.scheduler import Scheduler

    sglangs = Scheduler.is_disable_overlap_for_batch

    @functools.wraps(sglangs)
    def is_disable_overlap_for_batch(self: Any, batch: Any, last_batch: Any) -> bool:
        if sglangs(self, batch, last_batch=last_batch):
            return True
        is_pending = batch is not None and batch.forward_mode.is_decode() and len(self.result_queue) > 0
        return is_pending and any(map(has_penalties, batch.reqs))

    Scheduler.is_disable_overlap_for_batch = is_disable_overlap_for_batch
