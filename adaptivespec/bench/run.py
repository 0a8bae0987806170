"""Measuring: the servers of a block are up together, and their decoders take turns at the same prompts.

All servers sleep while idle, so that the one that is measured has the machine.
"""

import shlex
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from adaptivespec.bench.configurations import PLAIN, UPSTREAM_ADAPTIVE, ServerPlan
from adaptivespec.bench.plan import Plan, write_config
from adaptivespec.bench.rows import Cell, Row
from adaptivespec.bench.store import Store
from adaptivespec.errors import AdaptiveSpecError
from adaptivespec.launch import Server, named_failure
from adaptivespec.progress import Progress
from adaptivespec.provenance import has_gpu
from adaptivespec.request_options import KEY
from adaptivespec.sglang_plugin.admin import DRIFT_ACTIONS, DRIFT_KEY

WARM_UP_TOKENS = 8
START_SECONDS = 900
EVENT_SECONDS = 300
_Found = TypeVar("_Found")


class MeasureError(AdaptiveSpecError, RuntimeError):
    """A server that runs, but not what was asked for."""


@dataclass(frozen=True)
class _Running:
    """A server that is up: what its steps have as their shape, and what each of its decoders has set.

    Args:
        settings: by the decoder's name.
    """

    server: Server
    fixed_shape: str | None
    settings: dict[str, dict[str, float]]

    def become(self, name: str) -> None:
        """Serve as this decoder from now on."""
        for key, value in self.settings[name].items():
            set_state(self.server, key, value)


def measure(plan: Plan, store: Store, progress: Progress, make_server: Callable[..., Server] = Server) -> None:
    """Measure every cell that the store does not have, keeping each as soon as it is done.

    Raises:
        ServerFailedError: a server did not start, died, or did not answer.
        MeasureError: a server does not run what its name says.
        StoreError: what was measured cannot be written.
    """
    with ExitStack() as run:
        plain: Server | None = None  # stays up from block to block
        for number, (plain_plan, *others) in enumerate(plan.blocks()):
            turns = list(plan.turns(number))
            missing = [turn for turn in turns if not store.has(turn)]
            if any(item.remembers for server in others for item in server.configurations):
                # A pass begins with an empty memory: one that was stopped is measured again from its start.
                begun = set(map(_pass_of, missing))
                missing = [turn for turn in turns if _pass_of(turn) in begun]
            for _ in range(sum(map(len, turns)) - sum(map(len, missing))):
                progress.advance()
            if not missing:
                continue
            with ExitStack() as block:
                progress.doing(f"starting {', '.join(each.slug for each in (plain_plan, *others))}")
                plain = plain or _start(plan, store, progress, make_server, plain_plan, run)
                servers = [plain, *(_start(plan, store, progress, make_server, each, block) for each in others)]
                running: dict[str, _Running] = {}
                for server, each in zip(servers, (plain_plan, *others), strict=True):
                    up = _ready(server, each, store)
                    running.update({item.name: up for item in each.configurations})
                _measure_block(plan, store, progress, running, missing)


