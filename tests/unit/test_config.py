import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec.config import (
    AdaptiveConfig,
    DcsConfig,
    DriftConfig,
    FlyConfig,
    GraphConfig,
    MarginConfig,
    ShapeConfig,
    TalonConfig,
    resolve_start,
    selectable_shapes,
)
from adaptivespec.errors import ConfigError, RefusedError
from adaptivespec.shapes import PRESETS, ShapeRange, TreeShape

CHAIN = TreeShape(3, 1, 4)
LOW = TreeShape(3, 4, 4)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
triplets = st.tuples(st.integers(-1, 9), st.integers(-1, 5), st.integers(-1, 12)).map(list)
# Right key names with mostly plausible values, so that both verdicts are common.
plausible = st.fixed_dictionaries(
    {},
    optional={
        "policy": st.sampled_from(["dcs", "talon", "static", "cycle", "DCS"]) | json_values,
        "shape": st.fixed_dictionaries(
            {},
            optional={
                "range": st.sampled_from(["paper", "short", "x"])
                | st.fixed_dictionaries({}, optional={"low": triplets, "high": triplets})
                | json_values,
                "start": triplets | json_values,
            },
        ),
        "dcs": st.fixed_dictionaries(
            {},
            optional={
                "divisor": st.floats(-0.5, 11) | json_values,
                "alpha": st.floats(-0.5, 1.5) | json_values,
                "initial_rar": st.floats(-0.5, 1.5) | json_values,
                "breaker_steps": st.integers(-1, 20) | json_values,
            },
        ),
        "graphs": st.fixed_dictionaries(
            {},
            optional={
                "memory_budget_gb": st.floats(-1, 100) | json_values,
                "max_batch_size": st.integers(-1, 64) | json_values,
                "max_rows": st.integers(-1, 64) | json_values,
            },
        ),
    },
)


def refusal(data) -> str:
    with pytest.raises(ConfigError) as caught:
        AdaptiveConfig.from_dict(data)
    return str(caught.value)


def write(tmp_path, text: str | bytes):
    path = tmp_path / "adaptive.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_defaults_need_no_file():
    config = AdaptiveConfig.from_json_file(None)
    assert config == AdaptiveConfig.from_dict({}) == AdaptiveConfig()
    assert config.to_dict() == {
        "policy": "dcs",
        "shape": {
            "range": None,
            "start": None,
            "extra": [],
        },
        "dcs": {"divisor": 0.5, "alpha": 0.3, "initial_rar": 0.5, "breaker_steps": 5},
        "talon": {"budget": None},
        "margin": {"kappa": None, "sampled": False, "max_promotions": 1, "top_k_guard": 0},
        "graphs": {"memory_budget_gb": None, "max_batch_size": 16, "max_rows": None},
        "fly": {"top": 3, "min_entropy": 0.3, "window": 6},
        "drift": {
            "enabled": False,
            "num_slots": 4096,
            "num_tokens": 32,
            "num_neighbours": 8,
            "gain": 1.0,
            "rate": 0.3,
            "threshold": 0.95,
            "clip": 8.0,
            "num_banks": 8,
            "num_spare": 64,
            "learn": True,
            "shared": False,
            "check_every": 16,
            "file": None,
        },
        "verifier": "margin",
        "strict_only": False,
    }


