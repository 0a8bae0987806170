"""`adaptivespec.cpu_engine.kernels` against loops over requests and nodes."""

import inspect
import random

import pytest
import torch

from adaptivespec.cpu_engine import kernels
from adaptivespec.cpu_engine.standin import sgl_kernel
from adaptivespec.verify.tree import ancestor_mask, links_from_parents

POOL_LEN = 40


def token_table(num_rows: int = 6) -> torch.Tensor:
    """A request-to-slot table in which every entry is different."""
    return (
        (torch.randperm(num_rows * POOL_LEN, generator=torch.Generator().manual_seed(0)) + 1).int().view(num_rows, -1)
    )


REQUESTS = torch.tensor([4, 0, 2, 5])
START = torch.tensor([3, 0, 10, 7])
END = torch.tensor([8, 6, 10, 40])  # the third request brings nothing


def test_assign_req_to_token_pool_writes_request_after_request():
    table = token_table()
    expected = table.clone()
    slots = torch.arange(1000, 1100)
    taken = 0
    for request, start, end in zip(REQUESTS.tolist(), START.tolist(), END.tolist(), strict=True):
        for column in range(start, end):
            expected[request, column] = slots[taken]
            taken += 1
    kernels.assign_req_to_token_pool_cpu(REQUESTS, table, START.int(), END, slots, POOL_LEN)
    assert table.equal(expected)


def test_assign_extend_cache_locs_reads_them_back():
    table = token_table()
    expected = [
        int(table[request, column])
        for request, start, end in zip(REQUESTS.tolist(), START.tolist(), END.tolist(), strict=True)
        for column in range(start, end)
    ]
    out = torch.full((len(expected) + 3,), -1)
    kernels.assign_extend_cache_locs_cpu(REQUESTS.int(), table, START, END, out, POOL_LEN)
    assert out.tolist() == [*expected, -1, -1, -1]


@pytest.mark.parametrize(("topk", "num_steps"), [(1, 1), (1, 5), (4, 3)])
def test_assign_draft_cache_locs_reads_the_slots_behind_each_request(topk, num_steps):
    table = token_table()
    lens = torch.tensor([3, 20, 0, 28])
    out = torch.empty(4 * topk * num_steps, dtype=torch.int64)
    kernels.assign_draft_cache_locs_contiguous_cpu(REQUESTS, table, lens, out, POOL_LEN, topk, num_steps)
    expected = [
        int(table[request, length + offset])
        for request, length in zip(REQUESTS.tolist(), lens.tolist(), strict=True)
        for offset in range(topk * num_steps)
    ]
    assert out.tolist() == expected


def test_fill_bonus_tokens_takes_the_last_accepted_token_of_each_block():
    tokens = torch.arange(12, dtype=torch.int32) + 100
    bonus = torch.empty(3, dtype=torch.int32)
    kernels.fill_bonus_tokens_cpu(tokens, torch.tensor([1, 4, 2], dtype=torch.int32), bonus, 4)
    assert bonus.tolist() == [100, 107, 109]


def test_fill_accept_out_cache_loc_moves_accepted_slots_to_the_front():
    slots = torch.arange(8) + 50
    out = torch.zeros(8, dtype=torch.int64)
    kernels.fill_accept_out_cache_loc_cpu(torch.tensor([[0, 2, -1], [4, -1, -1]], dtype=torch.int32), slots, out)
    assert out.tolist() == [50, 52, 54, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_copy_all_layer_kv_cache_reads_everything_before_it_writes(dtype):
    buffers = [torch.randn(20, heads, 6).to(dtype) for heads in (2, 2, 3, 1)]
    sources = torch.tensor([5, 6, 7, 19])
    targets = torch.tensor([4, 5, 6, 0])  # overlapping: 5 and 6 are read and written
    expected = [buffer.clone() for buffer in buffers]
    for buffer, before in zip(expected, buffers, strict=True):
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            buffer[target] = before[source]
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.uint64)
    strides = torch.tensor([buffer.stride(0) * buffer.element_size() for buffer in buffers])
    kernels.copy_all_layer_kv_cache_cpu(pointers, strides, targets, sources)
    for buffer, want in zip(buffers, expected, strict=True):
        assert buffer.equal(want)


def test_copy_of_nothing_touches_nothing():
    none = torch.empty(0, dtype=torch.int64)
    kernels.copy_all_layer_kv_cache_cpu(torch.tensor([0], dtype=torch.uint64), torch.tensor([8]), none, none)


def random_draft(rng: random.Random, topk: int, depth: int, num_nodes: int) -> tuple[list[int], list[int], list[int]]:
    """Parent candidates, selected candidates and the parents among the nodes, as EAGLE's drafting leaves them."""
    parent_list, level, parent_of = [-1], list(range(topk)), [-1] * topk
    for _ in range(depth - 1):
        parent_list += level
        first = len(parent_of)
        parent_of += [candidate for candidate in level for _ in range(topk)]
        level = sorted(rng.sample(range(first, len(parent_of)), topk))
    selected: list[int] = []
    while len(selected) < num_nodes - 1:  # any candidate whose parent is in
        open_ = [c for c, p in enumerate(parent_of) if c not in selected and (p == -1 or p in selected)]
        selected.append(rng.choice(open_))
    selected.sort()
    return (
        parent_list,
        selected,
        [-1, *(0 if parent_of[c] == -1 else selected.index(parent_of[c]) + 1 for c in selected)],
    )


