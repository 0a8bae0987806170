"""Where each tree node's hidden state is found, against SGLang's own tree building."""

from types import SimpleNamespace

import pytest
import torch

from adaptivespec.config import DriftConfig
from adaptivespec.sglang_plugin.drift_link import DriftLink, states_of_nodes
from adaptivespec.shapes import TreeShape

pytest.importorskip("sglang")


def make_link(hot_token_id: torch.Tensor | None = None, **config) -> DriftLink:
    processor = torch.nn.Identity()
    processor.vocab_size = 16
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=4, vocab_size=40), logits_processor=processor)
    runner = SimpleNamespace(model=model, dtype=torch.float32)
    worker = SimpleNamespace(draft_runner=runner, device="cpu", hot_token_id=hot_token_id)
    shapes = (TreeShape(2, 1, 3),)
    return DriftLink(worker, shapes, 4, DriftConfig(enabled=True, num_slots=8, num_tokens=2, **config), "draft")


def request(tenant: str | None = None, *, extra_key: str | None = None, cache_salt: str | None = None):
    custom = {"adaptive": {"tenant": tenant}} if tenant else None
    penalties = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
    params = SimpleNamespace(custom_params=custom, logit_bias=None, **penalties)
    return SimpleNamespace(extra_key=extra_key, cache_salt=cache_salt, grammar=None, sampling_params=params)


def test_whatever_isolates_the_prefix_cache_isolates_the_memory():
    link = make_link()
    link.begin([request(), request("a"), request(cache_salt="a"), request(extra_key="a")])
    link.begin([request("a", cache_salt="b"), request("b", cache_salt="b"), request(cache_salt="b", extra_key="a")])
    names = link.tenants.banks
    assert sorted(name.partition(":")[0] for name in names) == ["key"] * 4 + ["tenant"] * 2
    assert len(set(names.values())) == 6


def test_a_frozen_memory_takes_in_nobody_and_loses_nothing():
    link = make_link(num_banks=1)
    link.begin([request("known")])
    link.memory.learn(torch.ones(1, 4), torch.zeros(1, 16), torch.randn(1, 16), torch.zeros(1, dtype=torch.int64))
    link.is_frozen = True
    link.begin([request("newcomer")])
    assert link.corrected_rows() == [None]
    assert (link.tenants.banks, link.memory.occupancy()) == ({"tenant:known": 0}, [1])
    assert "tenant:newcomer" not in link._benefits


def test_requests_beyond_the_banks_are_neither_corrected_nor_counted():
    link = make_link(num_banks=1, check_every=0)
    first, second = request("one"), request("two")
    link.begin([first, second])
    assert link.corrected_rows() == [True, None]
    link.begin_extend()
    assert link.corrected_rows() == [True, None]
    link.begin([second])  # which has the bank now
    assert link.corrected_rows() == [True]


def test_new_weights_empty_it_and_no_bank_file_is_written_any_more(tmp_path):
    (tmp_path / "draft").mkdir()
    link = make_link(file=str(tmp_path / "bank"))
    link.begin([request("one")])
    link.memory.learn(torch.ones(1, 4), torch.zeros(1, 16), torch.randn(1, 16), torch.zeros(1, dtype=torch.int64))
    link.save()
    link.on_new_weights()
    assert link.memory.occupancy()[0] == 0
    with pytest.raises(OSError, match="updated since the start"):
        link.save()


def test_tokens_outside_the_drafts_vocabulary_come_in_by_its_table():
    """What SGLang does with the columns of the logits: it looks the token up in the worker's table."""
    link = make_link(hot_token_id=torch.arange(16) * 2, check_every=0, num_spare=3)
    link.begin([request("one"), request("two")])
    state, logits = torch.ones(1, 4), torch.zeros(1, 16)
    target = torch.zeros(1, 40)
    target[0, 33] = 20.0
    bank = torch.zeros(1, dtype=torch.int64)
    link.memory.take_in(target.argmax(dim=1), bank)
    link.memory.learn(state, logits, target[:, link._draft.hot_token_id], bank)
    mode = SimpleNamespace(is_draft_extend_v2=lambda: False, is_decode=lambda: False)
    forward_batch = SimpleNamespace(batch_size=2, forward_mode=mode)
    output = SimpleNamespace(next_token_logits=logits.repeat(2, 1), hidden_states=state.repeat(2, 1))
    link._on_logits(None, (None, None, None, forward_batch), {}, output)
    tokens = link._draft.hot_token_id[output.next_token_logits.argmax(dim=1)]
    assert tokens.tolist() == [33, 0]  # the other tenant's draft knows nothing of it
    assert link.report()["tenants"]["tenant:one"]["spare_tokens"] == 1


@pytest.mark.parametrize("shape", [(2, 2, 4), (3, 4, 8), (4, 3, 9), (5, 4, 8), (2, 1, 3), (5, 1, 6)])
def test_states_belong_to_the_nodes_that_were_expanded(shape: tuple[int, int, int]) -> None:
    from sglang.srt.speculative.spec_utils import select_top_k_tokens

    num_steps, topk, num_draft_tokens = shape
    torch.manual_seed(0)
    batch = 5
    probs = torch.rand(batch, topk)
    scores, score_list, parents_list = None, [], []
    # The state that drafts the children of a node carries the path of tokens to it.
    paths: list[list[tuple[int, ...]]] = [[()] for _ in range(batch)]
    recorded = [[()] for _ in range(batch)]
    path_of_candidate: list[list[tuple[int, ...]]] = [[] for _ in range(batch)]
    token = iter(range(10**6))
    for step in range(num_steps):
        rows = 1 if step == 0 else topk
        tokens = torch.tensor([next(token) for _ in range(batch * rows * topk)]).view(batch * rows, topk)
        probs = torch.rand(batch * rows, topk)
        ids, _, scores, (step_scores, step_tokens, parents) = select_top_k_tokens(
            step, probs, tokens, torch.zeros(batch * rows, 1), scores, topk
        )
        score_list.append(step_scores.view(batch, -1))
        parents_list.append(parents)
        tokens = step_tokens.view(batch, -1).tolist()
        path_of_token = [{} for _ in range(batch)]
        for row in range(batch):
            for place, value in enumerate(tokens[row]):
                path = (*paths[row][place // topk], value)
                path_of_candidate[row].append(path)
                path_of_token[row][value] = path
        chosen = ids.view(batch, -1).tolist()
        paths = [[path_of_token[row][value] for value in chosen[row]] for row in range(batch)]
        if step < num_steps - 1:
            for row in range(batch):
                recorded[row].extend(paths[row])
    nodes = torch.cat(score_list, 1).topk(num_draft_tokens - 1, dim=1).indices.sort(dim=1).values
    parents = torch.cat(parents_list[:-1], dim=1)

    states = states_of_nodes(parents, nodes)

    assert states[:, 0].tolist() == [0] * batch
    for row in range(batch):
        for place, node in enumerate(nodes[row].tolist()):
            path, state = path_of_candidate[row][node], int(states[row, place + 1])
            assert (recorded[row][state] if state >= 0 else None) == (path if path in recorded[row] else None)


def test_one_step_has_the_roots_state_alone() -> None:
    states = states_of_nodes(torch.empty(2, 0, dtype=torch.int64), torch.tensor([[0, 1], [1, 2]]))
    assert states.tolist() == [[0, -1, -1]] * 2
