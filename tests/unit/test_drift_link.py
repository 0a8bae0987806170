"""Where each tree node's hidden state is found, against SGLang's own tree building."""

import pytest
import torch

from adaptivespec.sglang_plugin.drift_link import states_of_nodes

pytest.importorskip("sglang")


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
