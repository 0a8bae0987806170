"""The references that train: they learn the text they are given, and leave the draft that they start from alone."""

import math

import torch

from adaptivespec.draft_training.model import Eagle3Draft
from adaptivespec.draft_training.ttt import Batch
from adaptivespec.offline.chain import Trace, decode, rejected_residuals
from adaptivespec.offline.statistics import Case, recovery
from adaptivespec.offline.tuning import Tuner, tuned_draft
from drift.params import DriftParams

HIDDEN, VOCAB = 8, 12
CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def material() -> tuple[Eagle3Draft, torch.Tensor, Batch]:
    torch.manual_seed(0)
    draft = Eagle3Draft(CONFIG, torch.arange(VOCAB))
    embed = torch.randn(VOCAB, HIDDEN)
    tokens = torch.randint(VOCAB, (1, 20))
    batch = Batch(tokens, torch.randn(1, 20, 4, HIDDEN), torch.tensor([5]), torch.tensor([20]))
    return draft.requires_grad_(False), embed, batch


def test_a_step_lowers_the_loss_of_a_copy_alone() -> None:
    draft, embed, batch = material()
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    tuner = Tuner(draft, embed, 1e-2, num_steps=2)
    losses = [tuner.step([batch]) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    assert all(torch.equal(value, before[name]) for name, value in draft.state_dict().items())
    assert not torch.equal(tuner.draft.fc.weight, draft.fc.weight)


def test_tuning_gives_a_draft_that_needs_no_gradient_and_repeats() -> None:
    draft, embed, batch = material()
    first, second = (tuned_draft(draft, embed, [batch], 3, num_steps=2) for _ in range(2))
    assert not any(parameter.requires_grad for parameter in first.parameters())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_recovery_is_a_share_of_what_the_reference_gains() -> None:
    half = Case([[1, 1]] * 8, [[0, 0]] * 8, [[2, 2]] * 8)
    nothing = Case([[0, 0]] * 5, [[0, 0]] * 5, [[2, 2]] * 5)
    assert recovery([half]) == (0.5, 0.5, 0.5)
    assert recovery([half, nothing]) == (0.25, 0.25, 0.25)


def test_a_reference_that_gains_nothing_gives_no_share() -> None:
    found = recovery([Case([[1, 1]] * 4, [[0, 0]] * 4, [[0, 0]] * 4)])
    assert all(map(math.isnan, found))


def test_residuals_are_those_of_the_rejected_drafts() -> None:
    tokens = torch.tensor([0, 1, 2, 0, -1, -1, -1])
    draft = torch.zeros(4, 2, 3)
    draft[0, 0, 1] = draft[0, 1, 0] = 3.0  # from 0: says 1, rightly, then 0 where 2 follows
    draft[2, 0, 0] = 3.0  # from 2: rightly 0; the answer ends
    target = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    trace = Trace(torch.zeros(4, 2, 4), draft, target, tokens, torch.arange(3))
    assert decode(trace) == [1, 1]
    found = rejected_residuals(trace, DriftParams(num_tokens=3))
    expected = target[1].log_softmax(0) - draft[0, 1].log_softmax(0)  # all three tokens are the support
    torch.testing.assert_close(found[0], expected)
