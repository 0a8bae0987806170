"""`adaptivespec.sglang_plugin.request_checks`: what a request may not ask, without a server."""

import json
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

import pytest
from sglang.srt import runtime_context

from adaptivespec.errors import ConfigError
from adaptivespec.sglang_plugin import request_checks


@pytest.fixture
def server(monkeypatch, tmp_path):
    """Sets what the server runs: the algorithm and ADAPTIVE's config."""

    def set_up(algorithm="ADAPTIVE", config=None):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps(config or {}))
        spec = SimpleNamespace(speculative_algorithm=algorithm, speculative_adaptive_config=str(path))
        monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)

    metrics = SimpleNamespace(enable_metrics=False)
    monkeypatch.setattr(runtime_context, "get_observability", lambda: metrics)
    set_up.metrics = metrics
    return set_up


def params(adaptive):
    return SimpleNamespace(custom_params={"adaptive": adaptive})


def test_bad_options_are_refused_by_adaptive_only(server):
    server()
    with pytest.raises(ConfigError, match=r"^custom_params\.adaptive\.kappa: found 2;"):
        request_checks._check_options(None, params({"kappa": 2}), 100)
    server("EAGLE3")
    request_checks._check_options(None, params({"kappa": 2}), 100)


def test_a_strict_only_server_refuses_any_kappa(server):
    server(config={"strict_only": True})
    request_checks._check_options(None, params({"strict": True}), 100)
    with pytest.raises(ConfigError, match=r"found 0\.9; expected nothing: this server runs with strict_only"):
        request_checks._check_options(None, params({"kappa": 0.9}), 100)


def test_sharing_needs_a_shared_bank(server):
    server(config={"drift": {"enabled": True, "shared": True}})
    request_checks._check_options(None, params({"share": True}), 100)
    for drift in ({}, {"enabled": True}, {"shared": True}):
        server(config={"drift": drift})
        with pytest.raises(ConfigError, match=r"share: found true; expected false: this server has no shared bank"):
            request_checks._check_options(None, params({"share": True}), 100)


def test_custom_logit_processors_are_refused(server):
    request = SimpleNamespace(custom_logit_processor="{}")
    server()
    with pytest.raises(ConfigError, match=r"^custom_logit_processor: found a processor"):
        request_checks._check_logit_processor(None, None, request, [1])
    request_checks._check_logit_processor(None, None, SimpleNamespace(custom_logit_processor=None), [1])
    server(None)
    request_checks._check_logit_processor(None, None, request, [1])


def test_refusals_are_counted_under_the_field_and_unknown_fields_together(server, monkeypatch):
    counted = Counter()
    series = SimpleNamespace(labels=lambda reason: SimpleNamespace(inc=lambda: counted.update([reason])))
    monkeypatch.setattr(request_checks, "refusals_counter", lambda: series)
    server()

    def ask():
        for adaptive in ({"kappa": 2}, {"kappa": -1}, {"kapa": 1}, {"a" * 99: 1}, [], {"kappa": 0.5}):
            with suppress(ConfigError):
                request_checks._check_options(None, params(adaptive), 100)
        with suppress(ConfigError):
            request_checks._check_logit_processor(None, None, SimpleNamespace(custom_logit_processor="{}"), [1])

    ask()
    assert not counted  # nobody reads /metrics
    server.metrics.enable_metrics = True
    ask()
    assert counted == {"custom_params.adaptive.kappa": 2, "custom_params.adaptive": 3, "custom_logit_processor": 1}
