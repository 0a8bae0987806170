"""Measuring: plain decoding stays up, each other decoder is started beside it, and the two take turns."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adaptivespec.demo.configurations import ADAPTIVE_NAME, COMMON_ARGS, PLAIN, Configuration
from adaptivespec.demo.measure import Answer, Measurements, Pair, new_shapes
from adaptivespec.launch import Server, named_failure
from adaptivespec.progress import Progress

WARM_UP_TOKENS = 8
START_SECONDS = 600
ANSWER_SECONDS = 300


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Args:
        target: folder or hub name of the target.
        configurations: the decoders to measure against plain.
        prompts: token ids of the prompts, by the name of their set.
        max_new_tokens: cap of each answer.
        rounds: how often each prompt is measured with each decoder.
        trace_prompt: token ids of the prompt for the generation whose shapes are traced.
        trace_tokens: cap of that generation.
        server_args: further arguments of every server.
        logs: folder for the servers' logs.
    """

    target: str
    configurations: Sequence[Configuration]
    prompts: dict[str, list[list[int]]]
    max_new_tokens: int
    rounds: int
    trace_prompt: list[int]
    trace_tokens: int
    server_args: Sequence[str]
    logs: Path

    @property
    def num_pairs(self) -> int:
        """Pairs of a complete run."""
        return len(self.configurations) * self.rounds * sum(map(len, self.prompts.values()))

    def turns(self) -> Iterator[tuple[str, int, list[int]]]:
        """Set, index and token ids of each prompt, the sets taking turns so that an early end leaves some of each."""
        longest = max(map(len, self.prompts.values()))
        for _ in range(self.rounds):
            for index in range(longest):
                for name, prompts in self.prompts.items():
                    if index < len(prompts):
                        yield name, index, prompts[index]


def measure(plan: Plan, found: Measurements, progress: Progress, make_server: Callable[..., Server] = Server) -> None:
    """Measure every pair of the plan, filling `found` as it goes, so that an interruption loses at most one pair.

    Raises:
        ServerFailedError: a server did not start, died, or did not answer.
    """
    with ExitStack() as stack:

        def server_of(configuration: Configuration) -> Server:
            args = [*COMMON_ARGS, *configuration.args, *plan.server_args]
            log = plan.logs / f"{configuration.slug}.log"
            server = make_server(plan.target, args, log=log, timeout=START_SECONDS)
            stack.callback(server.stop)
            command = shlex.join(server.command)
            found.commands[configuration.name] = command
            progress.say(f"{configuration.name}: {command}\n")
            server.start()
            return server

        # Starting is one busy thread: plain and the first of the others share the wait.
        plain = server_of(PLAIN)
        for configuration in plan.configurations:
            progress.doing(f"starting {configuration.name}")
            other = server_of(configuration)
            for server in (plain, other):
                server.wait_until_ready()
                _answer(server, next(plan.turns())[2], WARM_UP_TOKENS)
            with named_failure(other):
                found.notes[configuration.name] = shape_note(other.get("/server_info"))
            progress.doing(f"plain and {configuration.name} take turns")
            _measure_pairs(plan, found, progress, configuration.name, plain, other)
            if configuration.name == ADAPTIVE_NAME:
                progress.doing("tracing ADAPTIVE's shapes over one generation")
                with named_failure(other):
                    found.shape_trace.extend(traced_shapes(other, plan.trace_prompt, plan.trace_tokens))
            progress.doing(f"stopping {configuration.name}")
            other.stop()


def _measure_pairs(
    plan: Plan, found: Measurements, progress: Progress, name: str, plain: Server, other: Server
) -> None:
    for turn, (prompt_set, index, token_ids) in enumerate(plan.turns()):
        order = (plain, other) if turn % 2 == 0 else (other, plain)
        answers = {server.url: _answer(server, token_ids, plan.max_new_tokens) for server in order}
        pair = Pair(name, prompt_set, index, answers[plain.url], answers[other.url])
        if not pair.is_identical:
            gap = _top_two_gap(plain, [*token_ids, *pair.plain.token_ids[: pair.shared_len]])
            pair = replace(pair, split_gap=gap)
        found.pairs.append(pair)
        progress.say(pair_line(pair))
        progress.advance()


def pair_line(pair: Pair) -> str:
    """One pair in words."""
    where = f"{pair.configuration}, {pair.prompt_set} {pair.prompt_index + 1}"
    sameness = "same answer" if pair.is_identical else f"answers part at token {pair.shared_len + 1}"
    if pair.split_gap is not None:
        sameness += f", where plain's two best are {pair.split_gap:.2f} nats apart"
    if pair.ratio is None:
        return f"{where}: an answer of one token, no speed; {sameness}"
    speeds = f"{pair.other.tokens_per_s:.1f} tokens/s, plain {pair.plain.tokens_per_s:.1f}"
    return f"{where}: {speeds}: {pair.ratio:.2f}x, {sameness}"


def _answer(server: Server, token_ids: list[int], max_new_tokens: int) -> Answer:
    body = {"input_ids": token_ids, "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens}}
    with named_failure(server):
        return Answer.from_response(server.post("/generate", body, timeout=ANSWER_SECONDS))


def _top_two_gap(server: Server, token_ids: list[int]) -> float:
    """Difference in log-probability, in nats, between the two likeliest next tokens."""
    body = {
        "input_ids": token_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    with named_failure(server):
        response = server.post("/generate", body, timeout=ANSWER_SECONDS)
    (best, *_), (second, *_) = response["meta_info"]["output_top_logprobs"][0]
    return float(best - second)


def traced_shapes(server: Server, token_ids: list[int], max_new_tokens: int) -> Iterator[str]:
    """Tree shape of each verify step of one streamed generation, in order.

    The server's step counts are read after every chunk, so this generation must be alone and is not timed. Where two
    steps fall between two readings, their order is not known: they come sorted.
    """
    body = {
        "input_ids": token_ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens},
        "stream": True,
    }
    before = _steps_per_shape(server)
    for _ in server.stream("/generate", body, timeout=ANSWER_SECONDS):
        after = _steps_per_shape(server)
        yield from new_shapes(before, after)
        before = after


def _steps_per_shape(server: Server) -> dict[str, int]:
    counts: dict[str, int] = server.get("/server_info")["internal_states"][0]["adaptive"]["counts"]["steps_per_shape"]
    return counts


def shape_note(info: dict[str, Any]) -> str:
    """The tree shapes that a server runs with, from its ``/server_info``."""
    adaptive = info["internal_states"][0].get("adaptive")
    if adaptive:
        return f"{len(adaptive['shapes'])} shapes, chosen at every step: {' '.join(adaptive['shapes'])}"
    shape = (
        info["speculative_num_steps"],
        info["speculative_eagle_topk"],
        info["speculative_num_draft_tokens"],
    )
    return "always ({},{},{})".format(*shape)
