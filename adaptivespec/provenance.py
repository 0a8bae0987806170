"""Where figures come from: machine, versions, source revision, command."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("adaptivespec", "sglang", "torch", "transformers")


def provenance() -> dict[str, str]:
    """Date, machine, versions, git revision and command of this process, by their names in the report."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **machine(),
        "load at start": "{:.1f} {:.1f} {:.1f} runnable threads (1, 5, 15 minutes)".format(*os.getloadavg()),
        "source revision": git_revision(Path(__file__).parents[1]),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
    }


def machine() -> dict[str, str]:
    """The part of `provenance` that figures depend on: hardware, threads, versions."""
    return {
        "processor": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores in use, {_memory_gib():.0f} GiB memory",
        "accelerator": _gpu_names() or "none",
        "threads": thread_note(),
        "versions": ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
        + f", Python {platform.python_version()}, {platform.platform()}",
    }


def thread_note() -> str:
    """What the servers are told about OpenMP threads."""
    threads = os.environ.get("OMP_NUM_THREADS")
    return f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS unset: each server uses every core"


def git_revision(folder: Path) -> str:
    """Commit of the checkout in a folder, and whether files differ from it; "not a git checkout" elsewhere."""
    if not (folder / ".git").exists() or shutil.which("git") is None:
        return "not a git checkout"
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    is_changed = bool(_output(["git", "-C", str(folder), "status", "--porcelain"]))
    return f"{commit or 'unknown'}{' with local changes' if is_changed else ''}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines: Sequence[str] = info.read_text().splitlines() if info.exists() else ()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, as its driver's tool says."""
    return bool(_gpu_names())


def _gpu_names() -> str:
    # Not through torch: it would take memory on the device that is being measured.
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return "; ".join(_output(query).splitlines())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
