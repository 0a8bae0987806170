"""Recording: on one real server, every shape is pinned in turn and asked for one step at every token of known answers."""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from adaptivespec.bench.configurations import ServerPlan
from adaptivespec.bench.plan import NO_PREFIX_CACHE, Plan, write_config
from adaptivespec.bench.run import START_SECONDS, MeasureError, at_once, places_of, set_state
from adaptivespec.bench.store import Store, StoreError
from adaptivespec.launch import Server, named_failure
from adaptivespec.progress import Progress
from adaptivespec.reports import whole_lines
from adaptivespec.request_options import KEY
from adaptivespec.sglang_plugin.admin import SHAPE_KEY
from adaptivespec.shapes import TreeShape
from adaptivespec.tracelab.trace import TracedAnswer, shapes_to_record

STEPS_NAME = "steps.jsonl"
SERVER_NAME = "recording"
# The first token comes from the prefill and is the root; the second ends the request after just one step, whose accepted
# drafts are counted whole.
_ONE_STEP = 2


@dataclass(frozen=True)
class Piece:
    """One shape on one answer.

    Args:
        prompt_set, prompt, shape: what it is of.
        live, num_strayed: as in `TracedAnswer`.
        accepted, top1_probs: the same; empty where a longer chain tells it.
    """

    prompt_set: str
    prompt: int
    shape: str
    live: list[int] | None
    accepted: list[int] = field(default_factory=list)
    top1_probs: list[float] = field(default_factory=list)
    num_strayed: int = 0

    @property
    def key(self) -> tuple[str, int, str]:
        """What it is of."""
        return self.prompt_set, self.prompt, self.shape