def _measure_block(
    plan: Plan, store: Store, progress: Progress, running: dict[str, _Running], turns: list[list[Cell]]
) -> None:
    by_name = {item.name: item for item in plan.configurations}
    for name, up in running.items():
        up.become(name)
        for size in plan.batch_sizes:
            first = Cell(0, next(iter(plan.tasks)), size, 0, 0, name)
            answers(up.server, first, plan.prompts(first), WARM_UP_TOKENS, up.fixed_shape, {})
        store.servers[name]["resident_mib"] = round(up.server.resident_bytes() / 2**20)
    store.save()
    forgetful = {name for name in running if by_name[name].remembers}
    passes = None
    for turn in turns:
        if passes != _pass_of(turn):
            # Each pass over the prompts begins with an empty memory, or later ones would meet what they were taught.
            passes = _pass_of(turn)
            for name in forgetful:
                set_state(running[name].server, DRIFT_KEY, DRIFT_ACTIONS.index("reset"))
        for cell in turn:
            up = running[cell.configuration]
            progress.doing(f"{cell.task}, batch {cell.batch_size}, round {cell.round + 1}: {cell.configuration}")
            up.become(cell.configuration)
            params: dict[str, Any] = {"details": True} if by_name[cell.configuration].is_ours else {}
            if cell.configuration in forgetful:
                # A memory learns each task by itself, or what it knew of one would depend on which others there are.
                params["tenant"] = cell.task
            elif by_name[cell.configuration].does_without:
                params["drift"] = False
            prompts = plan.prompts(cell)
            store.append(answers(up.server, cell, prompts, plan.max_new_tokens, up.fixed_shape, params))
            progress.advance()
        if plan.asks_gaps:
            plain = store.cells[next(cell for cell in turn if cell.configuration == PLAIN)]
            for cell in turn:
                (row,) = store.cells[cell]
                if by_name[cell.configuration].is_strict and row.output_ids != plain[0].output_ids:
                    prefix = plan.prompts(cell)[0] + row.output_ids[: row.shared_len(plain[0])]
                    store.append([replace(row, split_gap=top_two_gap(running[PLAIN].server, prefix))])


def _pass_of(turn: list[Cell]) -> tuple[int, int]:
    """Of which pass over all prompts a turn is part."""
    return turn[0].round, turn[0].batch_size


def _start(
    plan: Plan,
    store: Store,
    progress: Progress,
    make_server: Callable[..., Server],
    server_plan: ServerPlan,
    stack: ExitStack,
) -> Server:
    """Start a server, to be stopped with the stack. Most of a start is one busy thread, so that several go on at once but on a
    GPU, where each must see how much memory those before it have left."""
    args = [*plan.common_args, *server_plan.args, *write_config(server_plan, store.out / "configs")]
    log = store.out / "logs" / f"{server_plan.slug}.log"
    server = make_server(plan.target, args, log=log, timeout=START_SECONDS)
    stack.callback(server.stop)
    progress.say(f"{', '.join(item.name for item in server_plan.configurations)}: {shlex.join(server.command)}\n")
    server.start()
    if has_gpu():
        server.wait_until_ready()
    return server


def _ready(server: Server, server_plan: ServerPlan, store: Store) -> _Running:
    """Wait until a server answers, and note what it says of itself."""
    server.wait_until_ready()
    with named_failure(server):
        info = server.get("/server_info")
    if UPSTREAM_ADAPTIVE in server_plan.args and not info["speculative_adaptive"]:
        raise MeasureError(
            where=f"{server_plan.slug} server",
            found="speculative_adaptive off: SGLang fell back to a static shape",
            expected="SGLang's own adaptive speculation",
            fix=f"read {server.log} for the reason",
        )
    places = places_of(info)
    settings = {item.name: server_plan.settings(item, places) for item in server_plan.configurations}
    for item in server_plan.configurations:
        store.servers[item.name] = {
            "command": shlex.join(server.command),
            "adaptive": server_plan.adaptive,
            "settings": settings[item.name] | ({"drift": False} if item.does_without else {}),
            "shapes": _shapes(info),
            "memory_gb": info["internal_states"][0].get("memory_usage"),
        }
    is_fixed = not places and not info.get("speculative_adaptive") and info.get("speculative_num_steps")
    return _Running(server, _shapes(info) if is_fixed else None, settings)


def places_of(info: dict[str, Any]) -> dict[str, int]:
    """By shape, its place for `SHAPE_KEY`, from a server's ``/server_info``; empty where it is not ADAPTIVE."""
    adaptive = info["internal_states"][0].get("adaptive")
    return {shape: place for place, shape in enumerate(adaptive["shapes"])} if adaptive else {}


