"""What a replay adds up to: a row for each decoder, the check of the trace, and replayed against live ranking."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import correlation, geometric_mean
from typing import Any

from adaptivespec.config import AdaptiveConfig, resolve_start
from adaptivespec.policy import make_policy
from adaptivespec.shapes import TreeShape
from adaptivespec.tracelab.replay import Outcome, hindsight_best, replay, walk
from adaptivespec.tracelab.trace import Trace

HINDSIGHT = "hindsight-best"
CLEAR = 0.05
"""Live speeds that differ by less, as a share, do not say which is faster."""
ENOUGH = 0.95
"""Least share of the live answers, and of the clear pairs of shapes by the mean of all sets, that a replay must agree with."""


@dataclass(frozen=True)
class Row:
    """One decoder on all prompt sets. Ratios by set, and their geometric mean.

    Args:
        label: its name.
        shape: where it is of one shape for ever.
        by_set: what it took.
        to_plain: speed over plain decoding.
        to_best: share of the speed of the best shape at every step, known in hindsight.
    """

    label: str
    shape: TreeShape | None
    by_set: Mapping[str, Outcome]
    to_plain: Mapping[str, float]
    to_best: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Geometric mean of `to_plain`."""
        return geometric_mean(self.to_plain.values())

    def to_dict(self, best_static: "Row") -> dict[str, Any]:
        """The row as JSON types, rounded."""
        steps = sum((outcome.steps for outcome in self.by_set.values()), Counter[TreeShape]())
        return {
            "geometric_mean": round(self.mean, 4),
            "of_hindsight_best": round(geometric_mean(self.to_best.values()), 4),
            "of_best_static": round(self.mean / best_static.mean, 4),
            "ratio_to_plain": _rounded(self.to_plain),
            "of_hindsight_best_by_set": _rounded(self.to_best),
            "tokens_per_s": {name: round(outcome.tokens_per_s, 2) for name, outcome in self.by_set.items()},
            "accept_length": {name: round(outcome.accept_length, 3) for name, outcome in self.by_set.items()},
            "shape_share": {str(shape): round(n / steps.total(), 3) for shape, n in steps.most_common()},
        }


def replay_all(trace: Trace, configs: Mapping[str, AdaptiveConfig]) -> list[Row]:
    """Hindsight, every static shape, then each config by its label, all replayed.

    Raises:
        TraceError: a policy may choose a shape that the trace does not have.
    """
    best = hindsight_best(trace)

    def row(label: str, found: Mapping[str, Outcome], shape: TreeShape | None = None) -> Row:
        to_plain = {name: outcome.tokens_per_s * trace.plain_ms / 1000 for name, outcome in found.items()}
        to_best = {name: outcome.tokens_per_s / best[name].tokens_per_s for name, outcome in found.items()}
        return Row(label, shape, found, to_plain, to_best)

    rows = [row(HINDSIGHT, best)]
    for shape in trace.step_ms:
        label = f"static {shape}"
        rows.append(row(label, replay(trace, static(shape), label), shape))
    for label, config in configs.items():
        policy = make_policy(config, resolve_start(config, None))
        rows.append(row(label, replay(trace, policy, label)))
    return rows


def static(shape: TreeShape) -> Any:
    """The policy of one shape."""
    config = AdaptiveConfig.from_dict({"policy": "static", "shape": {"start": shape.to_list()}})
    return make_policy(config, shape)


def check(trace: Trace) -> dict[str, Any]:
    """Whether replaying a shape gives, step for step, what the server gave when it was pinned to it.

    Answers that the server ended otherwise than the recorded one are not compared.
    """
    compared = same = other_answer = 0
    for number, answer in enumerate(trace.answers):
        for shape, live in answer.live.items():
            if live is None:
                other_answer += 1
                continue
            compared += 1
            same += [step.accepted for step in walk(static(shape), number, answer)] == live
    roots = sum(answer.num_roots * len(answer.accepted) for answer in trace.answers)
    return {
        "compared": compared,
        "same_steps": same,
        "other_answer": other_answer,
        "roots": roots,
        "strayed": sum(answer.num_strayed for answer in trace.answers),
    }


def rankings(trace: Trace, rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """By prompt set, and under "all" by geometric mean: how the replayed order of the static shapes agrees with the live one."""
    found = {}
    for name in [*trace.prompt_sets, "all"]:
        pairs = [pair for row in rows if row.shape and (pair := speeds(trace, row, name))]
        found[name] = agreement([live for live, _ in pairs], [replayed for _, replayed in pairs])
    return found


def objections(checked: Mapping[str, Any], ranks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Why figures replayed from a trace are not to be relied on, from `check` and `rankings`; what they cannot tell is said too."""
    found = []
    if not checked["compared"]:
        found.append("no live answer could be compared step for step")
    elif checked["same_steps"] < ENOUGH * checked["compared"]:
        found.append(f"only {checked['same_steps']} of {checked['compared']} live answers have the replayed steps")
    ranked = ranks["all"]
    if not ranked["clear_pairs"]:
        found.append("no two shapes differ clearly live, in rounds of which no cost is (record --rounds 2 or more)")
    elif ranked["clear_alike"] < ENOUGH * ranked["clear_pairs"]:
        found.append(f"only {ranked['clear_alike']} of {ranked['clear_pairs']} clear pairs of shapes rank as live")
    return found


def speeds(trace: Trace, row: Row, name: str) -> tuple[float, float] | None:
    """Live and replayed speed over plain of a row of one shape in one set, or of all; None where there is no live one."""
    if row.shape is None or any(row.shape not in trace.live.get(each, {}) for each in row.to_plain):
        return None
    live = {each: trace.live[each][row.shape] for each in row.to_plain}
    return (geometric_mean(live.values()), row.mean) if name == "all" else (live[name], row.to_plain[name])


def agreement(live: Sequence[float], replayed: Sequence[float]) -> dict[str, Any]:
    """Of two measures of the same things: pairs that they order alike, all and those that differ clearly live, and Spearman's
    rank correlation; None where fewer than two things, or only equal ones, are ranked."""
    pairs = list(combinations(range(len(live)), 2))
    clear = [(i, j) for i, j in pairs if abs(live[i] - live[j]) > CLEAR * min(live[i], live[j])]

    def alike(i: int, j: int) -> bool:
        return (live[i] < live[j]) == (replayed[i] < replayed[j])

    is_ranked = len(set(live)) > 1 and len(set(replayed)) > 1
    return {
        "pairs": len(pairs),
        "alike": sum(alike(*pair) for pair in pairs),
        "clear_pairs": len(clear),
        "clear_alike": sum(alike(*pair) for pair in clear),
        "spearman": round(correlation(_ranks(live), _ranks(replayed)), 3) if is_ranked else None,
    }


def _ranks(values: Sequence[float]) -> list[float]:
    """Places in rising order; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}
