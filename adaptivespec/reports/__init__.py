"""Reports: one HTML file each with everything in it, pictures included, that reads on a phone."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def render_template(name: str, *, pictures: Mapping[str, bytes], **values: Any) -> str:
    """The template of this folder as HTML. All text is escaped.

    Args:
        name: file of the template.
        pictures: PNG files by the names that the template's `picture` knows.
        values: what else the template needs.
    """
    # Undefined names are errors: a report with silent gaps would look like a measurement.
    environment = Environment(
        loader=PackageLoader("adaptivespec", "reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    encoded = {key: base64.b64encode(png).decode() for key, png in pictures.items()}
    return environment.get_template(name).render(pictures=encoded, **values)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_bytes(content)
    scratch.replace(path)
