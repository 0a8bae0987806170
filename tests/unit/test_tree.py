"""`adaptivespec.verify.tree` against walkers in plain Python, on random trees."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.verify.tree import (
    accept_path,
    ancestor_mask,
    links_from_parents,
    parents_from_candidates,
    parents_from_links,
)

MAX_NODES = 24
Parents = list[int]


@st.composite
def parent_lists(draw, num_nodes: int, unreached: bool = True) -> Parents:
    """A random tree: every node but the root has an earlier parent, or -1 where nothing reaches it."""
    lowest = -1 if unreached else 0
    return [-1, *(draw(st.integers(lowest, node - 1)) for node in range(1, num_nodes))]


@st.composite
def batches(draw, unreached: bool = True) -> list[Parents]:
    num_nodes = draw(st.integers(1, MAX_NODES))
    return draw(st.lists(parent_lists(num_nodes, unreached), min_size=1, max_size=4))


@st.composite
def verifications(draw):
    """Trees with tokens from a small vocabulary, so that siblings often share one, and the target's choices."""
    parents = draw(batches())
    num_nodes = len(parents[0])
    tokens = st.lists(st.integers(0, 3), min_size=num_nodes, max_size=num_nodes)
    return parents, [draw(tokens) for _ in parents], [draw(tokens) for _ in parents]


def children(parents: Parents, node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node and child > 0]


def ancestors(parents: Parents, node: int) -> set[int]:
    seen = {node}
    while parents[node] >= 0:
        node = parents[node]
        seen.add(node)
    return seen


def walk(parents: Parents, tokens: list[int], target: list[int]) -> list[int]:
    """The accepted nodes, root first: SGLang's greedy rule, the first matching child in order of index."""
    path = [0]
    while matching := [child for child in children(parents, path[-1]) if tokens[child] == target[path[-1]]]:
        path.append(matching[0])
    return path


def depth_of(parents: list[Parents]) -> int:
    return max(len(ancestors(row, node)) - 1 for row in parents for node in range(len(row)))


@given(batches())
def test_links_lead_through_the_children_in_order(parents):
    next_token, next_sibling = links_from_parents(torch.tensor(parents))
    for row, first, sibling in zip(parents, next_token.tolist(), next_sibling.tolist(), strict=True):
        for node in range(len(row)):
            found, child = [], first[node]
            while child != -1:
                found.append(child)
                child = sibling[child]
            assert found == children(row, node)
        assert sibling[0] == -1


@given(batches())
def test_links_and_parents_round_trip(parents):
    parent = torch.tensor(parents)
    assert parents_from_links(*links_from_parents(parent)).equal(parent)


@given(batches())
def test_ancestor_mask_is_the_line_to_the_root(parents):
    num_nodes = len(parents[0])
    mask = ancestor_mask(torch.tensor(parents), depth_of(parents))
    expected = [[[j in ancestors(row, i) for j in range(num_nodes)] for i in range(num_nodes)] for row in parents]
    assert mask.tolist() == expected


@given(verifications())
def test_accept_path_walks_like_the_reference(case):
    parents, tokens, target = case
    max_path = depth_of(parents) + 1
    path = accept_path(torch.tensor(parents), torch.tensor(tokens), torch.tensor(target), max_path)
    assert path.nodes.shape == (len(parents), max_path)
    for row, nodes in enumerate(path.nodes.tolist()):
        expected = walk(parents[row], tokens[row], target[row])
        assert nodes == expected + [-1] * (max_path - len(expected))
        assert path.num_accepted[row] == len(expected) - 1
        assert path.is_accepted[row].nonzero().flatten().tolist() == expected


def test_of_two_siblings_with_one_token_the_first_is_accepted():
    parent = torch.tensor([[-1, 0, 0, 1, 2]])
    tokens = torch.tensor([[9, 5, 5, 6, 7]])  # below the second twin the target would agree as well
    path = accept_path(parent, tokens, torch.tensor([[5, 6, 7, 0, 0]]), 3)
    assert path.nodes.tolist() == [[0, 1, 3]]
    assert path.is_accepted.tolist() == [[True, True, False, True, False]]


