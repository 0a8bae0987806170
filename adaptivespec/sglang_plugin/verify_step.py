"""Verification with our own choice of target tokens, inside SGLang's verify.

SGLang's `eagle_sample` applies penalties, bias and grammar to the logits, picks a target token for every node, and walks
the tree. We keep all of it and replace the picking: greedy rows take the argmax, sampled rows draw with `draw_tokens`.
For that, `eagle_sample` is told that every batch verifies greedily, and the tree walker it then calls is ours. Three
names in SGLang's modules are bound once, in the process of this worker; they are in the contract table.
"""

import random
from typing import Any

import torch
from sglang.srt.speculative import eagle_utils, eagle_worker_common
from torch import Tensor

from adaptivespec.verify.sampling import draw_tokens


class RequestSeeds:
    """The sampling seeds of a batch as a tensor: what a request asked for, else one drawn for it when it is first seen.

    The tensor is made anew only when the batch's requests change.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._requests: list[Any] = []
        self._tensor = torch.empty(0, dtype=torch.int64, device=device)

    def tensor(self, requests: list[Any]) -> Tensor:
        """``[B]`` int64 in the order of ``requests``. Host sync: none (a small pinned copy when the batch changes)."""
        if len(requests) != len(self._requests) or any(
            a is not b for a, b in zip(requests, self._requests, strict=True)
        ):
            seeds = torch.tensor([self._seed_of(request) for request in requests], dtype=torch.int64)
            if self._device == "cuda":
                seeds = seeds.pin_memory()
            self._tensor = seeds.to(self._device, non_blocking=True)
            self._requests = list(requests)
        return self._tensor

    @staticmethod
    def _seed_of(request: Any) -> int:
        params = request.sampling_params
        if params.sampling_seed is None:
            params.sampling_seed = random.getrandbits(63)
        return int(params.sampling_seed)


class VerifyStep:
    """Binds our token choice into SGLang's verify and into the sampler of the prefill's first token.

    Args:
        target_runner: the target's model runner.
        device: where the target runs.
    """

    def __init__(self, target_runner: Any, device: str) -> None:
        self._seeds = RequestSeeds(device)
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

    def _sample(self, verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._inputs = (verify_input, batch, logits_output)
        try:
            return self._eagle_sample(verify_input, batch, logits_output, *args, **kwargs)
        finally:
            self._inputs = None

    def _choose_and_walk(self, *, target_predict: Tensor, **kwargs: Any) -> Any:
        assert self._inputs is not None, "the tree walker runs inside eagle_sample only"
        verify_input, batch, logits_output = self._inputs
        info = batch.sampling_info
        if not info.is_all_greedy:
            drawn = self._draw(verify_input, batch, logits_output.next_token_logits)
            is_greedy = info.top_ks.view(-1, 1) <= 1
            target_predict = torch.where(is_greedy, target_predict, drawn.view_as(target_predict))
        return self._walk(target_predict=target_predict, **kwargs)

    def _draw(self, verify_input: Any, batch: Any, logits: Tensor) -> Tensor:
        width = verify_input.draft_token_num
        info = batch.sampling_info

        def per_node(values: Tensor) -> Tensor:
            return values.repeat_interleave(width, dim=0)

        probs = torch.softmax(logits.float() / per_node(info.temperatures), dim=-1)
        return draw_tokens(
            probs,
            per_node(self._seeds.tensor(batch.reqs)),
            verify_input.positions,
            per_node(info.top_ks),
            per_node(info.top_ps) if info.need_top_p_sampling else None,
            per_node(info.min_ps) if info.need_min_p_sampling else None,
        )

    def _sample_first_token(self, probs: Tensor, info: Any, positions: Tensor, simple: bool) -> tuple[Tensor, Any]:
        if info.sampling_mask_batch_indices is not None or len(self._requests) != probs.shape[0]:
            return self._sample_from_probs(probs, info, positions, simple)
        tokens = draw_tokens(
            probs,
            self._seeds.tensor(self._requests),
            positions,
            info.top_ks,
            info.top_ps if info.need_top_p_sampling else None,
            info.min_ps if info.need_min_p_sampling else None,
        )
        return tokens.to(torch.int32), None
