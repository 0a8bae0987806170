import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec.errors import ConfigError
from adaptivespec.shapes import (
    MAX_NUM_DRAFT_TOKENS,
    NO_SPECULATION,
    PRESETS,
    ShapeRange,
    TreeShape,
    default_range,
    envelope,
    preset,
)


@st.composite
def drafting_shapes(draw, max_steps=12, max_topk=12):
    num_steps = draw(st.integers(1, max_steps))
    topk = draw(st.integers(1, max_topk))
    if topk == 1:
        return TreeShape(num_steps, 1, num_steps + 1)
    most = min(MAX_NUM_DRAFT_TOKENS, 1 + topk + (num_steps - 1) * topk**2)
    return TreeShape(num_steps, topk, draw(st.integers(num_steps + 1, most)))


ranges = st.builds(ShapeRange, low=drafting_shapes(), high=drafting_shapes())


def exactly_at(span: ShapeRange, t: float) -> tuple[int, int, int]:
    """The design's sentence, in exact arithmetic: num_steps and num_draft_tokens with t, topk with 1 - t."""
    t = Fraction(t)
    low, high = span.low, span.high

    def half_up(x: Fraction) -> int:
        return math.floor(x + Fraction(1, 2))

    num_steps = half_up(low.num_steps + (high.num_steps - low.num_steps) * t)
    topk = half_up(high.topk + (low.topk - high.topk) * (1 - t))
    num_draft_tokens = half_up(low.num_draft_tokens + (high.num_draft_tokens - low.num_draft_tokens) * t)
    if topk == 1:
        return num_steps, topk, num_steps + 1
    most = 1 + topk + (num_steps - 1) * topk**2
    return num_steps, topk, max(num_steps + 1, min(num_draft_tokens, most))


def around_breakpoints(span: ShapeRange) -> list[float]:
    """0, 1, and for each place where a coordinate may jump the nearest float with two neighbours on either side."""
    points = {0.0, 1.0}
    for low, high in zip(span.low.to_list(), span.high.to_list(), strict=True):
        for whole in range(min(low, high), max(low, high)):
            t = float((whole + Fraction(1, 2) - low) / (high - low))
            points.add(t)
            for direction in (0.0, 1.0):
                near = t
                for _ in range(2):
                    near = math.nextafter(near, direction)
                    points.add(near)
    return sorted(t for t in points if 0.0 <= t <= 1.0)


def test_paper_range_reaches_the_eight_published_shapes():
    triplets = [(3, 4, 4), (4, 4, 5), (4, 3, 5), (5, 3, 6), (5, 2, 6), (6, 2, 7), (6, 1, 7), (7, 1, 8)]
    assert preset("paper").reachable() == tuple(TreeShape(*triplet) for triplet in triplets)


@pytest.mark.parametrize(
    ("t", "expected"),
    [
        (0.0, (3, 4, 4)),
        (math.nextafter(0.125, 0), (3, 4, 4)),
        (0.125, (4, 4, 5)),  # 3.5 steps and 4.5 nodes: half up
        (0.5, (5, 3, 6)),  # topk 2.5: half up
        (math.nextafter(0.5, 1), (5, 2, 6)),
        (0.875, (7, 1, 8)),
        (1.0, (7, 1, 8)),
    ],
)
def test_paper_range_rounds_half_up(t, expected):
    assert preset("paper").at(t) == TreeShape(*expected)


@settings(deadline=None)
@given(ranges, st.floats(0, 1))
def test_at_is_exact_for_any_float(span, t):
    assert tuple(span.at(t).to_list()) == exactly_at(span, t)


@settings(deadline=None)
@given(ranges)
def test_at_is_exact_around_every_breakpoint(span):
    for t in around_breakpoints(span):
        assert tuple(span.at(t).to_list()) == exactly_at(span, t), t


@settings(deadline=None)
@given(ranges)
def test_reachable_is_what_at_returns_from_low_to_high(span):
    # A shape lasts until the next breakpoint, so these floats see every shape.
    seen = list(dict.fromkeys(span.at(t) for t in around_breakpoints(span)))
    assert list(span.reachable()) == seen
    assert seen[0] == span.low
    assert seen[-1] == span.high


def test_a_shape_of_one_single_float_is_reachable():
    # At 0.5 the depth has risen (at >=) and topk has not yet fallen (at >).
    span = ShapeRange(low=TreeShape(3, 3, 4), high=TreeShape(4, 2, 5))
    assert span.reachable() == (TreeShape(3, 3, 4), TreeShape(4, 3, 5), TreeShape(4, 2, 5))
    assert span.at(0.5) == TreeShape(4, 3, 5)


def test_a_shape_of_one_point_that_no_float_hits_is_not_reachable():
    # Depth rises and topk falls at exactly 1/6, 1/2 and 5/6; of these only 1/2 is a float.
    span = ShapeRange(low=TreeShape(3, 5, 8), high=TreeShape(6, 2, 8))
    triplets = [(3, 5, 8), (4, 4, 8), (5, 4, 8), (5, 3, 8), (6, 2, 8)]
    assert span.reachable() == tuple(TreeShape(*triplet) for triplet in triplets)