def test_an_unreached_node_is_never_accepted_nor_are_its_children():
    parent = torch.tensor([[-1, -1, 1]])
    path = accept_path(parent, torch.tensor([[4, 4, 4]]), torch.tensor([[4, 4, 4]]), 3)
    assert path.nodes.tolist() == [[0, -1, -1]]


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 31, 32, 33, 63, 64])
def test_deep_chains(num_nodes):
    parent = torch.arange(-1, num_nodes - 1).repeat(2, 1)
    assert ancestor_mask(parent, num_nodes - 1).equal(torch.ones(2, num_nodes, num_nodes, dtype=torch.bool).tril())
    tokens = torch.arange(num_nodes).repeat(2, 1)
    target = tokens + 1
    target[1, num_nodes // 2] = -7  # the second row is cut in the middle
    path = accept_path(parent, tokens, target, num_nodes)
    assert path.num_accepted.tolist() == [num_nodes - 1, num_nodes // 2]
    assert path.nodes[0].tolist() == list(range(num_nodes))
    assert parents_from_links(*links_from_parents(parent)).equal(parent)


@pytest.mark.parametrize("num_nodes", [2, 33, 64])
def test_a_root_with_nothing_but_children(num_nodes):
    parent = torch.tensor([[-1] + [0] * (num_nodes - 1)])
    next_token, next_sibling = links_from_parents(parent)
    assert next_token.tolist() == [[1] + [-1] * (num_nodes - 1)]
    assert next_sibling.tolist() == [[-1, *range(2, num_nodes), -1]]
    assert parents_from_links(next_token, next_sibling).equal(parent)


def draft(num_steps: int, topk: int, num_draft_tokens: int, random) -> tuple[list[int], list[int], Parents]:
    """What EAGLE's drafting leaves behind - parent candidates, selected candidates - and the parents they mean.

    A child's score is below its parent's, so that every selected candidate's parent is selected.
    """
    scores = [random.random() for _ in range(topk)]
    parent_of = [-1] * topk  # candidate of which each candidate is a child
    parent_list = [-1]
    kept = list(range(topk))
    for _ in range(num_steps - 1):
        parent_list += kept
        first = len(scores)
        for parent in kept:
            scores += [scores[parent] * random.uniform(0.05, 0.95) for _ in range(topk)]
            parent_of += [parent] * topk
        kept = sorted(range(first, len(scores)), key=lambda candidate: -scores[candidate])[:topk]
    best = sorted(range(len(scores)), key=lambda candidate: -scores[candidate])[: num_draft_tokens - 1]
    selected = sorted(best)
    node_of = {-1: 0} | {candidate: node for node, candidate in enumerate(selected, start=1)}
    return parent_list, selected, [-1, *(node_of[parent_of[candidate]] for candidate in selected)]


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 3), st.data())
def test_parents_from_candidates_reads_what_eagle_drafted(num_steps, topk, batch, data):
    most = min(64, 1 + topk + (num_steps - 1) * topk**2)
    num_draft_tokens = data.draw(st.integers(min(num_steps + 1, most), most))
    random = data.draw(st.randoms(use_true_random=False))
    drafts = [draft(num_steps, topk, num_draft_tokens, random) for _ in range(batch)]
    parent_list, selected, expected = (torch.tensor(column) for column in zip(*drafts, strict=True))
    if num_steps == 1:
        parent_list = torch.empty(batch, 0, dtype=torch.int64)  # as SGLang leaves it
    assert parents_from_candidates(parent_list, selected, topk).equal(expected)


def test_a_candidate_whose_parent_was_not_selected_is_unreached():
    # topk 2: candidates 0 1 below the root, 2 3 below candidate 0, 4 5 below candidate 1. Selected: 2 (orphan), 4 (orphan).
    parent_list = torch.tensor([[-1, 0, 1]])
    parent = parents_from_candidates(parent_list, torch.tensor([[2, 4]]), 2)
    assert parent.tolist() == [[-1, -1, -1]]
    assert parents_from_candidates(parent_list, torch.tensor([[1, 2, 4]]), 2).tolist() == [[-1, 0, -1, 1]]
