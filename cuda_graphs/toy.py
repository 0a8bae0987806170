"""A toy draft and verify pair, in the shapes of tree speculation: what the registry is checked with where no engine runs.

Rows are requests. `num_draft_tokens` counts the root. The draft grows a tree of `num_steps` levels from the root token,
`topk` wide, and keeps the `num_draft_tokens - 1` likeliest nodes; the verify scores every node after its ancestors and
walks down from the root. Both are graph-safe: no value is read on the host, every shape follows from the arguments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from cuda_graphs.backend import GraphBackend
from cuda_graphs.padded import PaddedGraphs, Tensors
from cuda_graphs.registry import StateRegistry


class ToyShape(Protocol):
    """The three numbers of a tree shape."""

    @property
    def num_steps(self) -> int: ...
    @property
    def topk(self) -> int: ...
    @property
    def num_draft_tokens(self) -> int: ...


@dataclass(frozen=True)
class ToyModel:
    """Weights: `embedding` [V, H], `mix` [H, H], `head` [H, V].

    They are float64, so that another kernel's rounding never turns a near tie over and results compare token for token.
    """

    embedding: torch.Tensor
    mix: torch.Tensor
    head: torch.Tensor

    @classmethod
    def random(cls, device: torch.device, vocab: int = 1024, hidden: int = 256, seed: int = 0) -> "ToyModel":
        """Gaussian weights, the same on every device for a seed."""
        generator = torch.Generator().manual_seed(seed)

        def gauss(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)

        return cls(gauss(vocab, hidden), gauss(hidden, hidden) / hidden**0.5, gauss(hidden, vocab) / hidden**0.5)

    def advance(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The hidden state [..., H] after `tokens` [...], from the one before."""
        return torch.tanh(hidden @ self.mix + self.embedding[tokens])


