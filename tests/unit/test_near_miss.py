"""`adaptivespec.verify.near_miss` against a walker in plain Python, on random trees, scores and limits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.verify.near_miss import Limits, defer, log_kappa, promote
from adaptivespec.verify.tree import accept_path
from tests.unit.test_tree import batches, children, depth_of

VOCAB = 5
# Few distinct values, so that ties, flat rows and forbidden tokens are common.
SCORES = st.sampled_from([-math.inf, -2.0, -1.0, -0.25, 0.0, 0.0])
BROKEN = st.sampled_from([math.nan, math.inf])


@st.composite
def verifications(draw):
    parents = draw(batches())
    num_nodes = len(parents[0])
    tokens = [draw(st.lists(st.integers(0, VOCAB - 1), min_size=num_nodes, max_size=num_nodes)) for _ in parents]
    row = st.lists(SCORES, min_size=VOCAB, max_size=VOCAB).filter(lambda row: max(row) > -math.inf)
    broken = st.tuples(row, BROKEN).map(lambda pair: [pair[1], *pair[0][1:]])
    rows = st.lists(st.one_of(row, row, row, broken), min_size=num_nodes, max_size=num_nodes)
    return parents, tokens, [draw(rows) for _ in parents]


KAPPAS = st.sampled_from([None, 1.0, 0.7, 0.3, 0.1])
STOPS = st.lists(st.sampled_from([-1, 0, 4]), min_size=2, max_size=2)


def walk(parents, tokens, scores, target, kappa, stops, max_promotions, top_k_guard):
    """Accepted nodes, the promoted ones among them, and the token after the last: the rule as one would say it."""
    path, promoted = [0], []
    while True:
        node = path[-1]
        row, top = scores[node], max(scores[node])
        matching = [child for child in children(parents, node) if tokens[child] == target[node]]
        if matching:
            path.append(matching[0])
            continue
        finite = [score for score in row if score != -math.inf]
        kids = children(parents, node)
        is_sound = all(map(math.isfinite, finite)) and min(finite) < max(finite)
        if kappa is None or not kids or not is_sound or (max_promotions and len(promoted) >= max_promotions):
            break
        best = max(row[tokens[child]] for child in kids)
        child = next(child for child in kids if row[tokens[child]] == best)
        token = tokens[child]
        near = math.exp(best - top) >= kappa - 1e-6
        guarded = top_k_guard and sum(score > best for score in row) >= top_k_guard
        if not near or guarded or token in stops or target[node] in stops:
            break
        path.append(child)
        promoted.append(child)
    return path, promoted, target[path[-1]]


@given(
    case=verifications(),
    data=st.data(),
    max_promotions=st.integers(0, 3),
    top_k_guard=st.integers(0, 3),
)
def test_the_rule_is_the_walkers(case, data, max_promotions, top_k_guard):
    parents, tokens, scores = case
    kappas = [data.draw(KAPPAS) for _ in parents]
    stops = [data.draw(STOPS) for _ in parents]
    parent, token, score = torch.tensor(parents), torch.tensor(tokens), torch.tensor(scores)
    target = score.nan_to_num(nan=-1e9).argmax(dim=2)
    limits = Limits(torch.tensor([log_kappa(kappa) for kappa in kappas]), torch.tensor(stops))
    found = promote(parent, token, target, score, limits, max_promotions, top_k_guard)
    path = accept_path(parent, token, found.target_tokens, depth_of(parents) + 1)
    for b in range(len(parents)):
        wanted, promoted, bonus = walk(
            parents[b], tokens[b], scores[b], target[b].tolist(), kappas[b], stops[b], max_promotions, top_k_guard
        )
        nodes = [node for node in path.nodes[b].tolist() if node >= 0]
        tokens_of = [tokens[b][node] for node in nodes]
        assert tokens_of == [tokens[b][node] for node in wanted]
        assert int(found.promoted[b][nodes].sum()) == len(promoted)
        assert int(found.target_tokens[b, nodes[-1]]) == bonus
        for node in promoted:
            ratio = math.exp(scores[b][parents[b][node]][tokens[b][node]] - max(scores[b][parents[b][node]]))
            assert math.exp(found.score[b, node] - found.top_score[b, node]) == pytest.approx(ratio, rel=1e-5)


def chain(scores, tokens, kappa, stops=(-1,), **options):
    """One path of drafts under a single request: the substituted tokens and the promoted flags."""
    num_nodes = len(tokens)
    score = torch.tensor([scores])
    found = promote(
        torch.arange(-1, num_nodes - 1).unsqueeze(0),
        torch.tensor([tokens]),
        score.argmax(dim=2),
        score,
        Limits(torch.tensor([log_kappa(kappa)]), torch.tensor([list(stops)])),
        **options,
    )
    return found.target_tokens[0].tolist(), found.promoted[0].tolist()


NEAR = [0.0, -0.1, -3.0]  # token 0 leads, token 1 follows closely


def test_a_near_miss_is_promoted_and_verification_goes_on_below_it():
    assert chain([NEAR, NEAR, NEAR], [2, 1, 0], 0.5) == ([1, 0, 0], [False, True, False])


def test_one_promotion_a_step_unless_told_otherwise():
    assert chain([NEAR] * 3, [2, 1, 1], 0.5)[0] == [1, 0, 0]
    assert chain([NEAR] * 3, [2, 1, 1], 0.5, max_promotions=2)[0] == [1, 1, 0]
    assert chain([NEAR] * 3, [2, 1, 1], 0.5, max_promotions=0)[0] == [1, 1, 0]


@pytest.mark.parametrize("stops", [(0,), (1,)])
def test_no_stop_token_is_promoted_and_nothing_in_place_of_one(stops):
    assert chain([NEAR] * 3, [2, 1, 0], 0.1, stops) == ([0, 0, 0], [False] * 3)


def test_kappa_one_promotes_exact_ties_alone():
    assert chain([[0.0, 0.0, -1.0], NEAR], [2, 1], 1.0)[0] == [1, 0]
    assert chain([[0.0, -1e-6, -1.0], NEAR], [2, 1], 1.0)[0] == [0, 0]


@pytest.mark.parametrize("row", [[0.0, 0.0, 0.0], [math.nan, 0.0, -1.0], [0.0, math.inf, 0.0], [0.0, -math.inf, 0.0]])
def test_flat_and_broken_rows_promote_nothing_and_leave_their_neighbours(row):
    scores = torch.tensor([[row, row], [NEAR, NEAR]])
    limits = Limits(torch.full((2,), log_kappa(0.1)), torch.full((2, 1), -1))
    found = promote(
        torch.tensor([[-1, 0]] * 2), torch.tensor([[2, 2], [2, 1]]), torch.tensor([[1, 1], [0, 0]]), scores, limits
    )
    assert found.promoted.tolist() == [[False, False], [False, True]]


# -- FLy

UNDECIDED, DECIDED = [0.0, -0.1, -3.0], [0.0, -9.0, -9.0]


def deferred(scores, tokens, window):
    score = torch.tensor([scores])
    found = defer(
        torch.arange(-1, len(tokens) - 1).unsqueeze(0),
        torch.tensor([tokens]),
        score.argmax(dim=2),
        score,
        Limits(torch.tensor([log_kappa(0)]), torch.tensor([[-1]])),
        window=window,
    )
    return found.promoted[0].tolist()


@pytest.mark.parametrize("window", [1, 2, 3])
def test_fly_waits_for_the_tokens_after_a_miss(window):
    """A miss at depth 1, then the target's own choice twice, then another miss."""
    found = deferred([UNDECIDED] * 5, [0, 1, 0, 0, 1], window)
    assert found == [False, True, False, False, window == 1]


