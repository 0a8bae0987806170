"""Where the shipped draft lies."""

from importlib.resources import files
from pathlib import Path


def draft_folder() -> Path:
    """The folder of the EAGLE-3 draft that ships with the package: model.safetensors, config.json, TRAINING.json."""
    return Path(str(files("adaptivespec.demo") / "draft"))
