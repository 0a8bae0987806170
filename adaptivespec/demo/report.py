"""report.html: one file with everything in it, pictures included, that reads on a phone."""

import base64
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from adaptivespec.demo.configurations import ADAPTIVE_NAME, PLAIN
from adaptivespec.demo.figures import figures
from adaptivespec.demo.measure import ALL_SETS, Measurements, Pair

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
        _replace(out / f"{name}.png", png)
    data = {"origin": dict(origin), "sources": dict(sources), **found.to_dict()}
    _replace(out / DATA_NAME, json.dumps(data, indent=1).encode())
    report = out / REPORT_NAME
    _replace(report, render(found, pictures, origin, sources).encode())
    return report


def render(
    found: Measurements, pictures: Mapping[str, bytes], origin: Mapping[str, str], sources: Mapping[str, str]
) -> str:
    """The report as HTML. All text is escaped."""
    # Undefined names are errors: a report with silent gaps would look like a measurement.
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((files("adaptivespec.demo") / "report_template.html").read_text("utf-8"))
    return template.render(
        found=found,
        adaptive=ADAPTIVE_NAME,
        plain=PLAIN.name,
        all_sets=ALL_SETS,
        summaries=found.summaries(),
        pictures={name: base64.b64encode(png).decode() for name, png in pictures.items()},
        examples=examples(found),
        origin=origin,
        sources=sources,
    )


def examples(found: Measurements) -> list[Pair]:
    """One pair of each prompt set to show: ADAPTIVE's first, where there is one."""
    return [pair for prompt_set in found.prompt_sets for pair in found.of(ADAPTIVE_NAME, prompt_set)[:1]]


def _replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_bytes(content)
    scratch.replace(path)
