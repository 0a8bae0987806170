"""Strict ADAPTIVE gives the tokens of plain decoding, whatever the shapes and the neighbours (field case A1)."""

import pytest

from adaptivespec.shapes import PRESETS
from tests.server.client import FULL_LENGTH, Client, Reference, assert_parity, shape_name, shapes_used

SHAPES = [shape.to_list() for shape in PRESETS["paper"].reachable()]
SHORT = pytest.param(8, 64, id="8x64")
ALONE = pytest.param(4, 64, id="4x64")
LONG = pytest.param(30, 128, id="30x128", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])


def in_batches(client: Client, prompts: list, num_tokens: int) -> list:
    answers = []
    for start in range(0, len(prompts), 8):
        some = prompts[start : start + 8]
        answers += client.generate_batch(some, [FULL_LENGTH | {"max_new_tokens": num_tokens}] * len(some))
    return answers


@pytest.mark.parametrize(("num_prompts", "num_tokens"), [ALONE, LONG])
def test_alone_while_the_shape_changes_at_every_step(
    ada: Client, reference: Reference, prompts, num_prompts, num_tokens
):
    some = prompts[:num_prompts]
    answers = [ada.generate(ids, **FULL_LENGTH, max_new_tokens=num_tokens) for ids in some]
    assert_parity(reference.answers(some, num_tokens), answers)
    for answer in answers:
        steps = answer.meta["spec_shape_histogram"]
        # The shapes take turns, so no two differ by more than one step.
        assert set(steps) == {shape_name(shape) for shape in SHAPES}
        assert max(steps.values()) - min(steps.values()) <= 1


@pytest.mark.parametrize(("num_prompts", "num_tokens"), [SHORT, LONG])
def test_in_batches_of_eight_while_the_shape_changes_at_every_step(
    ada: Client, reference: Reference, prompts, num_prompts, num_tokens
):
    some = prompts[:num_prompts]
    before = ada.adaptive_info()["counts"]
    answers = in_batches(ada, some, num_tokens)
    after = ada.adaptive_info()["counts"]
    assert_parity(reference.answers(some, num_tokens), answers)
    assert set(shapes_used(answers)) == {shape_name(shape) for shape in SHAPES}
    batch_steps = sum(after["steps_per_shape"].values()) - sum(before["steps_per_shape"].values())
    assert after["shape_switches"] - before["shape_switches"] >= batch_steps - 1
    rows_per_step = (after["verify_steps"] - before["verify_steps"]) / batch_steps
    assert rows_per_step > 4, "the requests did not run together"


def test_without_drafts_and_then_with_them(remembering: Client, reference: Reference, prompts):
    """An operator may pin the shape that drafts nothing. The prompts are prefilled in pieces."""
    some = prompts[:4]
    assert max(map(len, some)) > 32
    right = reference.answers(some, 32)
    with remembering.pinned([0, 1, 1]):
        answers = in_batches(remembering, some, 32)
    assert_parity(right, answers)
    assert all(answer.meta["spec_num_proposed_drafts"] == 0 for answer in answers)
    assert all(answer.meta["spec_verify_ct"] == 31 for answer in answers)
    answers = in_batches(remembering, some, 32)
    assert_parity(right, answers)
    assert sum(answer.meta["spec_num_correct_drafts"] for answer in answers) > 0


@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
@pytest.mark.parametrize(("num_prompts", "num_tokens"), [SHORT, LONG])
def test_at_one_fixed_shape(ada: Client, reference: Reference, prompts, num_prompts, num_tokens, shape):
    some = prompts[:num_prompts]
    with ada.pinned(shape):
        answers = in_batches(ada, some, num_tokens)
    assert_parity(reference.answers(some, num_tokens), answers)
    assert set(shapes_used(answers)) == {shape_name(shape)}
    assert sum(answer.meta["spec_num_correct_drafts"] for answer in answers) > 0, "the draft was never right"