def test_every_key_is_read(tmp_path):
    data = {
        "policy": "static",
        "shape": {"range": {"low": [1, 1, 2], "high": [5, 4, 8]}, "start": [3, 1, 4], "extra": [[5, 4, 8]]},
        "dcs": {"divisor": 0.25, "alpha": 1, "initial_rar": 0, "breaker_steps": 7},
        "talon": {"budget": 8},
        "margin": {"kappa": 0.2, "sampled": True, "max_promotions": 0, "top_k_guard": 5},
        "graphs": {"memory_budget_gb": 1.5, "max_batch_size": 16, "max_rows": 1_000_000},
        "fly": {"top": 5, "min_entropy": 0.5, "window": 4},
        "drift": {
            "enabled": True,
            "num_slots": 64,
            "num_tokens": 8,
            "num_neighbours": 4,
            "gain": 1,
            "rate": 0.3,
            "threshold": 0.8,
            "clip": 4,
            "num_banks": 2,
            "num_spare": 16,
            "learn": False,
            "shared": True,
            "check_every": 0,
            "file": "bank.safetensors",
        },
        "verifier": "fly",
        "strict_only": False,
    }
    config = AdaptiveConfig.from_json_file(write(tmp_path, json.dumps(data)))
    assert config == AdaptiveConfig(
        policy="static",
        shape=ShapeConfig(
            range=ShapeRange(TreeShape(1, 1, 2), TreeShape(5, 4, 8)), start=CHAIN, extra=(TreeShape(5, 4, 8),)
        ),
        dcs=DcsConfig(divisor=0.25, alpha=1.0, initial_rar=0.0, breaker_steps=7),
        talon=TalonConfig(budget=8),
        margin=MarginConfig(kappa=0.2, sampled=True, max_promotions=0, top_k_guard=5),
        fly=FlyConfig(top=5, min_entropy=0.5, window=4),
        drift=DriftConfig(True, 64, 8, 4, 1.0, 0.3, 0.8, 4.0, 2, 16, False, True, 0, "bank.safetensors"),
        verifier="fly",
        graphs=GraphConfig(memory_budget_gb=1.5, max_batch_size=16, max_rows=1_000_000),
    )
    assert config.to_dict() == data
    assert config.graphs.memory_budget_bytes == 3 * 2**29


@pytest.mark.parametrize("name", PRESETS)
def test_ranges_can_be_named(name):
    assert AdaptiveConfig.from_dict({"shape": {"range": name}}).shape.range == PRESETS[name]


