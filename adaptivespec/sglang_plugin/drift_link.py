"""Joins the DRIFT memory to SGLang: correct the draft's logits, record its states, teach what verification reveals.

One forward hook on the draft's logits processor sees every draft logit there is: of prefill, of the draft steps and of
draft-extend, eagerly and while a graph is captured. What it reads lies in buffers that stay.
"""

import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adaptivespec.config import DriftConfig
from adaptivespec.drift_benefit import Benefit
from adaptivespec.sglang_plugin.drift_check import fingerprint
from adaptivespec.sglang_plugin.request_rows import has_penalties, host_tensor, options_of
from adaptivespec.shapes import TreeShape
from adaptivespec.verify.tree import nodes_of_rows
from drift.memory import NO_BANK, DriftMemory
from drift.storage import load_bank, save_bank
from drift.tenants import Tenants

logger = logging.getLogger(__name__)
_PUBLISH_EVERY = 32  # steps; far more than can be under way at once, so that a copy to the host has ended by then


class DriftLink:
    """The memory of one worker.

    Args:
        draft_worker: whose logits are corrected; its model is loaded, no graph is captured yet.
        shapes: every shape that may run.
        max_requests: largest batch.
        config: what the memory may do.
        draft_folder: a bank file belongs to these weights.

    Attributes:
        memory, tenants: see `drift`.
        is_frozen: nothing is learnt while this is set.
    """

    def __init__(
        self,
        draft_worker: Any,
        shapes: tuple[TreeShape, ...],
        max_requests: int,
        config: DriftConfig,
        draft_folder: str,
    ) -> None:
        self._draft = draft_worker
        self._model = draft_worker.draft_runner.model
        self._config = config
        self._fingerprint = fingerprint(Path(draft_folder)) if config.file else ""
        self.is_frozen = not config.learn
        self.tenants = Tenants(config.num_banks)
        self._benefits: dict[str, Benefit] = {}
        self._is_of_start_weights = True
        hidden_size = self._model.config.hidden_size
        device = draft_worker.device
        self.memory = DriftMemory(
            config.params,
            hidden_size,
            self._model.logits_processor.vocab_size,
            device,
            draft_worker.hot_token_id,
            self._model.config.vocab_size,  # the target's too, which the start checks
        )
        if self.memory.spare is not None:  # SGLang turns columns of the draft's logits into tokens by this table
            draft_worker.hot_token_id = self.memory.spare.vocabulary
        # Hidden states of the tree: the root's, then those of each draft step, `topk` a step; and where each node's is.
        num_states = max(1 + max(shape.num_steps - 1, 0) * shape.topk for shape in shapes)
        num_nodes = max(shape.num_draft_tokens for shape in shapes)
        dtype = draft_worker.draft_runner.dtype
        self._states = torch.zeros(max_requests, num_states, hidden_size, dtype=dtype, device=device)
        self._state_of_node = torch.zeros(max_requests, num_nodes, dtype=torch.int64, device=device)
        # Of each request's bank and of the shared one: where it is asked, where it is taught.
        self._correcting, self._teaching, self._asking_on, self._sharing = (
            torch.full((max_requests,), NO_BANK, device=device) for _ in range(4)
        )
        self._shared_bank = config.num_banks if config.shared else None
        self._written: dict[str, list[int]] = {}
        self._banks: list[int] = []
        self._requests: list[RequestDrift] = []
        self._next_state = 0
        self._steps = 0
        self._host_counters = host_tensor(self.memory.counters.tolist(), torch.int64, device)
        self._published = torch.zeros_like(self._host_counters)
        if config.file is not None and Path(config.file).exists():
            load_bank(Path(config.file), self.memory, self.tenants, self._fingerprint)
        self._model.logits_processor.register_forward_hook(self._on_logits, with_kwargs=True)

    # -- around a step, in this order

    def begin(self, requests: list[Any]) -> None:
        """Say whose rows come next. Host sync: none."""
        self._requests = [drift_state(request) for request in requests]
        tenants = [request.tenant for request in self._requests if request.tenant is not None]
        # A frozen memory cannot take in newcomers, and must not lose what it knows to them.
        banks, emptied = (self.tenants.find(tenants), []) if self.is_frozen else self.tenants.assign(tenants)
        if emptied:
            for bank in emptied:
                self.memory.reset(bank)
            self._benefits = {name: self._benefits[name] for name in self.tenants.banks if name in self._benefits}
        bank_of = dict(zip(tenants, banks, strict=True))
        self._banks = [NO_BANK if each.tenant is None else bank_of[each.tenant] for each in self._requests]
        for each, benefit in self._with_a_bank():
            if each.is_corrected is None:
                each.step = benefit.first_step()
                each.is_corrected = benefit.corrects(each.step)
        self._write_correcting()
        teaches = [each.teaches for each in self._requests]
        self._write("_teaching", self._banks_where(teaches))
        if self._shared_bank is not None:
            self._write("_sharing", self._shared_where(teaches))

    def draft(self, draft_forward: Any, forward_batch: Any) -> Any:
        """Run the draft steps, and record the state that each node's children are drafted from. Graph-safe: yes."""
        batch_size = forward_batch.batch_size
        self._states[:batch_size, 0] = forward_batch.spec_info.hidden_states
        self._next_state = 1
        result = draft_forward(forward_batch)
        parents, nodes = result[:2]
        states = states_of_nodes(parents, nodes)
        self._state_of_node[:batch_size, : states.shape[1]] = states
        return result

    def learn(self, accepted: Tensor, logits: Tensor) -> None:
        """Teach the memory the target's logits along the accepted path. Host sync: none on CUDA.

        Args:
            accepted: ``[B, depth]`` rows of the path, root first; -1 for none.
            logits: ``[B * num_draft_tokens, V]`` the target's.
        """
        num_steps = self._draft.speculative_num_steps
        teaching = (*self._written["_teaching"], *self._written.get("_sharing", ()))
        if self.is_frozen or num_steps == 0 or all(bank == NO_BANK for bank in teaching):
            return
        batch_size = accepted.shape[0]
        accepted = accepted[:, :num_steps].long()
        node = nodes_of_rows(accepted, self._draft.speculative_num_draft_tokens)
        state = self._state_of_node[:batch_size].gather(1, node)
        teaches_here = (accepted >= 0) & (state >= 0)
        pupils = [self._teaching] if self._shared_bank is None else [self._teaching, self._sharing]
        banks = torch.stack([each[:batch_size].unsqueeze(1).where(teaches_here, NO_BANK).flatten() for each in pupils])
        hidden = self._states[:batch_size].gather(
            1, state.clamp(min=0).unsqueeze(2).expand(-1, -1, self._states.shape[2])
        )
        hidden, rows = hidden.flatten(0, 1), accepted.clamp(min=0).flatten()
        if not banks.is_cuda:  # reading it costs nothing there, and most rows teach nothing
            taught = (banks != NO_BANK).any(dim=0).nonzero().flatten()
            banks, hidden, rows = banks[:, taught], hidden[taught], rows[taught]
            if not len(taught):
                return
        copies = (len(pupils), 1)
        if self.memory.spare is not None:
            self.memory.take_in(logits[rows].argmax(dim=1).repeat(len(pupils)), banks.flatten())
        vocabulary = self._draft.hot_token_id
        target = logits[rows] if vocabulary is None else logits[rows.unsqueeze(1), vocabulary]
        draft = self._uncorrected(hidden).repeat(copies)
        self.memory.learn(hidden.repeat(copies), draft, target.repeat(copies), banks.flatten())

    def begin_extend(self) -> None:
        """Decide which requests' next trees are corrected; draft-extend makes their roots. Host sync: none."""
        for request, benefit in self._with_a_bank():
            request.step += 1
            request.is_corrected = benefit.corrects(request.step)
        self._write_correcting()

    # -- what the host hears of a step

    def record(self, request: Any, was_corrected: bool, accepted: int) -> None:
        """Add a step's accepted drafts to what is known of its tenant's memory."""
        name = drift_state(request).tenant
        assert name is not None
        benefit = self._benefit(name)
        if benefit.record(was_corrected, accepted):
            logger.warning(
                "ADAPTIVE: the memory of tenant %r is switched %s: acceptance is surely %s with it",
                name,
                "on" if benefit.is_on else "off",
                "higher" if benefit.is_on else "lower",
            )

    def new_events(self) -> list[tuple[int, str, int]]:
        """Bank, counter and how much it grew, now and then; the counters are read from a copy made a while ago.

        To be called once a step. Host sync: none.
        """
        self._steps += 1
        if self._steps % _PUBLISH_EVERY:
            return []
        grown = self._host_counters - self._published
        self._published.copy_(self._host_counters)
        self._host_counters.copy_(self.memory.counters, non_blocking=True)
        return [
            (bank, DriftMemory.COUNTERS[column], int(grown[bank, column])) for bank, column in grown.nonzero().tolist()
        ]

    def corrected_rows(self) -> list[bool | None]:
        """Which requests' trees of the step under way are corrected; None for those that have no bank."""
        return [
            None if bank == NO_BANK else bool(request.is_corrected)
            for request, bank in zip(self._requests, self._banks, strict=True)
        ]

    def reset(self) -> None:
        """Forget everything, once the steps under way are done. Host sync: yes."""
        self._wait()
        self.memory.reset()
        self._benefits.clear()

    def on_new_weights(self) -> None:
        """Forget everything: it is about the weights that went. A bank file belongs to those of the start."""
        self._is_of_start_weights = False
        self.reset()

    def save(self) -> None:
        """Write the bank file, once the steps under way are done. Host sync: yes.

        Raises:
            OSError: it cannot be written, or the weights are no more those of the draft's folder.
        """
        assert self._config.file is not None
        if not self._is_of_start_weights:
            raise OSError(
                "the weights were updated since the start, and a bank file belongs to those in the draft's folder"
            )
        self._wait()
        save_bank(Path(self._config.file), self.memory, self.tenants, self._fingerprint)

    def report(self) -> dict[str, Any]:
        """What `/server_info` shows. Host sync: yes."""
        counters, occupancy = self.memory.bank_counts(), self.memory.occupancy()
        gains = self.memory.gain_applied.tolist()
        spare = None if self.memory.spare is None else (self.memory.spare.last_used > 0).sum(dim=1).tolist()

        def bank_report(bank: int) -> dict[str, Any]:
            counts = dict(zip(DriftMemory.COUNTERS, counters[bank], strict=True))
            shown = counts | {"slots": occupancy[bank], "mean_gain": gains[bank] / max(1, counts["hits"])}
            return shown | ({} if spare is None else {"spare_tokens": spare[bank]})

        return {
            "bytes": self.memory.num_bytes + self._states.nbytes,
            "is_frozen": self.is_frozen,
            "tenants": {
                name: bank_report(bank) | self._benefit(name).to_dict() for name, bank in self.tenants.banks.items()
            },
            "shared": None if self._shared_bank is None else bank_report(self._shared_bank),
        }

    # -- inside

    def _wait(self) -> None:
        """Until no step changes the memory, which it does on a stream of its own."""
        if self.memory.keys.is_cuda:
            torch.cuda.synchronize()

    def _with_a_bank(self) -> list[tuple["RequestDrift", Benefit]]:
        """The requests that have one now, and what is known of their tenant's."""
        return [
            (each, self._benefit(each.tenant))
            for each, bank in zip(self._requests, self._banks, strict=True)
            if each.tenant is not None and bank != NO_BANK
        ]

    def _benefit(self, name: str) -> Benefit:
        if name not in self._benefits:
            self._benefits[name] = Benefit(self._config.check_every)
        return self._benefits[name]

    def _write_correcting(self) -> None:
        is_corrected = [bool(each.is_corrected) for each in self._requests]
        self._write("_correcting", self._banks_where(is_corrected))
        if self._shared_bank is not None:
            self._write("_asking_on", self._shared_where(is_corrected))

    def _banks_where(self, conditions: list[bool]) -> list[int]:
        return [bank if holds else NO_BANK for bank, holds in zip(self._banks, conditions, strict=True)]

    def _shared_where(self, conditions: list[bool]) -> list[int]:
        assert self._shared_bank is not None
        wanted = [holds and each.shares for each, holds in zip(self._requests, conditions, strict=True)]
        return [self._shared_bank if is_wanted else NO_BANK for is_wanted in wanted]

    def _write(self, name: str, values: list[int]) -> None:
        before = self._written.get(name, [])
        # Rows that are left over are emptied: a graph for more rows than there are requests reads them too.
        values = values + [NO_BANK] * (len(before) - len(values))
        if before == values:
            return
        self._written[name] = values
        buffer = getattr(self, name)
        buffer[: len(values)].copy_(host_tensor(values, buffer.dtype, buffer.device), non_blocking=True)

    def _uncorrected(self, hidden: Tensor) -> Tensor:
        if not getattr(self._model.model, "norm_output", False):
            hidden = self._model.model.norm(hidden)
        logits: Tensor = self._model.logits_processor._compute_lm_head(hidden, self._model.lm_head)
        return logits[:, : self.memory.vocab_size]  # SGLang pads heads to a multiple of 64

    def _on_logits(self, module: Any, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        logits, hidden = output.next_token_logits, output.hidden_states
        if logits is None or hidden is None or not logits.shape[0]:
            return
        logits = output.next_token_logits = self.memory.widen(logits)
        forward_batch = args[3]
        batch_size = forward_batch.batch_size
        banks = self._correcting[:batch_size]
        fallback = None if self._shared_bank is None else self._asking_on[:batch_size]
        mode = forward_batch.forward_mode
        if mode.is_draft_extend_v2() and logits.shape[0] != batch_size:
            # Without a graph there is a row for every node, of which one a request goes on.
            width = logits.shape[0] // batch_size
            rows = torch.arange(batch_size, device=logits.device) * width
            rows = rows + forward_batch.spec_info.num_accept_tokens.long() - 1
            chosen = logits[rows]
            self.memory.apply(hidden[rows], chosen, banks, fallback)
            logits[rows] = chosen
            return
        if mode.is_decode():
            width = logits.shape[0] // batch_size
            states = hidden.view(batch_size, width, -1)
            self._states[:batch_size, self._next_state : self._next_state + width] = states
            self._next_state += width
            banks = banks.repeat_interleave(width)
            fallback = None if fallback is None else fallback.repeat_interleave(width)
        self.memory.apply(hidden, logits, banks, fallback)


@dataclass
class RequestDrift:
    """What the memory knows of a request.

    Attributes:
        tenant: whose memory it uses; None where it does without.
        shares: whether the shared bank is for it too.
        teaches: whether the target's logits say what it would say of itself: nothing bends them for this request.
        step: counts its decode steps, from a place that its tenant's `Benefit` draws.
        is_corrected: whether the tree under way is, where there is a bank; None before that is decided.
    """

    tenant: str | None
    shares: bool
    teaches: bool
    step: int = 0
    is_corrected: bool | None = None

    @classmethod
    def of(cls, request: Any) -> "RequestDrift":
        """Of a request that is scheduled for the first time. What isolates SGLang's prefix cache says the tenant first."""
        options = options_of(request)
        # With their kind: who names a tenant must not reach what a salt isolates. And salts are secrets, names are shown.
        tenant = f"tenant:{options.tenant or ''}"
        keys = request.extra_key or None, request.cache_salt or None
        if any(keys):
            tenant = f"key:{hashlib.sha256(repr(keys).encode()).hexdigest()[:16]}"
        is_bent = request.grammar is not None or request.sampling_params.logit_bias or has_penalties(request)
        is_wanted = options.drift and options.enabled
        return cls(tenant if is_wanted else None, options.share and is_wanted, not is_bent)


def drift_state(request: Any) -> RequestDrift:
    """The request's state, made when it is first asked for."""
    if not hasattr(request, "adaptive_drift"):
        request.adaptive_drift = RequestDrift.of(request)
    state: RequestDrift = request.adaptive_drift
    return state


def states_of_nodes(parents: Tensor, nodes: Tensor) -> Tensor:
    """Where the state lies that each node's children were drafted from: 0 for the root, -1 for a node without.

    SGLang gives each candidate a number. A node was expanded where its number stands in the list of parents, and the
    place there is that of its state. Host sync: none. Graph-safe: yes.

    Args:
        parents: ``[B, 1 + topk * (num_steps - 1)]`` candidate numbers of the expanded nodes, the root's place first; empty
            for one step.
        nodes: ``[B, num_draft_tokens - 1]`` candidate number of each node below the root.

    Returns:
        ``[B, num_draft_tokens]`` int64.
    """
    root = torch.zeros_like(nodes[:, :1], dtype=torch.int64)
    if parents.shape[1] < 2:
        return torch.cat((root, torch.full_like(nodes, -1, dtype=torch.int64)), dim=1)
    is_state = nodes.unsqueeze(2) == parents[:, 1:].unsqueeze(1)
    place = is_state.to(torch.int8).argmax(dim=2) + 1
    return torch.cat((root, place.where(is_state.any(dim=2), -1)), dim=1)
