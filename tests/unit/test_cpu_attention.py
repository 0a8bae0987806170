"""`adaptivespec.cpu_engine.attention` against attention written as loops over requests, rows and heads.

Slots are shuffled in the pool. All that does not belong to a request's own history is NaN, in the pool and behind the
stale entries of the request table, so that whatever leaks turns the output into NaN.
"""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from adaptivespec.cpu_engine.attention import CpuTreeBackend, CpuTreeMultiStepDraftBackend, plan_ragged, plan_uniform
from adaptivespec.errors import RefusedError
from adaptivespec.verify.tree import ancestor_mask

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [(4, 4), (6, 2), (5, 1)]  # query heads, key heads
WIDTH = 64  # columns of the request table
HEAD_DIM = 8
NUM_SLOTS = 400


class FakePool:
    """One layer's cache, as SGLang's pool offers it."""

    def __init__(self, num_kv_heads: int, dtype: torch.dtype):
        self.keys, self.values = (torch.full((NUM_SLOTS, num_kv_heads, HEAD_DIM), torch.nan, dtype=dtype) for _ in "kv")

    def set_kv_buffer(self, layer, loc, keys, values):
        self.keys[loc.loc], self.values[loc.loc] = keys.to(self.keys.dtype), values.to(self.values.dtype)

    def get_key_buffer(self, layer_id):
        return self.keys

    def get_value_buffer(self, layer_id):
        return self.values


