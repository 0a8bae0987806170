"""report.html: one file with everything in it, pictures included, that reads on a phone."""

import json
from collections.abc import Mapping
from pathlib import Path

from adaptivespec.demo.configurations import ADAPTIVE_NAME, PLAIN
from adaptivespec.demo.figures import figures
from adaptivespec.demo.measure import ALL_SETS, Measurements, Pair
from adaptivespec.reports import render_template, write_whole

REPORT_NAME = "report.html"
DATA_NAME = "measurements.json"


def write_report(found: Measurements, origin: Mapping[str, str], sources: Mapping[str, str], out: Path) -> Path:
    """Write report.html, the pictures as PNG files, and measurements.json with every answer; returns the report's path.

    Args:
        found: complete or not; the report says which.
        origin: lines of the table of provenance.
        sources: where models and prompts come from, by name.
        out: folder, made if absent.
    """
    out.mkdir(parents=True, exist_ok=True)
    pictures = figures(found)
    for name, png in pictures.items():
        write_whole(out / f"{name}.png", png)
    data = {"origin": dict(origin), "sources": dict(sources), **found.to_dict()}
    write_whole(out / DATA_NAME, json.dumps(data, indent=1).encode())
    report = out / REPORT_NAME
    write_whole(report, render(found, pictures, origin, sources).encode())
    return report


def render(
    found: Measurements, pictures: Mapping[str, bytes], origin: Mapping[str, str], sources: Mapping[str, str]
) -> str:
    """The report as HTML. All text is escaped."""
    return render_template(
        "demo.html",
        found=found,
        adaptive=ADAPTIVE_NAME,
        plain=PLAIN.name,
        all_sets=ALL_SETS,
        summaries=found.summaries(),
        pictures=pictures,
        examples=examples(found),
        origin=origin,
        sources=sources,
    )


def examples(found: Measurements) -> list[Pair]:
    """One pair of each prompt set to show: ADAPTIVE's first, where there is one."""
    return [pair for prompt_set in found.prompt_sets for pair in found.of(ADAPTIVE_NAME, prompt_set)[:1]]