def _shapes(info: dict[str, Any]) -> str:
    """The tree shapes that a server runs with, from its ``/server_info``; "" without speculation."""
    adaptive = info["internal_states"][0].get("adaptive")
    if adaptive:
        return " ".join(adaptive["shapes"])
    if not info.get("speculative_num_steps"):
        return ""
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    shape = "({},{},{})".format(*(info[name] for name in names))
    return f"chains, {shape} at first" if info.get("speculative_adaptive") else shape


def set_state(server: Server, key: str, value: float) -> None:
    """Change one of the settings that an operator may change.

    Raises:
        MeasureError: the server does not accept it.
    """
    with named_failure(server):
        answer = server.post("/set_internal_state", {"server_args": {key: value}})
    if answer != [True]:
        raise MeasureError(
            where=f"{key} {value}", found=f"{answer!r}", expected="[true]", fix=f"read {server.log} for the reason"
        )


def answers(
    server: Server,
    cell: Cell,
    prompts: list[list[int]],
    max_new_tokens: int,
    fixed_shape: str | None,
    adaptive_params: dict[str, Any],
) -> list[Row]:
    """Send the prompts at the same time and return a row for each, in their order."""
    begin = time.perf_counter()
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_new_tokens}
    if adaptive_params:
        sampling["custom_params"] = {KEY: adaptive_params}

    def ask(slot: int) -> Row:
        body = {"input_ids": prompts[slot], "sampling_params": sampling, "stream": True}
        return _ask(server, cell, slot, body, begin, fixed_shape)

    return [ask(0)] if len(prompts) == 1 else at_once(ask, range(len(prompts)), len(prompts))


def top_two_gap(server: Server, token_ids: list[int]) -> float:
    """Difference in log-probability, in nats, between the two likeliest next tokens."""
    body = {
        "input_ids": token_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    with named_failure(server):
        response = server.post("/generate", body, timeout=EVENT_SECONDS)
    (best, *_), (second, *_) = response["meta_info"]["output_top_logprobs"][0]
    return round(float(best - second), 5)


def at_once(work: Callable[[int], _Found], items: Iterable[int], num_threads: int) -> list[_Found]:
    """What a function gives for each item, in their order, several at a time; after an error, or Ctrl-C, the others are not
    waited for: requests end with their server."""
    pool = ThreadPoolExecutor(num_threads)
    try:
        return list(pool.map(work, items))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _ask(server: Server, cell: Cell, slot: int, body: dict[str, Any], begin: float, fixed_shape: str | None) -> Row:
    sent = time.perf_counter() - begin
    arrivals: list[list[float]] = []
    event: dict[str, Any] = {}
    with named_failure(server):
        for event in server.stream("/generate", body, timeout=EVENT_SECONDS):
            if "error" in event:
                break
            now, tokens = time.perf_counter() - begin, event["meta_info"]["completion_tokens"]
            if tokens > (arrivals[-1][1] if arrivals else 0):
                arrivals.append([round(now, 5), tokens])
    meta = event.get("meta_info", {})
    finish = meta.get("finish_reason") or {}
    # Of incremental streams the last event has the last tokens alone.
    is_whole = arrivals and len(event.get("output_ids", ())) == meta.get("completion_tokens")
    if not is_whole or finish.get("type") not in ("stop", "length"):
        raise MeasureError(
            where=f"{cell.configuration}, {cell.task}",
            found=f"an answer that ended with {finish or event!r}",
            expected="a whole answer",
            fix=f"read {server.log}",
        )
    verify_steps = meta.get("spec_verify_ct", 0)
    return Row(
        cell=cell,
        slot=slot,
        sent=round(sent, 5),
        arrivals=arrivals,
        output_ids=event["output_ids"],
        hit_cap=finish["type"] == "length",
        verify_steps=verify_steps,
        accepted=meta.get("spec_num_correct_drafts", 0),
        promoted=meta.get("spec_margin", {}).get("num_promoted", 0),
        shape_steps={fixed_shape: verify_steps} if fixed_shape else meta.get("spec_shape_histogram"),
        shapes=[shape for shape, *_ in meta["spec_steps"]] if "spec_steps" in meta else None,
    )