@pytest.mark.parametrize(
    ("data", "start"),
    [
        ([], "config: found []"),
        (None, "config: found None"),
        ({"dcs": 1}, "dcs: found 1"),
        ({"dcs": None}, "dcs: found None"),
        ({"drfit": {}}, "drfit: found an unknown key; expected one of policy, shape"),
        ({"drift": {"num_banks": 9, "num_slots": 8}}, "drift.num_banks: found 9 banks for 8 slots"),
        ({"drift": {"threshold": 1}}, "drift.threshold: found 1; expected a number from 0 to 0.9999"),
        ({"drift": {"check_every": 1}}, "drift.check_every: found 1; expected an integer from 2"),
        ({"drift": {"file": ""}}, "drift.file: found ''; expected a text"),
        ({"shape": {"extra": 3}}, "shape.extra: found 3"),
        ({"shape": {"extra": [[3, 1, 4], [3, 1, 5]]}}, "shape.extra[1]: found (3, 1, 5)"),
        ({"margin": {"kappa": 0}}, "margin.kappa: found 0; expected a number above 0, at most 1"),
        ({"margin": {"kappa": 1.01}}, "margin.kappa: found 1.01"),
        ({"margin": {"kappa": math.nan}}, "margin.kappa: found nan"),
        ({"margin": {"sampled": 1}}, "margin.sampled: found 1; expected true or false"),
        ({"margin": {"max_promotions": -1}}, "margin.max_promotions: found -1; expected an integer from 0 to 64"),
        ({"margin": {"top_k_guard": None}}, "margin.top_k_guard: found None"),
        ({"strict_only": None}, "strict_only: found None"),
        ({"strict_only": True, "margin": {"kappa": 0.2}}, "strict_only: found true beside margin.kappa 0.2; expected"),
        ({"strict_only": True, "verifier": "fly"}, 'strict_only: found true beside verifier "fly"; expected nothing'),
        (
            {"verifier": "strict", "margin": {"kappa": 1}},
            'margin.kappa: found 1 beside verifier "strict"; expected null',
        ),
        ({"verifier": "loose"}, "verifier: found 'loose'; expected one of margin, fly, strict"),
        ({"fly": {"window": 0}}, "fly.window: found 0; expected an integer from 1 to 64"),
        ({"fly": {"top": 1}}, "fly.top: found 1; expected an integer from 2"),
        ({"fly": {"min_entropy": -1}}, "fly.min_entropy: found -1"),
        ({"dcs": {"beta": 1}}, "dcs.beta: found an unknown key"),
        ({1: 2}, "1: found an unknown key"),
        ({"a b\n": 2}, "'a b\\n': found an unknown key"),
        ({"policy": "cost"}, "policy: found 'cost'; expected one of dcs, talon, static, cycle"),
        ({"policy": None}, "policy: found None"),
        ({"dcs": {"alpha": "0.3"}}, "dcs.alpha: found '0.3'; expected a number from 0 to 1"),
        ({"dcs": {"alpha": True}}, "dcs.alpha: found True"),
        ({"dcs": {"alpha": math.nan}}, "dcs.alpha: found nan"),
        ({"dcs": {"alpha": 1.01}}, "dcs.alpha: found 1.01"),
        ({"dcs": {"alpha": -0.01}}, "dcs.alpha: found -0.01"),
        ({"dcs": {"alpha": None}}, "dcs.alpha: found None"),
        ({"dcs": {"divisor": 0}}, "dcs.divisor: found 0; expected a number above 0, at most 10"),
        ({"dcs": {"divisor": math.inf}}, "dcs.divisor: found inf"),
        ({"dcs": {"divisor": 10**400}}, "dcs.divisor: found 1000"),
        ({"dcs": {"initial_rar": 2}}, "dcs.initial_rar: found 2"),
        ({"dcs": {"breaker_steps": 5.0}}, "dcs.breaker_steps: found 5.0; expected an integer from 1"),
        ({"dcs": {"breaker_steps": True}}, "dcs.breaker_steps: found True"),
        ({"dcs": {"breaker_steps": 0}}, "dcs.breaker_steps: found 0"),
        ({"graphs": {"memory_budget_gb": 0}}, "graphs.memory_budget_gb: found 0"),
        ({"graphs": {"memory_budget_gb": math.inf}}, "graphs.memory_budget_gb: found inf"),
        ({"graphs": {"max_batch_size": 0}}, "graphs.max_batch_size: found 0"),
        ({"graphs": {"max_rows": 0}}, "graphs.max_rows: found 0; expected an integer from 1 to 1000000"),
        ({"graphs": {"max_rows": 1_000_001}}, "graphs.max_rows: found 1000001"),
        ({"graphs": {"max_rows": 64.0}}, "graphs.max_rows: found 64.0"),
        ({"shape": {"start": [5, 4, 5]}}, "shape.start: found (5, 4, 5); expected num_draft_tokens from 6 to 69"),
        ({"shape": {"start": [3, 1, 5]}}, "shape.start: found (3, 1, 5); expected num_draft_tokens = num_steps + 1"),
        ({"shape": {"start": 3}}, "shape.start: found 3"),
        ({"shape": {"range": "papr"}}, "shape.range: found 'papr'; expected one of paper, short"),
        ({"shape": {"range": [[3, 4, 4], [7, 1, 8]]}}, "shape.range: found [[3, 4, 4], [7, 1, 8]]"),
        ({"shape": {"range": {"low": [3, 4, 4]}}}, "shape.range: found {'low': [3, 4, 4]}"),
        ({"shape": {"range": {"low": [3, 4, 4], "hihg": [7, 1, 8]}}}, "shape.range.hihg: found an unknown key"),
        ({"shape": {"range": {"low": [3, 4, 4], "high": [7, 1, 9]}}}, "shape.range.high: found (7, 1, 9)"),
        ({"shape": {"range": {"low": [0, 1, 1], "high": [7, 1, 8]}}}, "shape.range.low: found (0,1,1)"),
    ],
)
def test_refusals_name_the_key_path(data, start):
    message = refusal(data)
    assert message.startswith(start)
    assert "; expected " in message
    assert "; fix: " in message
    assert "\n" not in message


def test_a_misspelt_key_gets_a_suggestion():
    assert refusal({"dcs": {"alhpa": 0.3}}).endswith('fix: did you mean "alpha"?')
    assert refusal({"polcy": "dcs"}).endswith('fix: did you mean "policy"?')


