"""`adaptivespec.verify.sampling`: the filters against a slow reference, the draws against their distribution."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import stats

from adaptivespec.verify.sampling import draw_tokens, exponential_noise, filter_probs

VOCAB = 12
SEED = 0x1234_5678_9ABC_DEF0


def random_probs(num_rows: int, vocab: int = VOCAB, seed: int = 0, sharpness: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(num_rows, vocab, generator=generator) * sharpness, dim=1)


def slow_filter(probs: list[float], top_k: int, top_p: float | None, min_p: float | None) -> list[float]:
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept = [0.0] * len(probs)
    before = torch.zeros(())
    for rank, token in enumerate(order):
        is_kept = rank < top_k
        is_kept &= top_p is None or float(before) <= top_p
        is_kept &= min_p is None or probs[token] >= probs[order[0]] * min_p
        kept[token] = probs[token] if is_kept or rank == 0 else 0.0
        before = before + probs[token]
    return kept


@given(
    st.lists(st.integers(0, 8), min_size=2, max_size=VOCAB).filter(any),
    st.integers(1, VOCAB + 3),
    st.none() | st.integers(1, 31),
    st.none() | st.integers(0, 31),
)
@example([32, 16, 16], 3, 16, None)  # the second token stays: what comes before it is exactly top_p
@example([32, 16, 16], 3, None, 16)  # both others stay: they are exactly half as probable
@example([16, 16, 16, 16], 2, None, None)
def test_filters_keep_what_the_reference_keeps(weights, top_k, top_p, min_p):
    # Eighths and thirty-seconds add up without rounding, so that both sides decide every tie alike.
    probs = torch.tensor([weights], dtype=torch.float32) / 64
    top_p, min_p = (None if value is None else value / 32 for value in (top_p, min_p))
    kept = filter_probs(
        probs,
        torch.tensor([top_k]),
        None if top_p is None else torch.tensor([top_p]),
        None if min_p is None else torch.tensor([min_p]),
    )
    assert kept[0].tolist() == slow_filter(probs[0].tolist(), top_k, top_p, min_p)


def test_filters_are_row_by_row():
    probs = random_probs(3)
    top_ks, top_ps, min_ps = (
        torch.tensor([2, VOCAB, VOCAB]),
        torch.tensor([1.0, 0.5, 1.0]),
        torch.tensor([0.0, 0.0, 0.3]),
    )
    kept = filter_probs(probs, top_ks, top_ps, min_ps)
    for row in range(3):
        alone = filter_probs(probs[row : row + 1], *(value[row : row + 1] for value in (top_ks, top_ps, min_ps)))
        assert kept[row].equal(alone[0])
    assert (kept[0] > 0).sum() == 2


def test_the_most_probable_token_always_stays():
    probs = random_probs(4)
    kept = filter_probs(probs, torch.zeros(4, dtype=torch.int64), torch.full((4,), 1e-9), torch.full((4,), 0.999))
    assert (kept > 0).sum(dim=1).tolist() == [1] * 4
    assert kept.argmax(dim=1).equal(probs.argmax(dim=1))


@pytest.mark.parametrize("filters", ["none", "top_k", "top_p", "min_p", "all"])
def test_draws_follow_the_filtered_distribution(filters):
    num_draws = 20_000
    top_k = 5 if filters in ("top_k", "all") else 1 << 30
    top_p = 0.8 if filters in ("top_p", "all") else None
    min_p = 0.15 if filters in ("min_p", "all") else None
    probs = random_probs(1, sharpness=1.0)
    drawn = draw_tokens(
        probs.expand(num_draws, -1),
        torch.full((num_draws,), SEED),
        torch.arange(num_draws),
        torch.full((num_draws,), top_k),
        None if top_p is None else torch.full((num_draws,), top_p),
        None if min_p is None else torch.full((num_draws,), min_p),
    )
    expected = torch.tensor(slow_filter(probs[0].tolist(), top_k, top_p, min_p), dtype=torch.float64)
    counts = torch.bincount(drawn, minlength=VOCAB)
    possible = expected > 0
    assert filters == "none" or not possible.all()
    assert counts[~possible].sum() == 0
    expected = expected[possible] / expected.sum() * num_draws
    assert stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue > 0.001


def test_draws_over_seeds_follow_the_distribution_too():
    num_draws = 20_000
    probs = random_probs(1)
    seeds = torch.arange(num_draws) * 0x1_0000_0001 - 5  # both halves move; some are negative
    drawn = draw_tokens(
        probs.expand(num_draws, -1), seeds, torch.full((num_draws,), 7), torch.full((num_draws,), VOCAB), None, None
    )
    expected = probs[0].double() / probs[0].double().sum() * num_draws
    assert stats.chisquare(torch.bincount(drawn, minlength=VOCAB).numpy(), expected.numpy()).pvalue > 0.001


def test_top_k_one_is_the_argmax_and_ties_go_to_the_first():
    probs = random_probs(64)
    probs[0] = 1 / VOCAB
    rows = torch.arange(64)
    drawn = draw_tokens(probs, rows, rows, torch.ones(64, dtype=torch.int32), torch.full((64,), 0.9), None)
    assert drawn.equal(probs.argmax(dim=1))
    assert drawn[0] == 0


def test_a_row_depends_on_nothing_but_itself():
    probs = random_probs(32)
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(-(2**62), 2**62, (32,), generator=generator)
    positions = torch.randint(0, 100_000, (32,), generator=generator, dtype=torch.int32)
    top_ks = torch.randint(1, VOCAB + 1, (32,), generator=generator)
    top_ps = torch.rand(32, generator=generator) * 0.9 + 0.1
    together = draw_tokens(probs, seeds, positions, top_ks, top_ps, None)
    order = torch.randperm(32, generator=generator)
    shuffled = draw_tokens(probs[order], seeds[order], positions[order], top_ks[order], top_ps[order], None)
    assert shuffled.equal(together[order])
    for row in range(32):
        one = slice(row, row + 1)
        assert (
            draw_tokens(probs[one], seeds[one], positions[one].long(), top_ks[one], top_ps[one], None) == together[row]
        )


def test_noise_is_a_pure_function_of_seed_position_and_token():
    seeds, positions = torch.tensor([3, 3, 4, 3 + (1 << 32)]), torch.tensor([8, 9, 8, 8])
    noise = exponential_noise(seeds, positions, 50)
    assert noise.equal(exponential_noise(seeds, positions, 50))
    assert exponential_noise(seeds[1:2], positions[1:2], 80)[0, :50].equal(noise[1])  # nor of the vocabulary's size
    for a in range(4):
        for b in range(a):
            assert (noise[a] != noise[b]).float().mean() > 0.9, (a, b)


def test_noise_is_exponential_finite_and_positive():
    seeds = torch.arange(64) * 7919 - 20
    noise = exponential_noise(seeds, torch.arange(64) + 1000, 4096)
    assert torch.isfinite(noise).all()
    assert (noise > 0).all()
    uniform = (1 - torch.exp(-noise.double())).flatten()
    assert stats.kstest(uniform.numpy()[::4], "uniform").pvalue > 0.001
    counts = torch.histc(uniform, bins=256, min=0, max=1)
    assert stats.chisquare(counts.numpy()).pvalue > 0.001


@pytest.mark.parametrize("shift", ["token", "position", "seed"])
def test_neighbouring_noise_is_uncorrelated(shift):
    base = torch.arange(256)
    noise = exponential_noise(torch.full((256,), 11), base, 512)
    other = {
        "token": noise.roll(1, dims=1),
        "position": noise.roll(1, dims=0),
        "seed": exponential_noise(torch.full((256,), 12), base, 512),
    }[shift]
    correlation = torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1]
    assert abs(float(correlation)) < 4 / noise.numel() ** 0.5


@pytest.mark.parametrize("hashed", [0, 1, 2**31, 2**32 - 1])
def test_noise_at_the_ends_of_the_hash(monkeypatch, hashed):
    monkeypatch.setattr("adaptivespec.verify.sampling._mix32", lambda x: torch.full_like(x, hashed))
    noise = exponential_noise(torch.tensor([0]), torch.tensor([0]), 3)
    expected = (hashed + 0.5) / 2**32
    assert torch.isfinite(noise).all()
    assert (noise > 0).all()
    if hashed < 2**32 - 1:
        assert noise[0, 0].item() == pytest.approx(
            -torch.log1p(torch.tensor(-expected, dtype=torch.float64)).item(), rel=1e-6
        )
