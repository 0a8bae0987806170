"""SGLang's EAGLE-3 draft worker, drafting a different shape at every step."""

import copy
from typing import Any

from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

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

    def draft(self, batch: Any, **kwargs: Any) -> Any:
        # A narrowed copy: the batch's own input must stay wide, since a retracted step drafts again from it.
        narrow = copy.copy(batch.spec_info)
        narrow.topk_p = narrow.topk_p[:, : self.topk].contiguous()
        narrow.topk_index = narrow.topk_index[:, : self.topk].contiguous()
        batch.spec_info = narrow
        return super().draft(batch, **kwargs)

    def _draft_extend_for_prefill(self, *args: Any, **kwargs: Any) -> Any:
        return self._at_relay_width(super()._draft_extend_for_prefill, args, kwargs)

    def _draft_extend_for_decode(self, *args: Any, **kwargs: Any) -> Any:
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
