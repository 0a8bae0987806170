"""What is reported stays true while shapes change (field case A6): per response, per server, and between the two."""

import json
import re
from collections import Counter

import pytest
import requests

from adaptivespec.config import AdaptiveConfig
from adaptivespec.shapes import PRESETS, TreeShape
from tests.server.client import FULL_LENGTH, Answer, Client, shapes_used

SPEC_KEYS = (
    "spec_accept_rate",
    "spec_accept_length",
    "spec_num_correct_drafts",
    "spec_num_proposed_drafts",
    "spec_verify_ct",
    "spec_correct_drafts_histogram",
)


def assert_identities(answer: Answer) -> None:
    meta = answer.meta
    accepted, proposed, steps = (
        meta[key] for key in ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_verify_ct")
    )
    by_accepted = meta["spec_correct_drafts_histogram"]
    by_shape = {TreeShape.parse(name): count for name, count in meta["spec_shape_histogram"].items()}
    assert sum(by_accepted) == steps
    assert sum(number * count for number, count in enumerate(by_accepted)) == accepted
    assert sum(by_shape.values()) == steps
    assert sum(shape.num_drafts * count for shape, count in by_shape.items()) == proposed
    assert len(by_accepted) - 1 <= max(shape.num_steps for shape in by_shape)
    assert 0 <= accepted <= proposed
    assert meta["spec_accept_rate"] == pytest.approx(accepted / proposed)
    assert meta["spec_accept_length"] == pytest.approx(meta["completion_tokens"] / steps)
    assert meta["completion_tokens"] == len(answer.ids)
    # The fixed offset is the first token, which the prefill gives; only the last step can be cut, and never wholly.
    assert 0 <= answer.num_cut < len(by_accepted)


@pytest.fixture(scope="module")
def traffic(ada: Client, prompts) -> dict:
    """Requests of different lengths, alone and together, with all counters before and after."""
    ada.wait_until_idle()
    before = ada.adaptive_info()["counts"], ada.counters()
    lengths = [5, 12, 19, 26, 33, 40]
    answers = ada.generate_batch(prompts[:6], [FULL_LENGTH | {"max_new_tokens": length} for length in lengths])
    answers.append(ada.generate(prompts[6], max_new_tokens=48))
    ada.wait_until_idle()
    after = ada.adaptive_info()["counts"], ada.counters()
    return {"answers": answers, "info": (before[0], after[0]), "metrics": after[1] - before[1]}


def test_every_response_adds_up(traffic):
    for answer in traffic["answers"]:
        assert_identities(answer)
    assert len(shapes_used(traffic["answers"])) == 8


def test_completion_equals_accepted_plus_steps_plus_one_where_no_step_is_cut(ada: Client, prompts):
    with ada.pinned([5, 2, 6]):
        lengths = [
            chunk.meta["completion_tokens"] for chunk in ada.stream(prompts[0], **FULL_LENGTH, max_new_tokens=30)
        ]
        # Where a chunk ended before the cap, a step ended: a cap just there cuts nothing.
        whole = ada.generate(prompts[0], **FULL_LENGTH, max_new_tokens=lengths[-2])
    assert_identities(whole)
    assert whole.num_cut == 0
    assert whole.meta["completion_tokens"] == lengths[-2]


def test_a_stream_has_the_details_once_with_the_last_chunk(ada: Client, prompts):
    *early, last = ada.stream(prompts[0], **FULL_LENGTH, max_new_tokens=30)
    assert early
    assert not any({"spec_shape_histogram", "spec_margin"} & chunk.meta.keys() for chunk in early)
    assert "spec_margin" not in last.meta  # no kappa is set
    assert_identities(last)


def test_steps_are_told_on_demand_and_agree_with_the_histograms(ada: Client, prompts):
    details = FULL_LENGTH | {"custom_params": {"adaptive": {"details": True}}}
    meta = ada.generate(prompts[1], **details, max_new_tokens=30).meta
    shapes, accepted, probs = zip(*meta["spec_steps"], strict=True)
    assert Counter(shapes) == meta["spec_shape_histogram"]
    by_accepted = Counter(accepted)
    assert [by_accepted[i] for i in range(max(accepted) + 1)] == meta["spec_correct_drafts_histogram"]
    assert all(0 < prob <= 1.001 for prob in probs)
    assert len(set(probs)) > 1
    assert "spec_steps" not in ada.generate(prompts[1], **FULL_LENGTH, max_new_tokens=30).meta


def test_a_request_that_never_decodes_reports_no_steps(ada: Client, prompts):
    answer = ada.generate(prompts[0], max_new_tokens=1)
    assert len(answer.ids) == 1
    assert answer.meta.get("spec_verify_ct", 0) == 0
    assert "spec_accept_rate" not in answer.meta


