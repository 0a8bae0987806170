"""What a run leaves behind: report.html, the plots as PNG, results.json and results.csv."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adaptivespec.bench.configurations import PLAIN, Configuration
from adaptivespec.bench.figures import figures
from adaptivespec.bench.plan import Plan
from adaptivespec.bench.store import ROWS_NAME, Store
from adaptivespec.bench.tables import Pair, Summary, best_static, geometric_means, pairs_of
from adaptivespec.reports import render_template, write_whole

REPORT_NAME = "report.html"
RESULTS_NAME = "results.json"


def write_report(
    plan: Plan,
    store: Store,
    summaries: list[Summary],
    sources: Mapping[str, str],
    problem: str,
    decode: Callable[[list[int]], str],
) -> tuple[Path, dict[str, Any]]:
    """Write everything; returns the report's path and the figures of the last line.

    Args:
        plan: of the run.
        store: complete or not; the report says which.
        summaries: of the store.
        sources: where models and prompts come from, by name.
        problem: why the run ended early; "" where it did not.
        decode: token ids to text.

    Raises:
        OSError: a file cannot be written.
    """
    pictures = figures(store, summaries)
    line = headline(plan, store, summaries, problem)
    data = {"headline": line, "sources": dict(sources), "settings": store.settings, "sessions": store.sessions}
    data |= {"servers": store.servers, "summaries": [item.to_dict() for item in summaries]}
    # The smallest first: a disk without room for pictures may have some for figures.
    write_whole(store.out / RESULTS_NAME, json.dumps(data, indent=1).encode())
    write_whole(store.out / "results.csv", _csv(summaries).encode())
    path = store.out / REPORT_NAME
    html = render_template(
        "bench.html",
        pictures=pictures,
        plan=plan,
        store=store,
        summaries=summaries,
        sizes=list(dict.fromkeys(item.batch_size for item in summaries)),
        means=geometric_means(summaries),
        num_cells=len(store.cells),
        plain=PLAIN,
        problem=problem,
        sources=sources,
        examples=examples(plan, store),
        decode=decode,
        rows_name=ROWS_NAME,
    )
    write_whole(path, html.encode())
    for name, png in pictures.items():
        write_whole(store.out / f"{name}.png", png)
    return path, line


def examples(plan: Plan, store: Store) -> list[Pair]:
    """An answer of each task to show, beside plain decoding's: that of the first decoder of this package that was measured on
    it, or, where none was, of the first one of SGLang's."""
    found: dict[str, Pair] = {}
    for item in sorted(plan.configurations[1:], key=lambda item: item.is_ours, reverse=True):
        for task in plan.tasks:
            if pairs := pairs_of(store, item.name, task, plan.batch_sizes[0]):
                found.setdefault(task, pairs[0])
    return list(found.values())


def headline(plan: Plan, store: Store, summaries: Sequence[Summary], problem: str) -> dict[str, Any]:
    """The figures of the last line, as JSON types."""
    means = geometric_means(summaries)
    return {
        "complete": not problem,
        "problem": problem or None,
        "unit": "decode tokens/s over plain in the same turn, median; accept length: output tokens over verify steps",
        "cells": {"measured": len(store.cells), "planned": plan.num_cells},
        "geometric_mean": {str(size): by_name for size, by_name in means.items()},
        "best_static": {
            str(size): _against_best_static(by_name, plan.configurations) for size, by_name in means.items()
        },
        "ratios": [
            {
                key: value
                for key, value in item.to_dict().items()
                if key
                in (
                    "configuration",
                    "task",
                    "batch_size",
                    "num_turns",
                    "ratio",
                    "ratio_q1",
                    "ratio_q3",
                    "tokens_per_s",
                    "accept_length",
                    "num_identical",
                    "num_answers",
                    "split_gap",
                    "accuracy",
                    "num_graded",
                )
            }
            for item in summaries
        ],
    }


def _against_best_static(means: dict[str, float], configurations: Sequence[Configuration]) -> dict[str, Any] | None:
    """The best decoder of one shape, and what each that is not of one shape reaches of it."""
    best = best_static(means, configurations)
    if best is None:
        return None
    others = [item.name for item in configurations if not item.is_static and item.name in means]
    return {"name": best, "over_it": {name: round(means[name] / means[best], 4) for name in others}}


def _csv(summaries: Sequence[Summary]) -> str:
    if not summaries:
        return ""
    out = io.StringIO()
    table = csv.DictWriter(out, fieldnames=list(summaries[0].to_dict()), lineterminator="\n")
    table.writeheader()
    for item in summaries:
        table.writerow({**item.to_dict(), "shape_steps": json.dumps(item.shape_steps)})
    return out.getvalue()