def test_constructing_checks_like_parsing():
    with pytest.raises(ConfigError, match=r"^dcs\.alpha: found 2"):
        DcsConfig(alpha=2)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{"policy": "dcs", "policy": "static"}', "policy: found the key more than once"),
        ('{"dcs": {"alpha": 0.1, "divisor": 1, "alpha": 0.1}}', "dcs.alpha: found the key more than once"),
        (
            '{"shape": {"range": {"low": [3,4,4], "low": [3,4,4], "high": [7,1,8]}}}',
            "shape.range.low: found the key more than once",
        ),
        ('{"dcs": {}, "dcs": {"alpha": 0.1}}', "dcs: found the key more than once"),
        ('{"dcs": {"alpha": NaN}}', "dcs.alpha: found nan"),
        ('{"dcs": {"alpha": 1e999}}', "dcs.alpha: found inf"),
        ("[]", "config: found []"),
    ],
)
def test_json_refusals_name_the_key_path(tmp_path, text, where):
    with pytest.raises(ConfigError) as caught:
        AdaptiveConfig.from_json_file(write(tmp_path, text))
    assert str(caught.value).startswith(where)


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"policy": dcs}', b"\xff\xfe{}", "[" * 200_000, '{"dcs": {"alpha": ' + "1" * 5000 + "}}"],
    ids=["empty", "cut", "unquoted", "not-utf8", "nested", "huge-number"],
)
def test_a_file_that_is_not_json_is_named(tmp_path, text):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match="invalid JSON") as caught:
        AdaptiveConfig.from_json_file(path)
    assert str(caught.value).startswith(str(path))


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(ConfigError, match="readable JSON file") as caught:
            AdaptiveConfig.from_json_file(path)
        assert str(caught.value).startswith(f"{path}: found ")


@settings(deadline=None)
@given(json_values | plausible)
def test_any_json_is_a_config_or_a_config_error(data):
    try:
        config = AdaptiveConfig.from_dict(data)
    except ConfigError:
        return
    assert AdaptiveConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config
    assert 0 < config.dcs.divisor <= 10
    assert 0 <= config.dcs.alpha <= 1
    on_device = config.on("cpu")
    start = resolve_start(on_device, None)
    assert start in selectable_shapes(on_device, start)


def test_the_start_shape_comes_from_config_or_flags_or_the_low_end():
    silent = AdaptiveConfig().on("cpu")
    speaking = AdaptiveConfig(shape=ShapeConfig(start=CHAIN))
    assert resolve_start(silent, None) == silent.shape.known_range.low
    assert resolve_start(silent, CHAIN) == CHAIN
    assert resolve_start(speaking, None) == CHAIN
    assert resolve_start(speaking, CHAIN) == CHAIN
    with pytest.raises(ConfigError, match=r"^shape\.start: found \(3,1,4\) in the config and \(5,1,6\)"):
        resolve_start(speaking, TreeShape(5, 1, 6))


@pytest.mark.parametrize("policy", ["dcs", "cycle"])
def test_selectable_shapes_are_the_reachable_ones_and_the_start(policy):
    config = AdaptiveConfig.from_dict({"policy": policy, "shape": {"range": "paper"}})
    reachable = PRESETS["paper"].reachable()
    assert selectable_shapes(config, LOW) == reachable
    assert selectable_shapes(config, CHAIN) == (*reachable, CHAIN)


def test_static_selects_the_start_shape_only():
    assert selectable_shapes(AdaptiveConfig(policy="static"), CHAIN) == (CHAIN,)


def test_a_window_that_no_shape_can_fill_is_refused():
    config = AdaptiveConfig.from_dict({"policy": "static", "verifier": "fly", "fly": {"window": 4}})
    with pytest.raises(ConfigError, match=r"^fly\.window: found 4 positions, and shapes of at most 3 drafts"):
        selectable_shapes(config, TreeShape(3, 1, 4))
    assert selectable_shapes(config, TreeShape(4, 1, 5)) == (TreeShape(4, 1, 5),)


def test_a_range_of_ones_own_holds_on_every_device():
    config = AdaptiveConfig.from_dict({"shape": {"range": "paper"}})
    assert config.on("cpu") == config == config.on("cuda")
    assert AdaptiveConfig().on("cpu").shape.range == PRESETS["short"]


def test_errors_are_one_line_and_keep_their_parts():
    error = RefusedError(reason="pp", where="--pp-size", found="2\n(two)", expected="1", fix="drop it")
    assert str(error) == "--pp-size: found 2 (two); expected 1; fix: drop it"
    assert (error.reason, error.where, error.found, error.expected, error.fix) == (
        "pp",
        "--pp-size",
        "2\n(two)",
        "1",
        "drop it",
    )
    assert isinstance(error, ValueError)
    assert str(ConfigError(found="a", expected="b", fix="c")) == "found a; expected b; fix: c"


def test_extra_shapes_get_a_state_and_are_listed_once():
    config = AdaptiveConfig.from_dict({"policy": "static", "shape": {"extra": [[5, 4, 8], [3, 1, 4], [5, 4, 8]]}})
    assert selectable_shapes(config, CHAIN) == (CHAIN, TreeShape(5, 4, 8))
