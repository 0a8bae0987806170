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


def file_name(text: str) -> str:
    """A text as a part of a file's name: letters, digits and dots stay, all else is a hyphen."""
    return "".join(char if char.isalnum() or char == "." else "-" for char in text)


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that only grows, none where it is absent. A last one that was cut - by the end of a process, or of
    the disk's room - is removed from the file."""
    content = path.read_bytes() if path.exists() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        write_whole(path, whole)
    return whole.split(b"\n")[:-1]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_bytes(content)
    scratch.replace(path)