@pytest.mark.parametrize(("topk", "depth", "num_nodes"), [(1, 5, 6), (4, 3, 4), (2, 4, 9), (3, 1, 4), (8, 4, 33)])
def test_build_tree_fills_mask_positions_and_links(topk, depth, num_nodes):
    rng = random.Random(topk)
    batch = 3
    drafts = [random_draft(rng, topk, depth, num_nodes) for _ in range(batch)]
    parent_list, selected, parent = (torch.tensor(column) for column in zip(*drafts, strict=True))
    if depth == 1:
        parent_list = parent_list[:, :0]
    seq_lens = torch.tensor([5, 1, 17])
    mask = torch.zeros(batch * num_nodes * num_nodes, dtype=torch.bool)
    positions = torch.empty(batch * num_nodes, dtype=torch.int64)
    index, first, sibling = (torch.full((batch, num_nodes), -5) for _ in range(3))
    kernels.build_tree_kernel_efficient_cpu(
        parent_list, selected, seq_lens, mask, positions, index, first, sibling, topk, depth, num_nodes, 1
    )
    assert index.flatten().tolist() == list(range(batch * num_nodes))
    for row in range(batch):
        for node in range(num_nodes):
            line, above = {node}, int(parent[row, node])
            while above >= 0:
                line.add(above)
                above = int(parent[row, above])
            assert set(mask.view(batch, num_nodes, num_nodes)[row, node].nonzero().flatten().tolist()) == line
            assert positions[row * num_nodes + node] == seq_lens[row] + len(line) - 1
    assert first.equal(links_from_parents(parent)[0])
    assert sibling.equal(links_from_parents(parent)[1])


@pytest.mark.parametrize("mode", [0, 2])
def test_other_tree_masks_are_an_error(mode):
    with pytest.raises(NotImplementedError, match=f"tree mask mode {mode}: the CPU engine reads QLEN_ONLY"):
        kernels.build_tree_kernel_efficient_cpu(*[torch.zeros(1, 1, dtype=torch.int64)] * 8, 1, 1, 1, mode)


def slow_verify(candidates, index, first, sibling, target, width):
    """SGLang's greedy walk, one request."""
    predicts, accepted, last = {}, [index[0]], 0
    while len(accepted) < width:
        child = first[last]
        while child != -1 and candidates[child] != target[last]:
            child = sibling[child]
        if child == -1:
            break
        predicts[index[last]] = target[last]
        accepted.append(index[child])
        last = child
    predicts[index[last]] = target[last]
    return predicts, accepted


@pytest.mark.parametrize("seed", range(20))
def test_verify_tree_walks_like_the_reference(seed):
    rng = random.Random(seed)
    batch, num_nodes = 4, rng.choice([1, 2, 5, 12])
    parent = torch.tensor([[-1, *(rng.randrange(node) for node in range(1, num_nodes))] for _ in range(batch)])
    width = int(ancestor_mask(parent, num_nodes).sum(dim=2).max())
    first, sibling = links_from_parents(parent)
    index = torch.arange(batch * num_nodes).view(batch, num_nodes)
    candidates, target = (
        torch.tensor([[rng.randrange(3) for _ in range(num_nodes)] for _ in range(batch)]) for _ in "ab"
    )
    predicts = torch.full((batch * num_nodes,), -9, dtype=torch.int32)
    accept_index = torch.full((batch, width), -1, dtype=torch.int32)
    num_accepted = torch.zeros(batch, dtype=torch.int32)
    kernels.verify_tree_greedy_cpu(predicts, accept_index, num_accepted, candidates, index, first, sibling, target)
    expected = [-9] * (batch * num_nodes)
    for row in range(batch):
        columns = (column[row].tolist() for column in (candidates, index, first, sibling, target))
        tokens, accepted = slow_verify(*columns, width)
        for place, token in tokens.items():
            expected[place] = token
        assert accept_index[row].tolist() == accepted + [-1] * (width - len(accepted))
        assert num_accepted[row] == len(accepted) - 1
    assert predicts.tolist() == expected


def test_multi_layer_eagle_is_an_error():
    with pytest.raises(NotImplementedError, match="use --speculative-algorithm EAGLE3"):
        kernels.rotate_input_ids_cpu()


def test_the_standin_offers_every_kernel_and_nothing_else():
    ours = {name for name, _ in inspect.getmembers(kernels, inspect.isfunction) if name.endswith("_cpu")}
    assert set(sgl_kernel.__all__) == ours
    assert all(getattr(sgl_kernel, name) is getattr(kernels, name) for name in ours)
