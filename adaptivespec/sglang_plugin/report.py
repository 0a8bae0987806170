"""What ADAPTIVE tells the outside: Prometheus counters, `/server_info`, and the details of a response."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adaptivespec.metrics import ServerCounts
from adaptivespec.sglang_plugin.resolve import is_adaptive
from adaptivespec.shapes import TreeShape

if TYPE_CHECKING:
    from adaptivespec.sglang_plugin.worker import AdaptiveWorker

_DETAIL_KEYS = ("spec_shape_histogram", "spec_margin", "spec_steps")
_PREFIX = "adaptivespec:"


class Reporter:
    """Counts the steps of one scheduler and shows them. The counters belong to the scheduler's process.

    Args:
        worker: whose policy and states are reported.
    """

    def __init__(self, worker: "AdaptiveWorker") -> None:
        self._worker = worker
        self.counts = ServerCounts()
        self._prometheus: PrometheusCounters | None = None

    def record_step(self, shape: TreeShape, num_accepted: list[int]) -> None:
        """Count one step of a batch; ``num_accepted`` leaves the bonus token out."""
        counts = self.counts
        policy_counts = self._worker.policy.counts
        switches = counts.shape_switches
        counts.record_step(shape, num_accepted)
        trips, recoveries = (
            policy_counts.trips - counts.breaker_trips,
            policy_counts.recoveries - counts.breaker_recoveries,
        )
        counts.breaker_trips, counts.breaker_recoveries = policy_counts.trips, policy_counts.recoveries
        if self._prometheus is not None and num_accepted:
            self._prometheus.record(shape, num_accepted, counts.shape_switches - switches, trips, recoveries)
            if self._worker.drift is not None:
                self._prometheus.record_drift_events(self._worker.drift.new_events())

    def record_promotions(self, num_returned: int, num_cut: int) -> None:
        """Count promoted tokens."""
        self.counts.promoted += num_returned
        self.counts.promoted_cut += num_cut
        if self._prometheus is not None:
            self._prometheus.promoted.labels("returned").inc(num_returned)
            self._prometheus.promoted.labels("cut").inc(num_cut)

    def record_corrected(self, was_corrected: bool, accepted: int) -> None:
        """Count a step of a request that uses the memory."""
        if self._prometheus is not None:
            self._prometheus.record_corrected(was_corrected, accepted)

    def record_refusal(self, reason: str) -> None:
        """Count a run-time setting that was refused."""
        self.counts.record_refusal(reason)
        if self._prometheus is not None:
            self._prometheus.refusals.labels(reason).inc()

    def start_prometheus(self) -> None:
        """Begin to feed Prometheus; SGLang has set up its multi-process folder by now."""
        self._prometheus = PrometheusCounters()

    def server_info(self) -> dict[str, Any]:
        """The effective config, the states and the counters, as JSON types."""
        worker, counts = self._worker, self.counts
        return {
            "config": worker.config.to_dict(),
            "start_shape": str(worker.start_shape),
            "pinned_shape": str(worker.pinned_shape) if worker.pinned_shape else None,
            "shapes": [str(shape) for shape in worker.shapes],
            "states": worker.states.report().to_dict(),
            "kappa": worker.verify_step.rows.kappa,
            "drift": worker.drift.report() if worker.drift else None,
            "counts": counts.to_dict() | {"bad_signals": worker.policy.counts.bad_signals},
        }


@functools.cache
def refusals_counter() -> Any:
    """Prometheus counter of a process: of the scheduler's for settings, of the tokenizer's for requests."""
    from prometheus_client import Counter  # after SGLang has set up its multi-process folder

    return Counter(f"{_PREFIX}refusals", "run-time settings and requests that were refused", ("reason",))


class PrometheusCounters:
    """The counters on ``/metrics``, all of them monotonic, so that ``rate()`` works on them."""

    def __init__(self) -> None:
        from prometheus_client import Counter

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(f"{_PREFIX}{name}", text, labels)

        self._proposed = counter("proposed_drafts", "draft tokens offered to the target")
        self._accepted = counter("accepted_drafts", "draft tokens accepted, bonus tokens not counted")
        self._verify_steps = counter("verify_steps", "verify steps, summed over requests")
        self._steps = counter("steps", "batch steps by tree shape (num_steps, topk, num_draft_tokens)", "shape")
        self._switches = counter("shape_switches", "batch steps whose shape differed from the one before")
        self._trips = counter("breaker_trips", "requests cut off by the circuit breaker")
        self._recoveries = counter("breaker_recoveries", "requests whose circuit breaker closed again")
        self.promoted = counter("promoted_drafts", "drafts accepted in place of the target's own token", "fate")
        self.refusals = refusals_counter()
        self._drift_events = counter(
            "drift_events", "what happened in the memory, up to 64 steps late", "event", "bank"
        )
        self._drift_steps = counter("drift_steps", "request steps by whether the memory corrected them", "corrected")
        self._drift_accepted = counter("drift_accepted_drafts", "drafts accepted in those steps", "corrected")

    def record(self, shape: TreeShape, num_accepted: list[int], switches: int, trips: int, recoveries: int) -> None:
        """Add one step of a batch."""
        self._proposed.inc(shape.num_drafts * len(num_accepted))
        self._accepted.inc(sum(num_accepted))
        self._verify_steps.inc(len(num_accepted))
        self._steps.labels(str(shape)).inc()
        self._switches.inc(switches)
        self._trips.inc(trips)
        self._recoveries.inc(recoveries)

    def record_drift_events(self, events: list[tuple[int, str, int]]) -> None:
        """Add what happened in the memory. Banks are numbers: tenants' names may be secrets, and come without end."""
        for bank, event, count in events:
            self._drift_events.labels(event, bank).inc(count)

    def record_corrected(self, was_corrected: bool, accepted: int) -> None:
        """Add a request's step."""
        label = "yes" if was_corrected else "no"
        self._drift_steps.labels(label).inc()
        self._drift_accepted.labels(label).inc(accepted)