class World:
    """Requests with histories of these lengths, in shuffled rows of the table and shuffled slots of the pool."""

    def __init__(self, lens: list[int], dtype=torch.float32, heads=(6, 2)):
        self.generator = torch.Generator().manual_seed(sum(lens))
        self.lens, self.dtype, (self.num_heads, num_kv_heads) = lens, dtype, heads
        self.pool = FakePool(num_kv_heads, dtype)
        self.table = torch.randint(0, NUM_SLOTS // 2, (8, WIDTH), generator=self.generator, dtype=torch.int32)  # stale
        self.free = iter((torch.randperm(NUM_SLOTS // 2, generator=self.generator) + NUM_SLOTS // 2).tolist())
        self.requests = torch.randperm(8, generator=self.generator)[: len(lens)]
        self.runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.table), token_to_kv_pool=self.pool
        )
        self.layer = SimpleNamespace(
            layer_id=0,
            tp_q_head_num=self.num_heads,
            head_dim=HEAD_DIM,
            qk_head_dim=HEAD_DIM,
            v_head_dim=HEAD_DIM,
            scaling=0.5,  # not the usual one over the root of HEAD_DIM
            is_cross_attention=False,
            attn_type=AttentionType.DECODER,
            sliding_window_size=-1,
            logit_cap=0.0,
        )
        for request, length in zip(self.requests.tolist(), lens, strict=True):
            self.reserve(request, range(length))
            slots = self.table[request, :length].long()
            self.pool.keys[slots], self.pool.values[slots] = self.random_kv(length), self.random_kv(length)

    def reserve(self, request: int, columns) -> None:
        for column in columns:
            self.table[request, column] = next(self.free)

    def random_kv(self, num_rows: int) -> torch.Tensor:
        return self.random(num_rows, self.pool.keys.shape[1])

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, HEAD_DIM, generator=self.generator).to(self.dtype)

    def batch(self, mode: ForwardMode, seq_lens: list[int], **fields) -> SimpleNamespace:
        return SimpleNamespace(
            forward_mode=mode, req_pool_indices=self.requests, seq_lens=torch.tensor(seq_lens), **fields
        )

    def check(self, backend, batch, own: list[list[int]], seen: list[list[list[int]]]) -> None:
        """Run rows that bring the keys of columns ``own`` and see the columns ``seen``, and compare them one by one."""
        requests = self.requests.tolist()
        slots = [int(self.table[r, column]) for r, columns in zip(requests, own, strict=True) for column in columns]
        batch.out_cache_loc = torch.tensor(slots)
        query = self.random(len(slots), self.num_heads)
        out = backend.forward_extend(query, self.random_kv(len(slots)), self.random_kv(len(slots)), self.layer, batch)
        assert out.dtype == self.dtype
        rows = [(r, columns) for r, of_request in zip(requests, seen, strict=True) for columns in of_request]
        expected = torch.stack([self.naive(query[i], r, columns) for i, (r, columns) in enumerate(rows)])
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[self.dtype]
        torch.testing.assert_close(out.double(), expected.flatten(1), rtol=tolerance, atol=tolerance)

    def naive(self, query: torch.Tensor, request: int, columns: list[int]) -> torch.Tensor:
        slots = self.table[request, columns].long()
        group = self.num_heads // self.pool.keys.shape[1]
        out = torch.empty(self.num_heads, HEAD_DIM, dtype=torch.float64)
        for head in range(self.num_heads):
            keys, values = (pool[slots, head // group].double() for pool in (self.pool.keys, self.pool.values))
            out[head] = torch.softmax(keys @ query[head].double() * self.layer.scaling, dim=0) @ values
        return out


def up_to(columns: list[int]) -> list[list[int]]:
    """What causal rows at these columns see."""
    return [list(range(column + 1)) for column in columns]


def run_tail(world: World, mode: ForwardMode, num_rows: list[int], backend=None, **fields) -> None:
    """A causal pass of each request's last ``num_rows`` columns."""
    own = [list(range(length - rows, length)) for length, rows in zip(world.lens, num_rows, strict=True)]
    backend = backend or CpuTreeBackend(world.runner)
    batch = world.batch(mode, world.lens, **fields)
    backend.init_forward_metadata(batch)
    world.check(backend, batch, own, [up_to(columns) for columns in own])


def run_verify(world: World, parents: list[list[int]], tree_topk: int, backend=None) -> None:
    width = len(parents[0])
    mask = ancestor_mask(torch.tensor(parents), width)
    own = [list(range(length, length + width)) for length in world.lens]
    for request, columns in zip(world.requests.tolist(), own, strict=True):
        world.reserve(request, columns)
    spec = SimpleNamespace(draft_token_num=width, tree_topk=tree_topk, custom_mask=mask.flatten())
    backend = backend or CpuTreeBackend(world.runner)
    batch = world.batch(ForwardMode.TARGET_VERIFY, world.lens, spec_info=spec)
    backend.init_forward_metadata(batch)
    seen = [
        [[*range(length), *(length + node for node in row.nonzero().flatten().tolist())] for row in of_request]
        for length, of_request in zip(world.lens, mask, strict=True)
    ]
    world.check(backend, batch, own, seen)


def chain(width: int) -> list[int]:
    return list(range(-1, width - 1))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lens", [[9], [12, 12, 12], [7, 30, 1, 16]], ids=str)
def test_decode(lens, dtype, heads):
    run_tail(World(lens, dtype, heads), ForwardMode.DECODE, [1] * len(lens))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_of_ragged_requests_with_and_without_prefix(dtype, heads):
    num_rows = [5, 3, 1, 12]  # all new; a prefix of 17; one row behind a prefix; a chunk
    run_tail(World([5, 20, 8, 30], dtype, heads), ForwardMode.EXTEND, num_rows, extend_seq_lens=torch.tensor(num_rows))


def test_mixed_prefill_and_decode():
    run_tail(World([4, 25]), ForwardMode.MIXED, [4, 1], extend_seq_lens=torch.tensor([4, 1]))


def test_prefill_skips_a_request_without_rows():
    world = World([4, 6, 5])
    run_tail(world, ForwardMode.EXTEND, [4, 0, 2], extend_seq_lens=torch.tensor([4, 0, 2]))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lens", [[10], [3, 21, 9]], ids=str)
def test_verify_of_a_chain(lens, dtype, heads):
    run_verify(World(lens, dtype, heads), [chain(4)] * len(lens), tree_topk=1)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lens", [[10], [3, 21, 9], [6, 6, 6]], ids=str)
def test_verify_of_trees(lens, dtype, heads):
    trees = [[-1, 0, 0, 1, 1, 2, 3], [-1, 0, 0, 0, 0, 4, 5], chain(7)]
    run_verify(World(lens, dtype, heads), trees[: len(lens)], tree_topk=4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lens", [[14], [8, 8], [5, 30, 11]], ids=str)
def test_draft_extend(lens, dtype):
    width = 5
    run_tail(
        World(lens, dtype),
        ForwardMode.DRAFT_EXTEND_V2,
        [width] * len(lens),
        input_ids=torch.zeros(width * len(lens), dtype=torch.int64),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("topk", "num_steps"), [(1, 4), (4, 2), (3, 5)])
@pytest.mark.parametrize("lens", [[9], [7, 7], [3, 40, 12]], ids=str)
def test_draft_steps_keep_their_branches_apart(lens, topk, num_steps, dtype):
    world = World(lens, dtype)
    for request, length in zip(world.requests.tolist(), lens, strict=True):
        world.reserve(request, range(length, length + topk * num_steps))
    backend = CpuTreeMultiStepDraftBackend(world.runner, topk, num_steps)
    assert len(backend.attn_backends) == num_steps - 1
    batch = world.batch(ForwardMode.DECODE, lens)
    backend.init_forward_metadata(batch)
    for step, child in enumerate(backend.attn_backends):
        starts = [[length + branch * num_steps for branch in range(topk)] for length in lens]
        own = [[start + step for start in of_request] for of_request in starts]
        seen = [
            [[*range(length), *range(start, start + step + 1)] for start in of_request]
            for length, of_request in zip(lens, starts, strict=True)
        ]
        world.check(child, batch, own, seen)


def test_draft_branches_may_end_at_the_last_column():
    topk, num_steps = 4, 3
    lens = [WIDTH - topk * num_steps, 2]
    test_draft_steps_keep_their_branches_apart(lens, topk, num_steps, torch.float32)


def test_one_backend_serves_every_width_in_turn():
    world = World([6, 17])
    backend = CpuTreeBackend(world.runner)
    run_verify(world, [[-1, 0, 0, 2], chain(4)], tree_topk=2, backend=backend)
    run_verify(world, [chain(8)] * 2, tree_topk=1, backend=backend)
    run_tail(world, ForwardMode.DECODE, [1, 1], backend=backend)
    run_verify(world, [[-1, 0]] * 2, tree_topk=2, backend=backend)


def test_without_saving_the_cache_is_read_only():
    world = World([5])
    backend = CpuTreeBackend(world.runner)
    batch = world.batch(ForwardMode.DECODE, [5], out_cache_loc=world.table[world.requests, 4].long())
    backend.init_forward_metadata(batch)
    before = world.pool.keys.clone()
    query = world.random(1, world.num_heads)
    out = backend.forward_decode(query, world.random_kv(1), world.random_kv(1), world.layer, batch, save_kv_cache=False)
    assert world.pool.keys.nan_to_num(9).equal(before.nan_to_num(9))
    torch.testing.assert_close(out[0].double(), world.naive(query[0], int(world.requests[0]), [*range(5)]).flatten())


def test_nothing_is_planned_for_an_idle_batch():
    backend = CpuTreeBackend(World([3]).runner)
    backend.init_forward_metadata(SimpleNamespace(forward_mode=ForwardMode.IDLE, req_pool_indices=None, seq_lens=None))
    assert backend.plans == []


def test_plans_pad_with_the_requests_own_last_slot():
    slots = torch.tensor([[5, 6, 7, 8], [1, 2, 30, 40]])
    [plan] = plan_uniform(slots, torch.tensor([4, 2]), 1)
    assert plan.slots.tolist() == [[5, 6, 7, 8], [1, 2, 2, 2]]
    assert plan.bias[:, 0, 0].isinf().tolist() == [[False] * 4, [False, False, True, True]]
    assert plan_uniform(slots, torch.tensor([4, 4]), 1)[0].bias is None


def test_ragged_plans_cover_the_rows_in_order():
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    plans = plan_ragged(table, torch.tensor([3, 1]), torch.tensor([5, 2]), torch.tensor([2, 1]))
    assert [plan.rows for plan in plans] == [slice(0, 2), slice(2, 3)]
    assert [plan.slots.tolist() for plan in plans] == [[[30, 31, 32, 33, 34]], [[10, 11]]]
    assert plans[0].bias[0, 0].isinf().tolist() == [[False] * 4 + [True], [False] * 5]
    assert plans[1].bias is None


@pytest.mark.parametrize(
    ("fields", "extras", "found"),
    [
        ({"is_cross_attention": True}, {}, "cross or encoder-only attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, {}, "cross or encoder-only attention"),
        ({"sliding_window_size": 128}, {}, "a sliding window of 128"),
        ({"logit_cap": 30.0}, {}, "a logit cap of 30.0"),
        ({}, {"sinks": torch.zeros(6)}, "attention sinks"),
        ({"v_head_dim": 16}, {}, "key heads of 8 and value heads of 16"),
    ],
)
def test_layers_that_need_more_are_refused(fields, extras, found):
    world = World([3])
    vars(world.layer).update(fields)
    backend = CpuTreeBackend(world.runner)
    batch = world.batch(ForwardMode.DECODE, [3], out_cache_loc=torch.tensor([0]))
    backend.init_forward_metadata(batch)
    with pytest.raises(RefusedError, match=f"cpu_tree: found {found} in layer 0; expected"):
        backend.forward_decode(world.random(1, 6), world.random_kv(1), world.random_kv(1), world.layer, batch, **extras)
