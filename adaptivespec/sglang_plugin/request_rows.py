"""What the requests of a batch ask of verification, as tensors that follow the batch."""

import random
from typing import Any

import torch
from torch import Tensor

from adaptivespec.config import AdaptiveConfig
from adaptivespec.request_options import RequestOptions
from adaptivespec.verify.near_miss import Limits, log_kappa
from adaptivespec.verify.penalties import Penalties


class RequestRows:
    """Seeds, margins and penalties of the batch that is decoded now.

    Args:
        config: what the server allows.
        vocab_size: of the target's logits.
        device: where the tensors go.

    Attributes:
        kappa: the server's, which an operator may change; None is strict, 0 any ratio.
        kappas: by row, what requests are verified with; None for strict ones. Made anew where it changes.
        seeds: ``[B]`` int64: what a request asked for, else one drawn for it when it is first seen.
        limits: of near misses, or None where no request of the batch may be promoted for.
        penalties: exact at the root of the next tree, or None where no request has any.
    """

    def __init__(self, config: AdaptiveConfig, vocab_size: int, device: str) -> None:
        self.kappa = config.kappa_floor
        self.kappas: list[float | None] = []
        self.seeds = torch.empty(0, dtype=torch.int64, device=device)
        self.limits: Limits | None = None
        self.penalties: Penalties | None = None
        self._num_counted: list[int] = []  # of each request's output
        self._vocab_size = vocab_size
        self._sampled = config.margin.sampled
        self._device = device
        self._requests: list[Any] = []
        self._built_with: float | None = None

    def update(self, requests: list[Any]) -> None:
        """Bring the tensors in line with ``requests``. Host sync: none (small pinned copies when something changed).

        Penalties are exact where the requests' output is complete: the scheduler waits for that, see `worker`.
        """
        is_same = len(requests) == len(self._requests) and all(map(_is, requests, self._requests))
        if is_same and self.kappa == self._built_with:
            self._count_output()
            return
        self._requests, self._built_with = list(requests), self.kappa
        self.seeds = self._to_device([_seed_of(request) for request in requests], torch.int64)
        self.kappas = [self.kappa_of(request) for request in requests]
        is_penalised = any(map(has_penalties, requests))
        self.limits = self.penalties = None
        if not is_penalised and all(kappa is None for kappa in self.kappas):
            return
        stops = self._padded([self._stops_of(request) for request in requests])
        if any(kappa is not None for kappa in self.kappas):
            self.limits = Limits(self._to_device(list(map(log_kappa, self.kappas)), torch.float32), stops)
        if is_penalised:
            self.penalties = self._fresh_penalties(stops)
            self._num_counted = [0] * len(requests)
            self._count_output()

    def _fresh_penalties(self, stops: Tensor) -> Penalties:
        params = [request.sampling_params for request in self._requests]
        shape = (len(params), self._vocab_size)
        return Penalties(
            torch.zeros(shape, dtype=torch.float32, device=self._device),
            torch.zeros(len(params), dtype=torch.int64, device=self._device),
            self._to_device([each.frequency_penalty for each in params], torch.float32),
            self._to_device([each.presence_penalty for each in params], torch.float32),
            self._to_device([each.repetition_penalty for each in params], torch.float32),
            self._to_device([each.min_new_tokens for each in params], torch.int64),
            stops,
        )

    def _count_output(self) -> None:
        """Add the tokens that have been committed since the last time to the penalties' counts."""
        if self.penalties is None:
            return
        news = [request.output_ids[n:] for request, n in zip(self._requests, self._num_counted, strict=True)]
        lens = [len(tokens) for tokens in news]
        if not any(lens):
            return
        self._num_counted = [n + new for n, new in zip(self._num_counted, lens, strict=True)]
        rows = self._to_device([row for row, new in enumerate(lens) for _ in range(new)], torch.int64)
        tokens = self._to_device([token for new in news for token in new], torch.int64)
        ones = torch.ones_like(tokens, dtype=torch.float32)
        self.penalties.counts.index_put_((rows, tokens), ones, accumulate=True)
        self.penalties.lengths.add_(self._to_device(lens, torch.int64))

    def kappa_of(self, request: Any) -> float | None:
        """The kappa that a request is verified with now; None is strict."""
        is_greedy = request.sampling_params.top_k <= 1
        return options_of(request).effective_kappa(self.kappa) if is_greedy or self._sampled else None

    def _padded(self, rows: list[list[int]]) -> Tensor:
        width = max(map(len, rows))
        return self._to_device([[*row, *[-1] * (width - len(row))] for row in rows], torch.int64).view(len(rows), width)

    def _stops_of(self, request: Any) -> list[int]:
        """Every token that SGLang would end the request at, were ``ignore_eos`` not set; it takes any number for one."""
        stops = {*(request.sampling_params.stop_token_ids or ()), *(request.eos_token_ids or ())}
        if request.tokenizer is not None:
            stops.update([request.tokenizer.eos_token_id], request.tokenizer.additional_stop_token_ids or ())
        return sorted(token for token in stops if token is not None and 0 <= token < self._vocab_size)

    def _to_device(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        return host_tensor(values, dtype, self._device).to(self._device, non_blocking=True)


def host_tensor(values: list[Any], dtype: torch.dtype, device: Any) -> Tensor:
    """On the host, ready for a copy to ``device`` that nothing waits for."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory() if torch.device(device).type == "cuda" else tensor


def has_penalties(request: Any) -> bool:
    """Whether the output so far changes what a request may say next."""
    params = request.sampling_params
    return bool(
        params.frequency_penalty or params.presence_penalty or params.min_new_tokens or params.repetition_penalty != 1.0
    )


def options_of(request: Any) -> RequestOptions:
    """A request's options, parsed once; the tokenizer's process has checked them."""
    if not hasattr(request, "adaptive_options"):
        request.adaptive_options = RequestOptions.of(request.sampling_params)
    options: RequestOptions = request.adaptive_options
    return options


def _is(a: Any, b: Any) -> bool:
    return a is b


def _seed_of(request: Any) -> int:
    params = request.sampling_params
    if params.sampling_seed is None:
        params.sampling_seed = random.getrandbits(63)
    return int(params.sampling_seed)