def install_in_scheduler(reporter: Reporter) -> None:
    """Show the reporter in `/server_info` and shape histograms in responses. Once, in the scheduler's process."""
    from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController
    from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer

    add_speculative = SchedulerInternalStateController._add_speculative

    @functools.wraps(add_speculative)
    def add_adaptive(self: Any, state: dict[str, Any]) -> None:
        add_speculative(self, state)
        state["adaptive"] = reporter.server_info()

    SchedulerInternalStateController._add_speculative = add_adaptive
    SchedulerOutputStreamer.has_additional_customized_info = True
    SchedulerOutputStreamer.build_additional_customized_info = _response_details
    SchedulerOutputStreamer.is_request_level_customized_info_key = lambda self, key: key in _DETAIL_KEYS
    SchedulerMetricsReporter.report_decode_stats = _with_true_accept_rate(SchedulerMetricsReporter.report_decode_stats)


def _with_true_accept_rate(report_decode_stats: Callable[..., None]) -> Callable[..., None]:
    """For the log, `/v1/loads` and ``sglang:spec_accept_rate``, where SGLang divides by the envelope's width: as many correct
    drafts, for the time of the call, as make that the rate of what was really proposed."""

    @functools.wraps(report_decode_stats)
    def report(self: Any, *args: Any, **kwargs: Any) -> None:
        from sglang.srt.runtime_context import get_spec

        correct, proposed = self.spec_num_correct_drafts, self.spec_num_cap_tokens
        at_full_width = self.spec_num_forward_ct * (get_spec().speculative_num_draft_tokens - 1)
        self.spec_num_correct_drafts = correct * at_full_width / proposed if proposed else 0
        report_decode_stats(self, *args, **kwargs)
        if self.spec_num_forward_ct:  # it is not the time to report, and the counts go on
            self.spec_num_correct_drafts = correct

    return report


def _response_details(self: Any, reqs: list[Any]) -> dict[str, list]:
    """One list a request and key: its value once the request has finished, nothing before."""
    details: dict[str, list] = {key: [] for key in _DETAIL_KEYS}
    for request in reqs:
        counts = getattr(request, "adaptive_counts", None)
        meta = counts.to_meta() if counts is not None and request.finished() else {}
        for key, values in details.items():
            values.append([meta[key]] if key in meta else [])
    return details


def install_in_tokenizer() -> None:
    """Put details into responses, and make the accept rate count what was really proposed. Acts on ADAPTIVE's only."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info",
        _add_details,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
        _correct_spec_metrics,
        HookType.AFTER,
    )


def _add_details(
    original: Callable[..., None],
    self: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, list],
    index: int,
    finish_reason: dict | None,
) -> None:
    """SGLang accumulates such values as one a token, which streams then slice and repeat; these are one a request."""
    others = {key: values for key, values in customized_info.items() if key not in _DETAIL_KEYS}
    original(self, meta_info, state, others, index, finish_reason)
    for key in customized_info.keys() & _DETAIL_KEYS:
        if values := customized_info[key][index]:
            meta_info[key] = values[0]


def _correct_spec_metrics(result: None, self: Any, meta_info: dict[str, Any], recv_obj: Any, i: int) -> None:
    from sglang.srt.runtime_context import get_spec

    if not is_adaptive(get_spec()) or "spec_verify_ct" not in meta_info:
        return
    # Every step reports its width as SGLang's "cap", so the sum is what was proposed.
    proposed = recv_obj.spec_num_cap_tokens[i]
    meta_info["spec_num_proposed_drafts"] = proposed
    meta_info["spec_accept_rate"] = meta_info["spec_num_correct_drafts"] / proposed if proposed else 0.0
