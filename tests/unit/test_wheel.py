"""The wheel, as `pip install` gets it: complete, with its entry points, and importable without the checkout."""

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("adaptivespec", "cuda_graphs", "drift")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the unpacked wheel, built from a copy so that the checkout stays as it is."""
    source = tmp_path_factory.mktemp("source")
    for name in PACKAGES:
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("unpacked")
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"  # what pip calls
    subprocess.run([sys.executable, "-c", build, str(wheels)], cwd=source, check=True, capture_output=True)
    (wheel,) = wheels.glob("adaptivespec-*.whl")
    zipfile.ZipFile(wheel).extractall(target)
    return target


def test_it_holds_every_file_of_the_packages(unpacked: Path) -> None:
    def files(folder: Path) -> set[str]:
        paths = [path for name in PACKAGES for path in (folder / name).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)) for path in paths if "__pycache__" not in path.parts}

    assert files(unpacked) == files(REPOSITORY)
    assert "adaptivespec/demo/draft/TRAINING.json" in files(unpacked)


def test_it_holds_nothing_else(unpacked: Path) -> None:
    folders = {path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")}
    assert folders == {*PACKAGES}


def test_entry_points_lead_to_functions(unpacked: Path) -> None:
    (metadata,) = unpacked.glob("*.dist-info")
    entry_points = configparser.ConfigParser()
    entry_points.read(metadata / "entry_points.txt")
    plugin = entry_points["sglang.srt.plugins"]["adaptivespec"]
    platform = entry_points["sglang.srt.platforms"]["adaptivespec_cpu"]
    check = (
        "import importlib, sys; sys.path.insert(0, sys.argv[1])\n"
        "for entry in sys.argv[2:]:\n"
        "    module, name = entry.split(':')\n"
        "    loaded = importlib.import_module(module)\n"
        "    assert loaded.__file__.startswith(sys.argv[1]), loaded.__file__\n"
        "    assert callable(getattr(loaded, name))\n"
    )
    subprocess.run([sys.executable, "-c", check, str(unpacked), plugin, platform], check=True, cwd=unpacked)
