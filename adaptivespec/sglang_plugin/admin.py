"""What an operator may change while the server runs, through SGLang's own ``POST /set_internal_state``.

The route's authentication is SGLang's, and so is its rule that values are numbers. SGLang's table of settings is fixed,
so ours are added to it.
"""

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adaptivespec.sglang_plugin.worker import AdaptiveWorker

SHAPE_KEY = "adaptive_shape"
UNPIN = -1


def install(worker: "AdaptiveWorker") -> None:
    """Accept ``{"server_args": {"adaptive_shape": 2}}``: pin the shape at that place, counted from 0, of the list
    ``shapes`` in ``/server_info``; -1 lets the policy choose again.

    Another number is rejected: the answer is ``[false]``, the reason stands in the server's log. Once, in the
    scheduler's process.
    """
    from sglang.srt.managers.scheduler_components import internal_state

    controller = internal_state.SchedulerInternalStateController
    sglang_handlers = controller._update_handlers

    def validate(key: str, value: Any) -> None:
        shapes = worker.shapes
        if value not in range(UNPIN, len(shapes)):
            places = " ".join(f"{place}:{shape}" for place, shape in enumerate(shapes))
            raise internal_state.UpdateRejected(f"{key}: found {value!r}; expected -1 (the policy chooses) or {places}")

    def apply(key: str, value: Any) -> None:
        worker.pinned_shape = None if value == UNPIN else worker.shapes[int(value)]

    @functools.wraps(sglang_handlers)
    def handlers(self: Any) -> dict[str, Any]:
        return {**sglang_handlers(self), SHAPE_KEY: internal_state._UpdateHandler(validate, apply)}

    controller._update_handlers = handlers
