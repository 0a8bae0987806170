"""What a step revealed, on its way from the device to the policy, without a synchronisation of its own.

It rides on SGLang's auxiliary output: copied to the host together with the step's tokens, and consumed after they have
been committed. Under overlap that is one step late, which the policy accepts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from adaptivespec.metrics import Promotion
from adaptivespec.sglang_plugin.verify_step import StepPromotions
from adaptivespec.shapes import TreeShape


class SignalSink(Protocol):
    """Who hears of it. Lists are aligned with ``requests``; requests without newly committed tokens are left out."""

    def on_prefill(self, requests: list[Any], top1_probs: list[float]) -> None:
        """The requests' first token is there."""

    def on_step(self, requests: list[Any], shape: TreeShape, num_accepted: list[int], top1_probs: list[float]) -> None:
        """A step of this shape has been committed; ``num_accepted`` counts drafts, not the bonus token."""

    def on_corrected(self, requests: list[Any], corrected: list[bool | None], num_accepted: list[int]) -> None:
        """Which of the step's trees the memory had corrected, None for requests without one; called after `on_step`."""

    def on_promotions(self, request: Any, promotions: list[Promotion], kappa: float) -> None:
        """Tokens of the step before that stand in for the target's own, and the kappa it ran with; called after `on_step`."""


@dataclass(frozen=True)
class StepSignal:
    """The device side. Tensors are the step's own, never a graph's static buffers.

    Args:
        top1_probs: ``[B]`` float32 draft probability of the likeliest first token of the next tree.
        accept_lens: ``[B]`` integer accepted drafts plus the bonus token; None for a prefill.
        shape: what the step ran with; None for a prefill.
        promotions: what the margin rule did; None where it could do nothing.
        kappas: by row, what the step was verified with; None for strict rows.
        sink: who hears of it.
        corrected: by row, whether the memory had corrected the draft, None for rows without a bank; None without a memory.
    """

    top1_probs: Tensor
    accept_lens: Tensor | None
    shape: TreeShape | None
    promotions: StepPromotions | None
    kappas: list[float | None]
    sink: SignalSink
    corrected: list[bool | None] | None = None

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> "StepSignal":
        """The same on the host, readable once SGLang's copy event has passed. Host sync: none."""
        accept_lens = None if self.accept_lens is None else copy_tensor(self.accept_lens)
        promotions = self.promotions and StepPromotions(*map(copy_tensor, self.promotions))
        return replace(self, top1_probs=copy_tensor(self.top1_probs), accept_lens=accept_lens, promotions=promotions)

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Called by SGLang after the step's tokens have been committed and before they are streamed."""
        live = [row for row, commit in enumerate(commits) if commit is not None]
        requests = [batch.reqs[row] for row in live]
        top1_probs = self.top1_probs.tolist()
        if self.shape is None or self.accept_lens is None:
            self.sink.on_prefill(requests, [top1_probs[row] for row in live])
            return
        accept_lens = self.accept_lens.tolist()
        num_accepted = [accept_lens[row] - 1 for row in live]
        self.sink.on_step(requests, self.shape, num_accepted, [top1_probs[row] for row in live])
        if self.corrected is not None:
            self.sink.on_corrected(requests, [self.corrected[row] for row in live], num_accepted)
        for row, promoted in (self.promotions.by_row() if self.promotions else {}).items():
            commit, kappa = commits[row], self.kappas[row]
            if commit is not None and kappa is not None:
                found = [Promotion(commit.output_index + place, prob, top1) for place, prob, top1 in promoted]
                self.sink.on_promotions(batch.reqs[row], found, kappa)