def draft(model: ToyModel, shape: ToyShape, inputs: Tensors) -> dict[str, torch.Tensor]:
    """Drafts a tree below each root token.

    Args:
        inputs: `hidden` [B, H] float64 and `token` [B] int64, the root.

    Returns:
        `tokens` [B, N] int64, root first, and `parents` [B, N] int64: position of each node's parent, 0 for the root
        itself. Parents stand before their children.

    Host sync: none. Graph-safe: yes.
    """
    batch, topk = inputs["token"].shape[0], shape.topk
    device = inputs["token"].device
    hidden = model.advance(inputs["hidden"], inputs["token"]).unsqueeze(1)  # [B, 1, H]: the frontier, at first the root
    frontier_score = torch.zeros(batch, 1, device=device, dtype=hidden.dtype)
    frontier_id = torch.full((batch, 1), -1, device=device)  # candidate number of each frontier node, -1 for the root
    tokens, scores, parents, num_candidates = [], [], [], 0
    for step in range(shape.num_steps):
        logprob, token = torch.log_softmax(hidden @ model.head, -1).topk(topk, -1)  # [B, F, K]
        # The small charge per level puts a parent strictly before its children even where a child is certain.
        score = (frontier_score.unsqueeze(-1) + logprob - 1e-3).flatten(1)  # [B, F*K]
        token = token.flatten(1)
        tokens.append(token)
        scores.append(score)
        parents.append(frontier_id.unsqueeze(-1).expand(-1, -1, topk).flatten(1))
        if step + 1 < shape.num_steps:
            frontier_score, best = score.topk(topk, -1)  # [B, K]
            from_node = (best // topk).unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
            hidden = model.advance(hidden.gather(1, from_node), token.gather(1, best))
            frontier_id = best + num_candidates
            num_candidates += token.shape[1]
    best = torch.cat(scores, 1).topk(shape.num_draft_tokens - 1, -1, sorted=True).indices  # [B, N-1] candidate numbers
    parent_id = torch.cat(parents, 1).gather(1, best)
    is_parent = parent_id.unsqueeze(-1) == best.unsqueeze(1)  # [B, N-1, N-1]
    parent = (is_parent.long().argmax(-1) + 1).masked_fill(parent_id < 0, 0)
    return {
        "tokens": torch.cat([inputs["token"].unsqueeze(1), torch.cat(tokens, 1).gather(1, best)], 1),
        "parents": torch.cat([torch.zeros_like(parent[:, :1]), parent], 1),
    }


def verify(model: ToyModel, inputs: Tensors) -> dict[str, torch.Tensor]:
    """Scores every node of a drafted tree and accepts the longest path whose tokens the target would have chosen.

    Args:
        inputs: `hidden` [B, H] float64 before the root, `tokens` and `parents` [B, N] int64 as from `draft`.

    Returns:
        `predicted` [B, N] int64, the target's token after each node; `accept_len` [B] int64, drafts on the longest
        accepted path plus the bonus token; `next_hidden` [B, H], the state at the last accepted node (only one:
        siblings differ in their tokens); `bonus` [B] int64, the target's token there.

    Host sync: none. Graph-safe: yes.
    """
    tokens, parents = inputs["tokens"], inputs["parents"]
    # The target knows the draft's weights but sees a root state of half the size: it agrees with the draft now and then.
    hidden = [model.advance(inputs["hidden"] * 0.5, tokens[:, 0])]
    accepted = [torch.zeros_like(tokens[:, 0])]  # depth of each accepted node, -1 for the others
    predicted = [(hidden[0] @ model.head).argmax(-1)]
    for node in range(1, tokens.shape[1]):
        parent = parents[:, node : node + 1]
        parent_hidden = torch.stack(hidden, 1).gather(1, parent.unsqueeze(-1).expand(-1, -1, hidden[0].shape[-1]))
        parent_depth = torch.stack(accepted, 1).gather(1, parent).squeeze(1)
        is_match = tokens[:, node] == torch.stack(predicted, 1).gather(1, parent).squeeze(1)
        hidden.append(model.advance(parent_hidden.squeeze(1), tokens[:, node]))
        accepted.append((parent_depth + 1).masked_fill(~is_match | (parent_depth < 0), -1))
        predicted.append((hidden[-1] @ model.head).argmax(-1))
    depth, last = torch.stack(accepted, 1).max(-1)
    last_hidden = last.view(-1, 1, 1).expand(-1, 1, hidden[0].shape[-1])
    return {
        "predicted": torch.stack(predicted, 1),
        "accept_len": depth + 1,
        "next_hidden": torch.stack(hidden, 1).gather(1, last_hidden).squeeze(1),
        "bonus": torch.stack(predicted, 1).gather(1, last.unsqueeze(1)).squeeze(1),
    }


class ToyPair:
    """A runtime state: the two graphs of one shape, the verify perhaps shared with another shape."""

    def __init__(self, draft_graphs: PaddedGraphs, verify_graphs: PaddedGraphs) -> None:
        self.draft_graphs = draft_graphs
        self.verify_graphs = verify_graphs

    def step(self, inputs: Tensors) -> dict[str, torch.Tensor]:
        """One decode step by replay: the results of `draft` and `verify`, valid until the pair or its parts run again.

        Host sync: none. Graph-safe: no, it replays graphs.
        """
        drafted = self.draft_graphs(inputs)
        return {**drafted, **self.verify_graphs({"hidden": inputs["hidden"], **drafted})}


def eager_step(model: ToyModel, shape: ToyShape, inputs: Tensors) -> dict[str, torch.Tensor]:
    """What `ToyPair.step` must return, without graphs. Host sync: none. Graph-safe: yes."""
    drafted = draft(model, shape, inputs)
    return {**drafted, **verify(model, {"hidden": inputs["hidden"], **drafted})}


def toy_registry(
    model: ToyModel,
    backend: GraphBackend,
    batch_sizes: Sequence[int],
    *,
    budget_bytes: int | None = None,
    estimate: Callable[[Any], int] | None = None,
    activate: Callable[[ToyPair], None] | None = None,
) -> StateRegistry[Any, ToyPair]:
    """A registry, still empty, whose states are `ToyPair`s keyed by `ToyShape`.

    The draft is a shape's own; the verify is shared by shapes that agree in num_draft_tokens and in topk == 1.
    """
    rows, hidden = max(batch_sizes), model.embedding.shape[1]
    device = model.embedding.device
    root = {
        "hidden": torch.zeros(rows, hidden, device=device, dtype=model.embedding.dtype),
        "token": torch.zeros(rows, dtype=torch.long, device=device),
    }

    def verify_graphs(num_draft_tokens: int) -> PaddedGraphs:
        nodes = torch.zeros(2, rows, num_draft_tokens, dtype=torch.long, device=device)
        inputs = {"hidden": root["hidden"], "tokens": nodes[0], "parents": nodes[1]}
        return PaddedGraphs(partial(verify, model), inputs, batch_sizes, backend)

    def build(shape: ToyShape) -> ToyPair:
        verify_key = (shape.num_draft_tokens, shape.topk == 1)
        shared = registry.parts.get("verify", verify_key, lambda: verify_graphs(shape.num_draft_tokens))
        return ToyPair(PaddedGraphs(partial(draft, model, shape), root, batch_sizes, backend), shared)

    registry: StateRegistry[Any, ToyPair] = StateRegistry(
        build, backend=backend, budget_bytes=budget_bytes, estimate=estimate, activate=activate
    )
    return registry
