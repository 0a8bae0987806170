"""Verification with our own choice of target tokens, inside SGLang's verify.

SGLang's `eagle_sample` applies penalties, bias and grammar to the logits, picks a target token for every node, and walks
the tree. We keep all of it and replace the picking: greedy rows take the argmax, sampled rows draw with `draw_tokens`,
and near misses are substituted where a margin is set, see `adaptivespec.verify.near_miss`. For that, `eagle_sample` is
told that every batch verifies greedily, and the tree walker it then calls is ours. Three names in SGLang's modules are
bound once, in the process of this worker; they are in the contract table.
"""

import math
from typing import Any, NamedTuple

import torch
from sglang.srt.speculative import eagle_utils, eagle_worker_common
from torch import Tensor

from adaptivespec.config import AdaptiveConfig
from adaptivespec.sglang_plugin.request_rows import RequestRows
from adaptivespec.verify.penalties import apply_penalties
from adaptivespec.verify.rules import make_rule
from adaptivespec.verify.sampling import draw_tokens, filter_probs
from adaptivespec.verify.tree import nodes_of_rows, parents_from_links


class StepPromotions(NamedTuple):
    """What the margin rule did in a step, by the tokens that the step committed.

    Attributes:
        promoted: ``[B, depth]`` bool, drafted tokens accepted in place of the target's own.
        log_prob, log_top1: ``[B, depth]`` float32, what the target gave them, and gave its own choice.
    """

    promoted: Tensor
    log_prob: Tensor
    log_top1: Tensor

    def by_row(self) -> dict[int, list[tuple[int, float, float]]]:
        """Place among the step's tokens and both probabilities of what was promoted, by row. Host sync: reads all."""
        found: dict[int, list[tuple[int, float, float]]] = {}
        for row, place in self.promoted.nonzero().tolist():
            probs = math.exp(self.log_prob[row, place]), math.exp(self.log_top1[row, place])
            found.setdefault(row, []).append((place, *probs))
        return found


