"""What the requests of a batch ask of verification, as tensors that are made anew only when the batch changes."""

import random
from typing import Any

import torch
from torch import Tensor

from adaptivespec.config import AdaptiveConfig
from adaptivespec.request_options import RequestOptions
from adaptivespec.verify.near_miss import Limits, log_kappa


class RequestRows:
    """Seeds and margins of the batch that is decoded now.

    Args:
        config: what the server allows.
        device: where the tensors go.

    Attributes:
        kappa: the server's, which an operator may change; None is strict, 0 any ratio.
        seeds: ``[B]`` int64: what a request asked for, else one drawn for it when it is first seen.
        limits: of near misses, or None where no request of the batch may be promoted for.
    """

    def __init__(self, config: AdaptiveConfig, device: str) -> None:
        self.kappa = config.kappa_floor
        self.seeds = torch.empty(0, dtype=torch.int64, device=device)
        self.limits: Limits | None = None
        self._sampled = config.margin.sampled
        self._device = device
        self._requests: list[Any] = []
        self._built_with: float | None = None

    def update(self, requests: list[Any]) -> None:
        """Bring the tensors in line with ``requests``. Host sync: none (small pinned copies when the batch changes)."""
        is_same = len(requests) == len(self._requests) and all(map(_is, requests, self._requests))
        if is_same and self.kappa == self._built_with:
            return
        self._requests, self._built_with = list(requests), self.kappa
        self.seeds = self._to_device(torch.tensor([_seed_of(request) for request in requests], dtype=torch.int64))
        kappas = [self.kappa_of(request) for request in requests]
        if all(kappa is None for kappa in kappas):
            self.limits = None
            return
        stops = [_stops_of(request) for request in requests]
        width = max(map(len, stops), default=0)
        padded = [[*tokens, *[-1] * (width - len(tokens))] for tokens in stops]
        self.limits = Limits(
            self._to_device(torch.tensor([log_kappa(kappa) for kappa in kappas], dtype=torch.float32)),
            self._to_device(torch.tensor(padded, dtype=torch.int64).view(len(stops), width)),
        )

    def kappa_of(self, request: Any) -> float | None:
        """The kappa that a request is verified with now; None is strict."""
        is_greedy = request.sampling_params.top_k <= 1
        return options_of(request).effective_kappa(self.kappa) if is_greedy or self._sampled else None

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self._device == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


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


def _stops_of(request: Any) -> list[int]:
    """Every token that SGLang would end the request at, were ``ignore_eos`` not set."""
    stops = {*(request.sampling_params.stop_token_ids or ()), *(request.eos_token_ids or ())}
    if request.tokenizer is not None:
        stops.update([request.tokenizer.eos_token_id], request.tokenizer.additional_stop_token_ids or ())
    return sorted(token for token in stops if token is not None)
