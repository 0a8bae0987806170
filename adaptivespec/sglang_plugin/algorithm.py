"""The algorithm object that ``--speculative-algorithm ADAPTIVE`` resolves to: EAGLE-3 in everything but its worker."""

from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from adaptivespec.sglang_plugin.resolve import NAME

if TYPE_CHECKING:
    from sglang.srt.managers.overlap_utils import FutureMap


class AdaptiveAlgorithm(CustomSpecAlgo):
    """Answers every question as SGLang's EAGLE3 member does, and compares equal to it.

    The equality is for the places that test ``algo in (EAGLE, EAGLE3)``. Methods that `CustomSpecAlgo` lacks although
    the scheduler calls them unguarded are added here.
    """

    def is_eagle(self) -> bool:
        return True

    def is_eagle3(self) -> bool:
        return True

    def supports_mixed_chunk(self) -> bool:
        return bool(SpeculativeAlgorithm.EAGLE3.supports_mixed_chunk())

    def supports_grammar_overlap(self) -> bool:
        return bool(SpeculativeAlgorithm.EAGLE3.supports_grammar_overlap())

    def carries_draft_hidden_states(self) -> bool:
        return True

    def need_topk(self) -> bool:
        return True

    def get_platform_worker_cls(self) -> None:
        return None

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> "FutureMap":
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def __eq__(self, other: object) -> bool:
        return other is SpeculativeAlgorithm.EAGLE3 or isinstance(other, AdaptiveAlgorithm)

    def __hash__(self) -> int:
        return hash(SpeculativeAlgorithm.EAGLE3)


def register() -> None:
    """Make the name known to SGLang. Once a process."""

    @SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=AdaptiveAlgorithm)
    def _worker_class(server_args: Any) -> type:
        from adaptivespec.sglang_plugin.worker import AdaptiveWorker

        return AdaptiveWorker
