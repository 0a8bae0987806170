"""`adaptivespec.request_options` and the rows that verification gets from them."""

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.config import AdaptiveConfig, MarginConfig
from adaptivespec.errors import ConfigError
from adaptivespec.request_options import RequestOptions
from adaptivespec.sglang_plugin.request_rows import RequestRows

VOCAB = 12
KAPPAS = st.one_of(st.none(), st.floats(0.01, 1))


def params(custom=None, **values):
    defaults = {"sampling_seed": None, "top_k": 1, "stop_token_ids": None, "frequency_penalty": 0.0}
    defaults |= {"presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    return SimpleNamespace(custom_params=custom, **(defaults | values))


def request(adaptive=None, **values):
    tokenizer = SimpleNamespace(eos_token_id=2, additional_stop_token_ids={7})
    custom = None if adaptive is None else {"adaptive": adaptive}
    sampling = params(custom, **values)
    return SimpleNamespace(sampling_params=sampling, eos_token_ids={2, 3}, tokenizer=tokenizer, output_ids=[])


@pytest.mark.parametrize("custom", [None, {}, {"thinking_budget": 3}])
def test_requests_that_say_nothing_get_the_defaults(custom):
    assert RequestOptions.of(params(custom)) == RequestOptions()


@pytest.mark.parametrize(
    ("adaptive", "start"),
    [
        (None, "custom_params.adaptive: found None; expected an object"),
        ({"kappa": 0}, "custom_params.adaptive.kappa: found 0; expected a number above 0, at most 1"),
        ({"kappa": "0.5"}, "custom_params.adaptive.kappa: found '0.5'"),
        ({"strict": 1}, "custom_params.adaptive.strict: found 1; expected true or false"),
        ({"enable": False}, "custom_params.adaptive.enable: found an unknown key; expected one of kappa, strict"),
    ],
)
def test_bad_fields_are_named(adaptive, start):
    with pytest.raises(ConfigError) as caught:
        RequestOptions.of(params({"adaptive": adaptive}))
    assert str(caught.value).startswith(start)


@pytest.mark.parametrize("custom", ["strict", [1], 5, '{"adaptive": {"strict": true}}'])
def test_parameters_that_are_no_object_do_not_pass_for_none(custom):
    with pytest.raises(ConfigError, match=r"^custom_params: found .*; expected an object"):
        RequestOptions.of(params(custom))


@given(server=KAPPAS, kappa=KAPPAS, strict=st.booleans(), enabled=st.booleans())
def test_a_request_can_only_tighten(server, kappa, strict, enabled):
    found = RequestOptions(kappa=kappa, strict=strict, enabled=enabled).effective_kappa(server)
    if server is None or strict or not enabled:
        assert found is None
    else:
        assert found == max(server, kappa or 0)


def test_rows_of_a_mixed_batch():
    rows = RequestRows(AdaptiveConfig(margin=MarginConfig(kappa=0.2)), VOCAB, "cpu")
    requests = [request(), request({"kappa": 0.5}, stop_token_ids={9, 3}), request({"strict": True}), request(top_k=40)]
    rows.update(requests)
    assert rows.limits.log_kappa.exp().tolist() == pytest.approx([0.2, 0.5, math.inf, math.inf])
    assert rows.kappas == [0.2, 0.5, None, None]
    assert rows.limits.stops.tolist() == [[2, 3, 7, -1], [2, 3, 7, 9], [2, 3, 7, -1], [2, 3, 7, -1]]
    before = rows.limits
    rows.update(list(requests))
    assert rows.limits is before
    rows.update(requests[2:])
    assert rows.limits is None
    assert rows.seeds.tolist() == [each.sampling_params.sampling_seed for each in requests[2:]]


def test_sampled_requests_are_included_on_demand():
    rows = RequestRows(AdaptiveConfig(margin=MarginConfig(kappa=0.2, sampled=True)), VOCAB, "cpu")
    rows.update([request(top_k=40)])
    assert rows.limits.log_kappa.exp().tolist() == pytest.approx([0.2])


def test_fly_needs_no_kappa():
    rows = RequestRows(AdaptiveConfig(verifier="fly"), VOCAB, "cpu")
    rows.update([request(), request({"kappa": 0.5})])
    assert rows.limits.log_kappa.exp().tolist() == pytest.approx([0.0, 0.5])


def test_a_new_kappa_reaches_the_requests_that_run():
    rows, requests = RequestRows(AdaptiveConfig(), VOCAB, "cpu"), [request()]
    rows.update(requests)
    assert rows.limits is None
    rows.kappa = 0.3
    rows.update(requests)
    assert rows.limits.log_kappa.exp().tolist() == pytest.approx([0.3])
    rows.kappa = None
    rows.update(requests)
    assert rows.limits is None


def test_penalties_follow_the_output_and_the_batch():
    rows, plain, penalised = RequestRows(AdaptiveConfig(), VOCAB, "cpu"), request(), request(frequency_penalty=0.5)
    rows.update([plain])
    assert rows.penalties is None
    penalised.output_ids += [4, 4, 1]
    rows.update([plain, penalised])
    assert rows.penalties.counts[1].nonzero().flatten().tolist() == [1, 4]
    penalised.output_ids += [4, 9]
    plain.output_ids += [3]
    for _ in range(2):  # nothing is counted twice
        rows.update([plain, penalised])
        assert rows.penalties.counts[1, [1, 4, 9]].tolist() == [1, 3, 1]
        assert rows.penalties.counts[0].nonzero().flatten().tolist() == [3]
        assert rows.penalties.lengths.tolist() == [1, 5]
    rows.update([penalised])
    assert rows.penalties.counts[0, [1, 4, 9]].tolist() == [1, 3, 1]
    assert rows.penalties.frequency.tolist() == [0.5]
