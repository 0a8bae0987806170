"""The memory on a live server: it learns, it is isolated by tenant, and it never changes a strict answer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drift.memory import DriftMemory
from drift.params import DriftParams
from drift.storage import load_bank
from drift.tenants import Tenants
from tests.server.client import FULL_LENGTH, Answer, Client, Reference, assert_parity

NUM_TOKENS = 32
TREE = [5, 2, 6]
LEARN, FREEZE, RESET, SAVE = range(4)


def options(**values: Any) -> dict[str, Any]:
    return {"custom_params": {"adaptive": values}}


def ask(client: Client, prompts: list[list[int]], **values: Any) -> list[Answer]:
    """One after the other, so that nothing depends on which requests meet in a batch."""
    return [client.generate(ids, **FULL_LENGTH, max_new_tokens=NUM_TOKENS, **options(**values)) for ids in prompts]


def accepted(answers: list[Answer]) -> list[int]:
    return [answer.meta["spec_num_correct_drafts"] for answer in answers]


def tenant(client: Client, name: str) -> dict[str, Any]:
    return client.adaptive_info()["drift"]["tenants"][f"tenant:{name}"]


@pytest.fixture
def fresh(remembering: Client):
    """A server whose memory is empty, before and after."""
    remembering.set_state("adaptive_drift", RESET)
    with remembering.pinned(TREE):
        yield remembering
    remembering.set_state("adaptive_drift", LEARN)
    remembering.set_state("adaptive_drift", RESET)


def test_a_poisoned_memory_costs_acceptance_and_nothing_else(remembering: Client, reference: Reference, prompts):
    """First, while the server holds the bank that it was started with."""
    remembering.set_state("adaptive_drift", FREEZE)
    with remembering.pinned(TREE):
        poisoned, alone = ask(remembering, prompts[:2], tenant="poisoned"), ask(remembering, prompts[:2], drift=False)
    remembering.set_state("adaptive_drift", LEARN)
    assert tenant(remembering, "poisoned")["hits"] > 0
    assert sum(accepted(poisoned)) < 0.9 * sum(accepted(alone))
    assert_parity(reference.answers(prompts[:2], NUM_TOKENS), poisoned)


def test_what_was_said_before_is_drafted_better(fresh: Client, reference: Reference, prompts):
    """Also with a tenant's memory full of it: the answers are plain decoding's."""
    some = prompts[:2]
    first, _, third = (ask(fresh, some, tenant="again") for _ in range(3))  # steps begin elsewhere once some are longer
    assert sum(accepted(third)) >= 1.1 * sum(accepted(first))
    assert_parity(reference.answers(some, NUM_TOKENS), first)
    assert_parity(reference.answers(some, NUM_TOKENS), third)
    seen = tenant(fresh, "again")
    assert 0 < seen["hits"] <= seen["lookups"]
    assert seen["slots"] == seen["allocations"] > 0
    assert 0 < seen["mean_gain"] <= 1.0
    assert seen["spare_tokens"] > 0  # the answers have tokens that the draft does not know
    assert seen["steps_with"] > seen["steps_without"] > 0


def test_another_tenant_is_served_as_by_an_empty_memory(fresh: Client, prompts):
    alone = ask(fresh, prompts[:2], tenant="alone")
    ask(fresh, prompts[:3], tenant="busy")
    beside = ask(fresh, prompts[:2], tenant="beside")
    assert [answer.ids for answer in alone] == [answer.ids for answer in beside]
    assert [answer.meta["spec_correct_drafts_histogram"] for answer in alone] == [
        answer.meta["spec_correct_drafts_histogram"] for answer in beside
    ]


def test_the_prefix_caches_key_is_the_tenant(fresh: Client, prompts):
    fresh.generate(prompts[0], request={"extra_key": "salt"}, max_new_tokens=8, **options(tenant="other"))
    tenants = fresh.adaptive_info()["drift"]["tenants"]
    (name,) = [name for name in tenants if name.startswith("key:")]
    assert "salt" not in name  # it is a secret
    assert tenants[name]["lookups"] > 0
    assert "tenant:other" not in tenants
    ask(fresh, prompts[:1], tenant="salt")  # a name does not reach what a key isolates
    fresh.generate(prompts[0], request={"cache_salt": "salt"}, max_new_tokens=8)  # nor does a salt of the same text
    later = fresh.adaptive_info()["drift"]["tenants"]
    assert later[name] == tenants[name]
    assert len([name for name in later if name.startswith("key:")]) == 2


def test_a_request_may_do_without(fresh: Client, prompts):
    ask(fresh, prompts[:1], tenant="used")
    before = tenant(fresh, "used")
    ask(fresh, prompts[:1], tenant="used", drift=False)
    ask(fresh, prompts[:1], tenant="used", enabled=False)
    assert tenant(fresh, "used") == before


def test_the_shared_bank_is_for_those_who_share(fresh: Client, prompts):
    """One tenant's opted-in traffic helps another's, and nobody else's."""
    ask(fresh, prompts[:2], tenant="giver", share=True)
    slots = fresh.adaptive_info()["drift"]["shared"]["slots"]
    assert slots > 0
    alone = ask(fresh, prompts[:2], tenant="loner")
    assert fresh.adaptive_info()["drift"]["shared"]["slots"] == slots
    taker = ask(fresh, prompts[:2], tenant="taker", share=True)
    assert sum(accepted(taker)) >= 1.1 * sum(accepted(alone))
    assert [answer.ids for answer in taker] == [answer.ids for answer in alone]