class VerifyStep:
    """Binds our token choice into SGLang's verify and into the sampler of the prefill's first token.

    Args:
        target_runner: the target's model runner.
        device: where the target runs.
        config: when near misses are accepted.

    Attributes:
        promotions: of the last step; None where none was allowed.
        accepted: ``[B, depth]`` rows that the last step accepted, root first, -1 for none; None before a step has been
            verified.
        logits: ``[B * N, V]`` that it verified with.
    """

    logits: Tensor

    def __init__(self, target_runner: Any, device: str, config: AdaptiveConfig) -> None:
        self.rows = RequestRows(config, target_runner.model_config.vocab_size, device)
        self.promotions: StepPromotions | None = None
        self.accepted: Tensor | None = None
        self._rule = make_rule(config)
        self._requests: list[Any] = []
        self._inputs: tuple[Any, Any, Any] | None = None  # verify input, batch, logits output of the step under way
        self._eagle_sample = eagle_worker_common.eagle_sample
        self._walk = eagle_utils.verify_tree_greedy_func
        eagle_worker_common.eagle_sample = self._sample
        eagle_utils.verify_tree_greedy_func = self._choose_and_walk
        eagle_utils._verify_uses_greedy = lambda **_: True
        sampler = target_runner.sampler
        self._sample_from_probs = sampler._sample_from_probs
        sampler._sample_from_probs = self._sample_first_token

    def begin(self, requests: list[Any]) -> None:
        """Say whose rows come next; the sampler of the prefill is not told."""
        self._requests = requests
        self.rows.update(requests)
        self.promotions = self.accepted = None

    def _sample(self, verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._inputs = (verify_input, batch, logits_output)
        info = batch.sampling_info
        sglangs = info.acc_additive_penalties, info.acc_scaling_penalties
        if self.rows.penalties is not None:
            self._penalise(verify_input, logits_output.next_token_logits)
            info.acc_additive_penalties = info.acc_scaling_penalties = None
        try:
            return self._eagle_sample(verify_input, batch, logits_output, *args, **kwargs)
        finally:
            self._inputs = None
            info.acc_additive_penalties, info.acc_scaling_penalties = sglangs

    def _penalise(self, verify_input: Any, logits: Tensor) -> None:
        assert self.rows.penalties is not None
        parent = parents_from_links(verify_input.retrieve_next_token, verify_input.retrieve_next_sibling)
        tokens = verify_input.draft_token.view_as(parent).long()
        apply_penalties(logits.view(*parent.shape, -1), parent, tokens, self.rows.penalties)

    def _choose_and_walk(self, *, target_predict: Tensor, **kwargs: Any) -> Any:
        assert self._inputs is not None, "the tree walker runs inside eagle_sample only"
        verify_input, batch, logits_output = self._inputs
        info, logits = batch.sampling_info, logits_output.next_token_logits
        kwargs["candidates"] = kwargs["candidates"].long()  # without speculation and overlap SGLang has int32 there
        rows = _SampledRows(info, verify_input.draft_token_num, logits) if not info.is_all_greedy else None
        if rows is not None:
            drawn = rows.draw(self.rows.seeds, verify_input.positions)
            target_predict = torch.where(rows.is_greedy, target_predict, drawn.view_as(target_predict))
        found = None
        if self.rows.limits is not None and self._rule is not None:
            scores = logits.float().log_softmax(dim=-1).view(*target_predict.shape, -1)
            if rows is not None:
                scores = torch.where(rows.is_greedy.unsqueeze(2), scores, rows.log_probs().view_as(scores))
            parent = parents_from_links(kwargs["retrieve_next_token"], kwargs["retrieve_next_sibling"])
            found = self._rule(parent, kwargs["candidates"], target_predict, scores, self.rows.limits)
            target_predict = found.target_tokens
        result = self._walk(target_predict=target_predict, **kwargs)
        self.accepted, self.logits = result[1], logits
        if found is not None:
            drafted = self.accepted[:, 1:]
            node = nodes_of_rows(drafted, target_predict.shape[1])
            self.promotions = StepPromotions(
                found.promoted.gather(1, node) & (drafted >= 0),
                found.score.gather(1, node),
                found.top_score.gather(1, node),
            )
        return result

    def _sample_first_token(self, probs: Tensor, info: Any, positions: Tensor, simple: bool) -> tuple[Tensor, Any]:
        if info.sampling_mask_batch_indices is not None or len(self._requests) != probs.shape[0]:
            return self._sample_from_probs(probs, info, positions, simple)
        tokens = draw_tokens(probs, self.rows.seeds, positions, *_filters(info))
        return tokens.to(torch.int32), None


def _filters(info: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Top-k, top-p and min-p, ``[B]`` each, of a batch; None where no request filters by it: sorting a vocabulary costs."""
    return (
        info.top_ks if info.need_top_k_sampling else None,
        info.top_ps if info.need_top_p_sampling else None,
        info.min_ps if info.need_min_p_sampling else None,
    )


class _SampledRows:
    """The target's distributions after temperature, of a batch in which some requests sample. ``R`` is ``B * N``.

    Attributes:
        is_greedy: ``[B, 1]`` bool.
    """

    def __init__(self, info: Any, width: int, logits: Tensor) -> None:
        def per_node(values: Tensor) -> Tensor:
            return values.repeat_interleave(width, dim=0)

        self.is_greedy = info.top_ks.view(-1, 1) <= 1
        self._width = width
        self._probs = torch.softmax(logits.float() / per_node(info.temperatures), dim=-1)
        self._filters = tuple(None if values is None else per_node(values) for values in _filters(info))

    def draw(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """``[R]`` int64, a token from each row. ``seeds`` ``[B]``, ``positions`` ``[R]``."""
        return draw_tokens(self._probs, seeds.repeat_interleave(self._width, dim=0), positions, *self._filters)

    def log_probs(self) -> Tensor:
        """``[R, V]`` log-probabilities after the filters, -inf for what they exclude; up to a constant of the row."""
        return filter_probs(self._probs, *self._filters).log()
