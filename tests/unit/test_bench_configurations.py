import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec.bench.configurations import (
    PLAIN,
    ServerPlan,
    parse_configuration,
    parse_configurations,
    server_plans,
)
from adaptivespec.errors import ConfigError
from adaptivespec.shapes import TreeShape

DRAFT = ("--speculative-draft-model-path", "D")
ADAPTIVE = ("--speculative-algorithm", "ADAPTIVE", *DRAFT)
EAGLE3 = ("--speculative-algorithm", "EAGLE3", *DRAFT)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_with_a_gpu_sglangs_own_keeps_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "--disable-cuda-graph" not in parse_configuration("sglang-adaptive", "D").args


@pytest.mark.parametrize(
    ("name", "args", "adaptive"),
    [
        ("plain", (), {}),
        ("eagle3-default", EAGLE3, {}),
        (
            "eagle3-3-4-8",
            (
                *EAGLE3,
                *("--speculative-num-steps", "3"),
                *("--speculative-eagle-topk", "4"),
                *("--speculative-num-draft-tokens", "8"),
            ),
            {},
        ),
        (
            "sglang-adaptive",
            (*EAGLE3, "--speculative-adaptive", "--speculative-eagle-topk", "1", "--disable-cuda-graph"),
            {},
        ),
        ("adaptive", ADAPTIVE, {}),
        ("talon", ADAPTIVE, {"policy": "talon"}),
        ("adaptive+kappa=0.3", ADAPTIVE, {}),
        ("adaptive+kappa=0.3+fly", ADAPTIVE, {"margin": {"kappa": 0.3}, "verifier": "fly"}),
        ("adaptive+drift+fly", ADAPTIVE, {"drift": {"enabled": True}, "verifier": "fly"}),
        ("talon+range=paper", ADAPTIVE, {"policy": "talon", "shape": {"range": "paper"}}),
        ("adaptive+range=1-1-2:5-1-6", ADAPTIVE, {"shape": {"range": {"low": [1, 1, 2], "high": [5, 1, 6]}}}),
        ("adaptive-static-3-1-4", ADAPTIVE, {}),
    ],
)
def test_names_and_what_they_mean(name, args, adaptive):
    found = parse_configuration(name, "D")
    assert (found.name, found.args, found.adaptive) == (name, args, adaptive)


@pytest.mark.parametrize(
    "name",
    [
        *("", "PLAIN", "eagle3", "eagle3-", "eagle3-3-1", "eagle3-3-1-9", "eagle3-0-1-1", "adaptive-static-", "dcs"),
        *(
            "plain+fly",
            "eagle3-default+drift",
            "sglang-adaptive+kappa=1",
            "adaptive+",
            "adaptive+kappa",
            "adaptive+fly=1",
        ),
        *("adaptive+kappa=x", "adaptive+kappa=0", "adaptive+kappa=1.5", "adaptive+kappa=nan", "adaptive+fly+fly"),
        *("adaptive+range=none", "adaptive+range=1-1-2:", "adaptive-static-3-1-4+range=paper"),
    ],
)
def test_other_names_are_refused_with_what_is_right(name):
    with pytest.raises(ConfigError, match=r"found .*; expected .*; fix: "):
        parse_configuration(name, "D")


def test_an_unknown_name_lists_the_valid_ones():
    with pytest.raises(ConfigError, match=r"eagle3-default, eagle3-S-K-N, sglang-adaptive, .* talon"):
        parse_configuration("adaptiv", "D")


@settings(max_examples=50)
@given(st.text(alphabet="adptivesglnk3-+=.0 :", max_size=24) | st.text(max_size=8))
def test_any_text_is_a_configuration_or_a_clear_error(text):
    with contextlib.suppress(ConfigError):
        assert parse_configuration(text, "D").name == text


