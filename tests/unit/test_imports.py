"""Outside sglang_plugin/ and cpu_engine/ nothing needs SGLang, FlashInfer, CUDA or Triton to be imported."""

import importlib.metadata
import subprocess
import sys

import pytest

import adaptivespec

# Blocks, imports, then shows that the block was in force all the time.
SCRIPT = """
import importlib, pkgutil, sys

blocked = sys.argv[1].split(",")
sys.modules.update(dict.fromkeys(blocked))  # as if absent, also for importlib.util.find_spec, which torch asks about triton

def walk(package):
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if info.name in ("adaptivespec.sglang_plugin", "adaptivespec.cpu_engine"):
            continue
        module = importlib.import_module(info.name)
        print(info.name)
        if info.ispkg:
            walk(module)

for name in sys.argv[2:]:
    module = importlib.import_module(name)
    print(name)
    assert name != "cuda_graphs" or "torch" not in sys.modules, "cuda_graphs loads torch before it is used"
    if hasattr(module, "__path__"):
        walk(module)
    if name in ("cuda_graphs", "drift"):
        others = {"adaptivespec", "cuda_graphs", "drift"} - {name}
        assert not others & sys.modules.keys(), f"{name} imports {others & sys.modules.keys()}"
        for own in [own for own in sys.modules if own.partition(".")[0] == name]:
            del sys.modules[own]  # so that the next one's imports show
assert all(sys.modules[name] is None for name in blocked), "a blocked package was imported"
"""


def imported(blocked: list[str], names: list[str]) -> list[str]:
    command = [sys.executable, "-c", SCRIPT, ",".join(blocked), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_every_module_imports_without_sglang_flashinfer_cuda_and_triton():
    """And `cuda_graphs` and `drift` import neither each other nor `adaptivespec`."""
    names = imported(["sglang", "sgl_kernel", "flashinfer", "cuda", "triton"], ["cuda_graphs", "drift", "adaptivespec"])
    assert {"adaptivespec.config", "adaptivespec.metrics", "adaptivespec.policy.dcs", "drift", "cuda_graphs"} <= {
        *names
    }
    assert not [name for name in names if "sglang_plugin" in name or "cpu_engine" in name]


def test_config_policies_and_metrics_import_without_torch():
    names = [
        "adaptivespec.config",
        "adaptivespec.metrics",
        "adaptivespec.policy.cycle",
        "adaptivespec.policy.dcs",
        "adaptivespec.policy.static",
    ]
    assert imported(["sglang", "numpy", "torch"], names) == names


def test_a_blocked_package_is_noticed():
    with pytest.raises(AssertionError, match="import of json halted"):
        imported(["json"], ["adaptivespec.config"])


def test_a_checkout_that_is_not_installed_imports_too(monkeypatch):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    installed = adaptivespec.__version__
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", version)
        assert importlib.reload(adaptivespec).__version__ == "0+unknown"
    assert importlib.reload(adaptivespec).__version__ == installed