class Recording:
    """The pieces recorded so far, in a file of the run's folder that only grows.

    Raises:
        StoreError: the file cannot be used.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._path = store, store.out / STEPS_NAME
        with store.writing(self._path):
            lines = whole_lines(self._path)
        try:
            self.pieces = {piece.key: piece for piece in (Piece(**json.loads(line)) for line in lines)}
        except (ValueError, TypeError) as error:
            raise StoreError(
                where=str(self._path),
                found=f"a line that is no recorded step ({error})",
                expected="those of an earlier part of this run",
                fix="remove the file, or give another --out",
            ) from error

    def append(self, piece: Piece) -> None:
        """Keep a piece: written when this returns."""
        with self._store.writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(vars(piece)) + "\n")
        self.pieces[piece.key] = piece

    def traced(self, shapes: Sequence[TreeShape], answers: dict[tuple[str, int], list[int]]) -> Iterator[TracedAnswer]:
        """The answers with all that is recorded of them, which must be everything."""
        for (name, prompt), ids in answers.items():
            mine = {shape: self.pieces[name, prompt, str(shape)] for shape in shapes}
            recorded = {shape: piece for shape, piece in mine.items() if piece.accepted}
            yield TracedAnswer(
                prompt_set=name,
                prompt=prompt,
                token_ids=ids,
                top1_probs=next(iter(recorded.values())).top1_probs,
                accepted={shape: piece.accepted for shape, piece in recorded.items()},
                live={shape: piece.live for shape, piece in mine.items()},
                num_strayed=sum(piece.num_strayed for piece in recorded.values()),
            )


def record(
    plan: Plan,
    store: Store,
    answers: dict[tuple[str, int], list[int]],
    parallel: int,
    progress: Progress,
    make_server: Callable[..., Server] = Server,
) -> Recording:
    """Record every shape that the plan pins on every answer, what is recorded already left out.

    Also notes in the store's ``servers``, under `SERVER_NAME`, the command, the device and whether scheduling overlaps.

    Args:
        plan: its last block's pinned shapes share one server.
        store: of the same run.
        answers: token ids, by task and place of the prompt.
        parallel: requests at a time.

    Raises:
        ServerFailedError: the server did not start, or died.
        MeasureError: it does not run what was asked for.
        StoreError: what was recorded cannot be written.
    """
    recording = Recording(store)
    server_plan = next(server for block in plan.blocks() for server in block if server.configurations[0].pinned)
    shapes = [item.pinned for item in server_plan.configurations if item.pinned]
    whole = shapes_to_record(shapes)
    missing = [
        (name, prompt, shape)
        for name, prompt in answers
        for shape in shapes
        if (name, prompt, str(shape)) not in recording.pieces
    ]
    for _ in range(len(answers) * len(shapes) - len(missing)):
        progress.advance()
    if not missing:
        return recording
    with _server(plan, store, server_plan, progress, make_server) as server:
        with named_failure(server):
            info = server.get("/server_info")
        store.servers[SERVER_NAME] = {
            "command": shlex.join(server.command),
            "device": info["device"],
            "overlap": not info["disable_overlap_schedule"],
        }
        store.save()
        places = places_of(info)
        for name, prompt, shape in missing:
            progress.doing(f"{name}, prompt {prompt + 1}: {shape}")
            set_state(server, SHAPE_KEY, places[str(shape)])
            ask = Asker(server, shape, plan.tasks[name][prompt], answers[name, prompt])
            live = ask.live()
            steps = ask.every_root(parallel) if shape in whole else ([], [], 0)
            recording.append(Piece(name, prompt, str(shape), live, *steps))
            progress.advance()
    return recording


def _server(
    plan: Plan, store: Store, server_plan: ServerPlan, progress: Progress, make_server: Callable[..., Server]
) -> Server:
    """With the prefix cache, so that a step costs the prefill of its root and not of all before it."""
    args = [arg for arg in plan.common_args if arg != NO_PREFIX_CACHE]
    args += [*server_plan.args, *write_config(server_plan, store.out / "configs")]
    progress.doing("starting the server that records")
    return make_server(plan.target, args, log=store.out / "logs" / f"{SERVER_NAME}.log", timeout=START_SECONDS)


@dataclass(frozen=True)
class Asker:
    """Asks a server that is pinned to a shape about one answer.

    Args:
        server: ADAPTIVE, strict.
        shape: what it is pinned to.
        prompt_ids: token ids of the prompt.
        answer_ids: of the answer, two or more.
    """

    server: Server
    shape: TreeShape
    prompt_ids: list[int]
    answer_ids: list[int]

    def live(self) -> list[int] | None:
        """Accepted drafts of each step of the whole answer; None where the server gives another one."""
        answer = self._generate(self.prompt_ids, len(self.answer_ids))
        is_same = answer["output_ids"] == self.answer_ids
        return [accepted for _, accepted, _ in self._steps(answer)] if is_same else None

    def every_root(self, parallel: int) -> tuple[list[int], list[float], int]:
        """With each token of the answer but the last as the root: accepted drafts, the draft's top-1 probability; and the
        number of roots at which the server went on with another token than the answer."""
        found = at_once(self._one_step, range(len(self.answer_ids) - 1), parallel)
        accepted, probs, strayed = zip(*found, strict=True)
        return list(accepted), list(probs), sum(strayed)

    def _one_step(self, root: int) -> tuple[int, float, bool]:
        answer = self._generate(self.prompt_ids + self.answer_ids[:root], _ONE_STEP)
        _, accepted, prob = self._steps(answer)[0]
        return accepted, prob, answer["output_ids"] != self.answer_ids[root : root + _ONE_STEP]

    def _generate(self, token_ids: list[int], max_new_tokens: int) -> dict[str, Any]:
        # Past the end of the text as a step goes, which does not know of it.
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        sampling["custom_params"] = {KEY: {"details": True, "strict": True}}
        with named_failure(self.server):
            answer: dict[str, Any] = self.server.post(
                "/generate", {"input_ids": token_ids, "sampling_params": sampling}
            )
        return answer

    def _steps(self, answer: dict[str, Any]) -> list[list[Any]]:
        steps: list[list[Any]] = answer["meta_info"].get("spec_steps", [])
        shapes = {shape for shape, _, _ in steps}
        if shapes != {str(self.shape)}:
            raise MeasureError(
                where=f"a server pinned to {self.shape}",
                found=f"steps of {' '.join(sorted(shapes)) or 'no shape'}",
                expected=f"steps of {self.shape} alone",
                fix="lower --parallel, so that the batch fits the shape's graphs",
            )
        return steps