def test_fly_promotes_nothing_where_the_tree_ends_inside_the_window():
    assert deferred([UNDECIDED] * 3, [0, 1, 0], window=3) == [False] * 3
    assert deferred([UNDECIDED] * 4, [0, 1, 0, 0], window=3) == [False, True, False, False]


def test_fly_promotes_nothing_where_the_target_is_decided():
    assert deferred([DECIDED, *[UNDECIDED] * 3], [0, 1, 0, 0], window=3) == [False] * 4


@given(case=verifications(), window=st.integers(1, 4))
def test_flys_promotions_are_borne_out_below(case, window):
    """On every path that a walk takes: after a promotion come ``window - 1`` of the target's own choices."""
    parents, tokens, scores = case
    parent, token, score = torch.tensor(parents), torch.tensor(tokens), torch.tensor(scores)
    target = score.nan_to_num(nan=-1e9).argmax(dim=2)
    limits = Limits(torch.full((len(parents),), log_kappa(0)), torch.full((len(parents), 1), -1))
    found = defer(parent, token, target, score, limits, window=window)
    path = accept_path(parent, token, found.target_tokens, depth_of(parents) + 1)
    for b in range(len(parents)):
        nodes = [node for node in path.nodes[b].tolist() if node >= 0]
        flags = found.promoted[b][nodes].tolist()
        for place, flag in enumerate(flags):
            if flag:
                assert len(flags) >= place + window
                assert not any(flags[place + 1 : place + window])