def test_server_counts_are_the_sum_over_requests(traffic):
    before, after = traffic["info"]
    answers = traffic["answers"]
    for count, key in (
        ("verify_steps", "spec_verify_ct"),
        ("proposed", "spec_num_proposed_drafts"),
        ("accepted", "spec_num_correct_drafts"),
    ):
        assert after[count] - before[count] == sum(answer.meta[key] for answer in answers), count
    assert 0 <= after["accept_rate"] <= 1
    assert after["accept_rate"] == pytest.approx(after["accepted"] / after["proposed"])


def test_metrics_grow_by_what_server_info_counts(traffic):
    before, after = traffic["info"]
    grown = traffic["metrics"]
    for metric, count in (
        ("verify_steps", "verify_steps"),
        ("proposed_drafts", "proposed"),
        ("accepted_drafts", "accepted"),
        ("shape_switches", "shape_switches"),
    ):
        assert grown[metric] == after[count] - before[count] > 0, metric
    shapes = [str(shape) for shape in PRESETS["paper"].reachable()]
    steps = {name: after["steps_per_shape"][name] - before["steps_per_shape"].get(name, 0) for name in shapes}
    assert {name: grown[f"steps{name}"] for name in shapes} == steps
    assert grown["shape_switches"] >= sum(steps.values()) - 1


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_openai_responses_carry_the_same_figures(ada: Client, route):
    question = "Why do cats purr?"
    body = {"model": "any", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    body["return_spec_tokens_details"] = True
    if route == "/v1/chat/completions":
        body |= {"messages": [{"role": "user", "content": question}], "return_meta_info": True}
    else:
        body["prompt"] = question
    ada.wait_until_idle()
    before = ada.adaptive_info()["counts"]
    response = ada.post(route, body)
    assert response.ok, response.text
    found = response.json()
    ada.wait_until_idle()
    after = ada.adaptive_info()["counts"]
    details = found["sglext"]["spec_tokens_details"]
    assert details["spec_verify_ct"] == after["verify_steps"] - before["verify_steps"] > 0
    assert details["spec_num_proposed_drafts"] == after["proposed"] - before["proposed"]
    assert details["spec_num_correct_drafts"] == after["accepted"] - before["accepted"]
    assert details["spec_accept_rate"] == pytest.approx(
        details["spec_num_correct_drafts"] / details["spec_num_proposed_drafts"]
    )
    assert details["spec_accept_length"] == pytest.approx(
        found["usage"]["completion_tokens"] / details["spec_verify_ct"]
    )
    assert sum(details["spec_correct_drafts_histogram"]) == details["spec_verify_ct"]
    if route == "/v1/chat/completions":
        meta = found["choices"][0]["meta_info"]
        assert sum(meta["spec_shape_histogram"].values()) == details["spec_verify_ct"]
        assert meta["spec_accept_rate"] == details["spec_accept_rate"]


def test_server_info_shows_the_effective_config_and_the_states(ada: Client, ada_config):
    info = ada.adaptive_info()
    config = AdaptiveConfig.from_dict(ada_config)
    # Every key with its effective value, through JSON as the server sends it.
    assert info["config"] == json.loads(json.dumps(config.to_dict()))
    shapes = [str(shape) for shape in PRESETS["paper"].reachable()]
    assert info["shapes"] == shapes
    assert info["start_shape"] == shapes[0]
    assert info["pinned_shape"] is None
    assert len(info["states"]["states"]) == 8


def test_a_pin_without_a_state_is_rejected(ada: Client):
    for place in (8, -2, 0.5, 1e300):
        response = ada.post("/set_internal_state", {"server_args": {"adaptive_shape": place}})
        assert response.json() == [False], response.text
    assert ada.adaptive_info()["pinned_shape"] is None


def test_sglangs_own_gauge_is_of_what_was_really_proposed(cyclic: Client, cycle_ids):
    """It is set every 40 steps; of this draft all is accepted."""
    with cyclic.pinned([3, 4, 4]):
        answer = cyclic.generate(cycle_ids[:3], **FULL_LENGTH, max_new_tokens=4 * 90)
    assert answer.meta["spec_accept_rate"] == 1.0
    cyclic.wait_until_idle()
    text = requests.get(cyclic.url + "/metrics", timeout=60).text
    (rate,) = re.findall(r"^sglang:spec_accept_rate(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)
    assert float(rate) == pytest.approx(1.0)
    (load,) = cyclic.get("/v1/loads")["loads"]
    assert load["speculative"]["accept_rate"] == pytest.approx(1.0)


@pytest.mark.slow
def test_a_poison_draft_has_rate_zero(poison: Client, prompts):
    for answer in poison.generate_batch(prompts[:3], [FULL_LENGTH | {"max_new_tokens": 12}] * 3):
        assert_identities(answer)
        assert answer.meta["spec_accept_rate"] == 0.0
        assert answer.meta["spec_accept_length"] == pytest.approx(12 / 11)
        assert answer.meta["spec_correct_drafts_histogram"] == [11]
