"""``python -m adaptivespec.doctor``: what was found on this machine, what will run, what is refused.

Nothing is started and nothing is changed. Exit code 0 where ADAPTIVE can run, 1 where it cannot.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from adaptivespec.config import AdaptiveConfig, resolve_start, selectable_shapes
from adaptivespec.errors import AdaptiveSpecError, ConfigError
from adaptivespec.sglang_plugin.refusals import OPTIONS, SGLANG_VERSION, check_environment

_ENTRY_POINTS = {"sglang.srt.plugins": "adaptivespec", "sglang.srt.platforms": "adaptivespec_cpu"}
_MARKS = {True: "ok     ", False: "PROBLEM", None: "       "}


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, what was found, and whether ADAPTIVE can run with it (None: it does
    not matter)."""

    subject: str
    found: str
    is_ok: bool | None = None


def examine(
    model: str | None = None, draft: str | None = None, config_path: str | None = None, deep: bool = False
) -> list[Finding]:
    """Look at versions, device, entry points, and whatever of config, target and draft is given.

    Args:
        model: target folder, to compare the draft with.
        draft: draft folder; looked at where ``model`` is given too.
        config_path: ``--speculative-adaptive-config``.
        deep: also import SGLang's worker modules and check every name that ADAPTIVE touches; half a minute.
    """
    findings = [
        Finding("python", platform.python_version(), sys.version_info >= (3, 11)),
        _version("torch", None),
        _version("sglang", SGLANG_VERSION),
        _device(),
        *(_entry_point(group, name) for group, name in _ENTRY_POINTS.items()),
        *_environment(),
        _attempt("config", lambda: _config(config_path)),
    ]
    if draft and not model:
        findings.append(Finding("draft", f"{draft}: not looked at; fix: give --model-path, to compare it with", False))
    if model and draft:
        findings.append(_attempt("draft", lambda: _draft(model, draft, config_path)))
    if deep:
        findings.append(_attempt("sglang internals", _contract))
    return findings


def _version(package: str, expected: str | None) -> Finding:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            package,
            f"not installed; expected {expected or 'any'}; fix: bash scripts/test.sh, or pip install -e . in a clone",
            False,
        )
    if expected and version != expected:
        return Finding(package, f"{version}; expected {expected}; fix: pip install {package}=={expected}", False)
    return Finding(package, version, True)


def _device() -> Finding:
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return Finding("device", "torch does not import; fix: pip install -e . in a clone", False)
    if _has_cuda():
        return Finding("device", f"{torch.cuda.get_device_name()}: states with captured CUDA graphs", True)
    if torch.accelerator.is_available():
        return Finding(
            "device", f"{torch.accelerator.current_accelerator()}: refused, ADAPTIVE runs on NVIDIA and CPU", False
        )
    threads = os.environ.get("OMP_NUM_THREADS", "unset")
    return Finding("device", f"CPU, {os.cpu_count()} cores, OMP_NUM_THREADS {threads}: eager states, own kernels", True)


def _entry_point(group: str, name: str) -> Finding:
    is_there = any(entry.name == name for entry in importlib.metadata.entry_points(group=group))
    found = "found" if is_there else "missing; fix: pip install -e . in a clone, into this environment"
    return Finding(f"entry point {group}", found, is_there)


def _environment() -> list[Finding]:
    platform_choice, plugins = os.environ.get("SGLANG_PLATFORM"), os.environ.get("SGLANG_PLUGINS")
    findings = []
    if platform_choice:
        found = f"{platform_choice}: SGLang then calls no other platform entry point, ours included; fix: unset it"
        findings.append(Finding("SGLANG_PLATFORM", found, False))
    # As SGLang reads it: blanks do not count, and nothing named is no filter.
    named = {name.strip() for name in (plugins or "").split(",") if name.strip()}
    if named and not set(_ENTRY_POINTS.values()) <= named:
        found = f"{plugins}: leaves ADAPTIVE out; fix: add {','.join(_ENTRY_POINTS.values())}"
        findings.append(Finding("SGLANG_PLUGINS", found, False))
    try:
        check_environment()
    except AdaptiveSpecError as error:
        findings.append(Finding("environment", str(error), False))
    return findings


def _has_cuda() -> bool:
    torch = importlib.import_module("torch")
    return bool(torch.cuda.is_available() and torch.version.hip is None)


def _attempt(subject: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(subject, look(), True)
    except AdaptiveSpecError as error:
        return Finding(subject, str(error), False)


def _config(path: str | None) -> str:
    config = AdaptiveConfig.from_json_file(path).on("cuda" if _has_cuda() else "cpu")
    shapes = selectable_shapes(config, resolve_start(config, None))
    return f"{path or 'defaults'}: policy {config.policy}, shapes {' '.join(map(str, shapes))}"


def _draft(model: str, draft: str, config: str | None) -> str:
    from adaptivespec.sglang_plugin.draft_check import check_draft
    from adaptivespec.sglang_plugin.drift_check import check_memory

    try:
        target = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        sizes = target["hidden_size"], target["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            where=f"--model-path {model}",
            found=f"no config.json with hidden_size and vocab_size ({error})",
            expected="the target's folder",
            fix="correct the path",
        ) from error
    check_draft(draft, *sizes)
    check_memory(AdaptiveConfig.from_json_file(config).drift, draft)
    return f"{draft} fits {model}"


def _contract() -> str:
    from adaptivespec.cpu_engine.activate import activate, is_standin_active
    from adaptivespec.sglang_plugin import contract

    activate()  # as SGLang's processes do, so that its modules import on a box without CUDA
    touches = contract.LIGHT + contract.WORKER + contract.TOKENIZER
    touches += contract.CPU_ENGINE if is_standin_active() else ()
    contract.check(touches)
    return f"all {len(touches)} names that ADAPTIVE touches are as expected"


def main(argv: list[str] | None = None) -> int:
    """Print the report; see the module."""
    parser = argparse.ArgumentParser(prog="python -m adaptivespec.doctor", description=__doc__)
    parser.add_argument("--model-path", help="target folder, to compare the draft with")
    parser.add_argument("--speculative-draft-model-path", help="draft folder")
    parser.add_argument("--speculative-adaptive-config", help="config file")
    parser.add_argument(
        "--deep", action="store_true", help="check every SGLang name that ADAPTIVE touches; half a minute"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of the table")
    args = parser.parse_args(argv)
    findings = examine(
        args.model_path, args.speculative_draft_model_path, args.speculative_adaptive_config, deep=args.deep
    )
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        for finding in findings:
            print(f"{_MARKS[finding.is_ok]} {finding.subject:32} {finding.found}")
        print("\nrefused at start, with what stands in the way; targets and the rest are in `Limits` of README.md:")
        for flag, why in {option.flag: option.why for option in OPTIONS}.items():
            print(f"        {flag:44} {why}")
    return int(any(finding.is_ok is False for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