def test_a_tree_is_cut_to_the_nodes_that_its_draft_offers():
    span = ShapeRange(low=TreeShape(1, 2, 3), high=TreeShape(2, 6, 40))
    assert span.at(0.45) == TreeShape(1, 4, 5)  # 20 nodes interpolated, 1 + topk offered


@settings(deadline=None)
@given(ranges)
def test_every_reachable_tree_has_room_for_its_deepest_path(span):
    assert all(shape.num_draft_tokens > shape.num_steps for shape in span.reachable())


@pytest.mark.parametrize("t", [-1e-9, math.nextafter(1, 2), math.nan, math.inf, -math.inf])
def test_at_refuses_positions_outside_the_range(t):
    with pytest.raises(ValueError, match="from 0 to 1"):
        preset("paper").at(t)


def test_a_range_cannot_end_without_speculation():
    with pytest.raises(ConfigError, match="no speculation"):
        ShapeRange(low=NO_SPECULATION, high=TreeShape(7, 1, 8))


def test_unknown_preset_lists_the_valid_ones():
    with pytest.raises(ConfigError, match="paper, short"):
        preset("papre")
    assert preset("short") is PRESETS["short"]


def test_the_default_range_is_that_of_the_device():
    assert default_range("cpu") is PRESETS["short"]
    assert default_range("cuda") is PRESETS["paper"]


@pytest.mark.parametrize(
    ("text", "triplet"),
    [
        ("3-4-4", (3, 4, 4)),
        ("3,4,4", (3, 4, 4)),
        ("(3, 4, 4)", (3, 4, 4)),
        ([3, 4, 4], (3, 4, 4)),
        ((3, 4, 4), (3, 4, 4)),
        ("0-1-1", (0, 1, 1)),
        ([5, 4, 69], (5, 4, 69)),
        ([1, 4, 5], (1, 4, 5)),
        ([5, 4, 6], (5, 4, 6)),  # a tree may be cut to the nodes of one path
    ],
)
def test_parse_accepts(text, triplet):
    assert TreeShape.parse(text) == TreeShape(*triplet)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("3-4", "three integers"),
        ("3-4-4-4", "three integers"),
        ("-3-4-4", "three integers"),
        ("³-4-4", "three integers"),
        ([3, 4], "three integers"),
        ([3, 4, 4.0], "three integers"),
        ([3, True, 4], "three integers"),
        (["3", "4", "4"], "three integers"),
        (None, "three integers"),
        ({"num_steps": 3}, "three integers"),
        ([0, 1, 2], "num_steps from 1"),
        ([0, 4, 1], "num_steps from 1"),
        ([65, 1, 66], "num_steps from 1 to 64"),
        ([3, 0, 4], "topk from 1"),
        ([3, 65, 4], "topk from 1 to 64"),
        ([3, 1, 3], "num_steps \\+ 1 = 4"),
        ([3, 1, 5], "num_steps \\+ 1 = 4"),
        ([3, 4, 1], "from 4 to 37"),
        ([3, 4, 3], "from 4 to 37"),  # no room for a path of three accepted nodes and the root
        ([4, 2, 4], "from 5 to 15"),
        ([1, 4, 6], "from 2 to 5"),
        ([5, 4, 70], "from 6 to 69"),
        ([64, 64, 257], "from 65 to 256"),
    ],
)
def test_parse_refuses_with_found_expected_fix(value, message):
    with pytest.raises(ConfigError, match=message) as caught:
        TreeShape.parse(value, where="shape.start")
    assert str(caught.value).startswith("shape.start: found ")
    assert "; fix: " in str(caught.value)


def test_an_illegal_shape_cannot_be_made():
    with pytest.raises(ConfigError, match="tree shape: found"):
        TreeShape(3, 1, 5)


@settings(deadline=None)
@given(drafting_shapes())
def test_text_and_list_forms_round_trip(shape):
    assert TreeShape.parse(str(shape)) == TreeShape.parse(shape.to_list()) == shape
    assert hash(TreeShape(*shape.to_list())) == hash(shape)
    assert shape.num_drafts == shape.num_draft_tokens - 1
    assert shape.num_steps + 1 <= shape.num_draft_tokens <= shape.max_nodes


@settings(deadline=None)
@given(st.lists(st.one_of(st.just(NO_SPECULATION), drafting_shapes(max_topk=3)), min_size=1))
def test_envelope_is_legal_and_covers_every_coordinate(shapes):
    cover = envelope(shapes)
    columns = list(zip(*(shape.to_list() for shape in shapes), strict=True))
    assert cover.to_list() == [max(column) for column in columns]


def test_envelope_of_the_paper_range_is_none_of_its_shapes():
    cover = envelope(preset("paper").reachable())
    assert cover == TreeShape(7, 4, 8)
    assert cover not in preset("paper").reachable()


def test_envelope_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no shapes"):
        envelope([])


def test_shapes_are_ordered_as_tuples():
    assert sorted([TreeShape(4, 1, 5), TreeShape(3, 4, 8), TreeShape(3, 4, 4)])[0] == TreeShape(3, 4, 4)
