"""What an operator may change while the server runs, through SGLang's own ``POST /set_internal_state``.

The route's authentication is SGLang's, and so is its rule that values are numbers. SGLang's table of settings is fixed,
so ours are added to it.
"""

import functools
from typing import TYPE_CHECKING, Any, NoReturn

from safetensors import SafetensorError

if TYPE_CHECKING:
    from adaptivespec.sglang_plugin.worker import AdaptiveWorker

SHAPE_KEY = "adaptive_shape"
KAPPA_KEY = "adaptive_kappa"
DRIFT_KEY = "adaptive_drift"
DRIFT_ACTIONS = ("learn", "freeze", "reset", "save")
UNPIN = -1
STRICT = 0


def install(worker: "AdaptiveWorker") -> None:
    """Accept three settings. Once, in the scheduler's process.

    ``{"server_args": {"adaptive_shape": 2}}`` pins the shape at that place, counted from 0, of the list ``shapes`` in
    ``/server_info``; -1 lets the policy choose again. ``{"server_args": {"adaptive_kappa": 0.3}}`` sets ``margin.kappa``
    for the requests that run and those to come; 0 makes the server strict. ``{"server_args": {"adaptive_drift": 1}}``
    does what stands at that place of `DRIFT_ACTIONS`. Another number is rejected and counted: the
    answer is ``[false]``, the reason stands in the server's log.
    """
    from sglang.srt.managers.scheduler_components import internal_state

    controller = internal_state.SchedulerInternalStateController
    sglang_handlers = controller._update_handlers

    def reject(key: str, value: Any, expected: str) -> NoReturn:
        worker.reporter.record_refusal(key)
        raise internal_state.UpdateRejected(f"{key}: found {value!r}; expected {expected}")

    def validate_shape(key: str, value: Any) -> None:
        shapes = worker.shapes
        if value not in range(UNPIN, len(shapes)):
            places = " ".join(f"{place}:{shape}" for place, shape in enumerate(shapes))
            reject(key, value, f"-1 (the policy chooses) or {places}")

    def apply_shape(key: str, value: Any) -> None:
        worker.pinned_shape = None if value == UNPIN else worker.shapes[int(value)]

    def validate_kappa(key: str, value: Any) -> None:
        if not 0 <= value <= 1:
            reject(key, value, "0 (strict), or above 0 and at most 1")
        if value and (worker.config.strict_only or worker.config.verifier == "strict"):
            reject(key, value, "0: this server is strict by its configuration")

    def apply_kappa(key: str, value: Any) -> None:
        worker.verify_step.rows.kappa = None if value == STRICT else float(value)

    def validate_drift(key: str, value: Any) -> None:
        if worker.drift is None:
            reject(key, value, "nothing: this server runs without drift.enabled")
        if value not in range(len(DRIFT_ACTIONS)):
            reject(key, value, " ".join(f"{place}:{action}" for place, action in enumerate(DRIFT_ACTIONS)))
        if DRIFT_ACTIONS[int(value)] == "save" and worker.config.drift.file is None:
            reject(key, value, "another action, or a server with drift.file")
        if DRIFT_ACTIONS[int(value)] == "save":
            # Here, where it can still be rejected: an error while a setting is applied ends SGLang's scheduler.
            try:
                worker.drift.save()
            except (OSError, SafetensorError) as error:
                reject(key, value, f"a file that can be written ({error})")

    def apply_drift(key: str, value: Any) -> None:
        drift, action = worker.drift, DRIFT_ACTIONS[int(value)]
        assert drift is not None
        if action == "reset":
            drift.reset()
        elif action != "save":
            drift.is_frozen = action == "freeze"

    ours = {
        SHAPE_KEY: internal_state._UpdateHandler(validate_shape, apply_shape),
        DRIFT_KEY: internal_state._UpdateHandler(validate_drift, apply_drift),
        KAPPA_KEY: internal_state._UpdateHandler(validate_kappa, apply_kappa),
    }

    @functools.wraps(sglang_handlers)
    def handlers(self: Any) -> dict[str, Any]:
        return {**sglang_handlers(self), **ours}

    controller._update_handlers = handlers