@settings(max_examples=30)
@given(
    steps=st.integers(1, 8),
    kappa=st.none() | st.floats(0.01, 1),
    flags=st.lists(st.sampled_from(["fly", "drift", "drift=off"]), unique_by=lambda flag: flag[:3]),
)
def test_every_well_formed_name_is_understood(steps, kappa, flags):
    shape = TreeShape(steps, 1, steps + 1)
    extras = "".join(f"+{flag}" for flag in flags) + ("" if kappa is None else f"+kappa={kappa}")
    found = parse_configuration(f"adaptive-static-{steps}-1-{steps + 1}{extras}", "D")
    assert found.pinned == shape
    assert found.is_static == (not extras)
    assert ("verifier" in found.adaptive) == ("fly" in flags)
    assert found.is_strict == ("fly" not in flags and kappa is None)
    assert (found.remembers, found.does_without) == ("drift" in flags, "drift=off" in flags)
    assert (found.adaptive.get("margin", {}).get("kappa") if "fly" in flags else found.kappa) == kappa


def test_plain_is_always_first_and_nothing_occurs_twice():
    assert [item.name for item in parse_configurations(["adaptive", "plain"], "D")] == [PLAIN, "adaptive"]
    with pytest.raises(ConfigError, match="found adaptive twice"):
        parse_configurations(["adaptive", "adaptive"], "D")


def groups(*names: str) -> tuple[list[list[str]], list[ServerPlan]]:
    plans = server_plans(parse_configurations(names, "D"))
    return [[item.name for item in plan.configurations] for plan in plans], plans


def test_what_an_operator_can_set_is_compared_on_one_server():
    names = ["adaptive", "adaptive-static-1-1-2", "adaptive-static-3-4-8", "adaptive+kappa=0.2"]
    found, (_, shared) = groups(*names)
    assert found == [[PLAIN], names]
    assert shared.adaptive == {"shape": {"extra": [[1, 1, 2], [3, 4, 8]]}}
    places = {"(1,1,2)": 0, "(2,1,3)": 1, "(3,1,4)": 2, "(3,4,8)": 3}
    assert [shared.settings(item, places) for item in shared.configurations] == [
        {"adaptive_shape": -1, "adaptive_kappa": 0},
        {"adaptive_shape": 0, "adaptive_kappa": 0},
        {"adaptive_shape": 3, "adaptive_kappa": 0},
        {"adaptive_shape": -1, "adaptive_kappa": 0.2},
    ]


def test_static_shapes_alone_have_a_static_server():
    names = ["adaptive-static-1-1-2", "adaptive-static-3-4-8"]
    found, (_, shared) = groups(*names)
    assert found == [[PLAIN], names]
    assert shared.adaptive == {"policy": "static", "shape": {"start": [1, 1, 2], "extra": [[3, 4, 8]]}}


def test_a_memory_shares_its_server_with_its_twin_without_and_with_no_other_memory():
    one = "adaptive-static-3-1-4"
    names = ["adaptive", "adaptive+drift", "adaptive+drift=off", f"{one}+drift", f"{one}+drift=off"]
    found, (_, forgetful, shared, alone, third) = groups(*names, "adaptive+drift+kappa=0.5")
    assert found == [[PLAIN], names[:1], names[1:3], names[3:], ["adaptive+drift+kappa=0.5"]]
    assert forgetful.adaptive == {}
    assert shared.adaptive == {"drift": {"enabled": True}}
    assert [(item.remembers, item.does_without) for item in shared.configurations] == [(True, False), (False, True)]
    assert alone.adaptive["shape"] == {"start": [3, 1, 4], "extra": []}
    assert (alone.slug, third.adaptive) == ("adaptive-static-3-1-4-drift", shared.adaptive)


def test_one_shape_twice_needs_one_state():
    _, (_, shared) = groups("adaptive-static-3-1-4", "adaptive-static-3-1-4+kappa=0.5")
    assert shared.adaptive["shape"] == {"start": [3, 1, 4], "extra": []}


def test_what_is_set_at_start_has_a_server_of_its_own():
    names = ["adaptive", "talon", "adaptive+range=paper", "adaptive+fly", "eagle3-3-1-4"]
    found, plans = groups(*names)
    assert found == [[PLAIN], *([name] for name in names)]
    assert [plan.settings(plan.configurations[0], {}) for plan in plans] == [{}] * 6
    assert plans[1].adaptive == {}
