"""SGLang's EAGLE-3 draft worker, drafting a different shape at every step."""

import copy
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

if TYPE_CHECKING:
    from adaptivespec.sglang_plugin.drift_link import DriftLink
    from adaptivespec.sglang_plugin.verify_step import VerifyStep

# Draft-extend and prefill always hand over this many candidates at least: from two on SGLang computes the softmax whose
# first column is the draft confidence; for one it takes the argmax and calls its probability 1.
MIN_RELAY_WIDTH = 2


class AdaptiveDraftWorker(EagleDraftWorker):
    """Hands over root candidates of one fixed width and drafts from as many of them as the step's shape asks for.

    The width is fixed because SGLang sizes its relay buffers once and concatenates the candidates of requests that join
    a batch. An instance is a converted `EagleDraftWorker`: SGLang names that class in its constructor.
    """

    relay_width: int
    topk: int
    drift: "DriftLink | None" = None
    verify_step: "VerifyStep"

    def draft(self, batch: Any, **kwargs: Any) -> Any:
        # A narrowed copy: the batch's own input must stay wide, since a retracted step drafts again from it.
        narrow = copy.copy(batch.spec_info)
        narrow.topk_p = narrow.topk_p[:, : self.topk].contiguous()
        narrow.topk_index = narrow.topk_index[:, : self.topk].contiguous()
        batch.spec_info = narrow
        return super().draft(batch, **kwargs)

    def draft_forward(self, forward_batch: Any) -> Any:
        if self.drift is None or forward_batch.forward_mode.is_idle():
            return super().draft_forward(forward_batch)
        return self.drift.draft(super().draft_forward, forward_batch)

    def _draft_extend_for_prefill(self, *args: Any, **kwargs: Any) -> Any:
        return self._at_relay_width(super()._draft_extend_for_prefill, args, kwargs)

    def _draft_extend_for_decode(self, *args: Any, **kwargs: Any) -> Any:
        if self.drift is not None and self.verify_step.accepted is not None:
            self.drift.learn(self.verify_step.accepted, self.verify_step.logits)
            self.drift.begin_extend()
        return self._at_relay_width(super()._draft_extend_for_decode, args, kwargs)

    def init_attention_backend(self) -> None:
        """Nothing yet: the states bring their own attention backends, see `RuntimeStates`."""
        self.draft_attn_backend = None
        self.draft_extend_attn_backend = None

    def _capture_cuda_graphs(self) -> None:
        """Nothing yet: each state captures its own graphs with `capture_cuda_graphs`."""
        self.cuda_graph_runner = None
        self.cuda_graph_runner_for_draft_extend = None

    def capture_cuda_graphs(self) -> None:
        """SGLang's own capture, for the shape and attention backends that are set now."""
        super()._capture_cuda_graphs()

    def _at_relay_width(self, call: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        topk, self.topk = self.topk, self.relay_width
        try:
            return call(*args, **kwargs)
        finally:
            self.topk = topk