def test_bent_targets_do_not_teach(fresh: Client, prompts):
    for sampling in ({"frequency_penalty": 0.5}, {"logit_bias": {"5": 1.0}}, {"json_schema": '{"type": "object"}'}):
        fresh.generate(prompts[0], max_new_tokens=16, **sampling, **options(tenant="bent"))
    assert (tenant(fresh, "bent")["allocations"], tenant(fresh, "bent")["lookups"] > 0) == (0, True)


def test_a_frozen_memory_stays_and_a_flush_empties_it(fresh: Client, prompts):
    ask(fresh, prompts[:1], tenant="ice")
    fresh.set_state("adaptive_drift", FREEZE)
    before = tenant(fresh, "ice")
    ask(fresh, prompts[1:2], tenant="ice")
    assert tenant(fresh, "ice")["allocations"] == before["allocations"]
    assert tenant(fresh, "ice")["lookups"] > before["lookups"]
    assert fresh.adaptive_info()["drift"]["is_frozen"]
    assert fresh.post("/flush_cache", {}).ok
    assert tenant(fresh, "ice")["slots"] == 0


def test_an_operator_may_keep_the_memory(fresh: Client, prompts):
    ask(fresh, prompts[:1], tenant="kept")
    fresh.set_state("adaptive_drift", SAVE)
    drift = fresh.adaptive_info()["config"]["drift"]
    params = DriftParams(num_slots=drift["num_slots"], num_banks=drift["num_banks"] + 1)  # one is shared
    memory = DriftMemory(params, 576, 8192, "cpu", torch.arange(8192), 49152)
    tenants = Tenants(drift["num_banks"])
    file = Path(drift["file"])
    load_bank(file, memory, tenants, _model_of(file))
    assert memory.occupancy()[tenants.banks["tenant:kept"]] == tenant(fresh, "kept")["slots"] > 0


def test_a_save_that_fails_is_rejected_and_the_server_goes_on(remembering: Client, prompts):
    part = Path(remembering.adaptive_info()["config"]["drift"]["file"] + ".part")
    part.mkdir()
    try:
        response = remembering.post("/set_internal_state", {"server_args": {"adaptive_drift": SAVE}})
        assert response.json() == [False]
    finally:
        part.rmdir()
    assert len(remembering.generate(prompts[0], max_new_tokens=4).ids) == 4
    assert remembering.adaptive_info()["counts"]["refusals"]["adaptive_drift"] > 0


def _model_of(file: Path) -> str:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as stream:
        model = stream.metadata()["model"]
    assert len(model) == 64
    return model


def settle(client: Client, prompts: list[list[int]]) -> None:
    """What happened is on /metrics 32 to 64 steps later."""
    answers = ask(client, prompts[:5], drift=False)
    assert sum(answer.meta["spec_verify_ct"] for answer in answers) > 64


def test_prometheus_counts_what_the_memory_did(fresh: Client, prompts):
    settle(fresh, prompts)
    before, events = fresh.counters(), fresh.drift_events()
    answers = ask(fresh, prompts[:2], tenant="told")
    fresh.wait_until_idle()
    grown = fresh.counters() - before
    assert grown["drift_steps"] == sum(answer.meta["spec_verify_ct"] for answer in answers)
    assert grown["drift_accepted_drafts"] == sum(accepted(answers))
    seen = tenant(fresh, "told")
    settle(fresh, prompts)
    grown = fresh.drift_events() - events
    assert {event: grown[event] for event in DriftMemory.COUNTERS} == {
        event: seen[event] for event in DriftMemory.COUNTERS
    }
    assert seen["lookups"] > 0


def test_settings_that_are_not_there_are_refused(remembering: Client):
    for value in (-1, 4, 0.5):
        assert remembering.post("/set_internal_state", {"server_args": {"adaptive_drift": value}}).json() == [False]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tenant": 3}, "custom_params.adaptive.tenant: found 3; expected a text"),
        ({"tenant": ""}, "custom_params.adaptive.tenant: found ''; expected a text"),
        ({"drift": 1}, "custom_params.adaptive.drift: found 1; expected true or false"),
        ({"share": "yes"}, "custom_params.adaptive.share: found 'yes'; expected true or false"),
    ],
)
def test_bad_options_are_answered_with_a_400(remembering: Client, prompts, values, message):
    response = remembering.post(
        "/generate", {"input_ids": prompts[0], "sampling_params": {"max_new_tokens": 1, **options(**values)}}
    )
    assert response.status_code == 400
    assert message in response.text
