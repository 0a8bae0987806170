"""`adaptivespec.cpu_engine.activate`: when the stand-in `sgl_kernel` takes its place, and when it must not."""

import os
import sys
import textwrap

import pytest
import torch

from adaptivespec.cpu_engine import activate

VARIABLE = activate.CPU_ENGINE_VARIABLE
INFERENCE_MODE = "SGLANG_ENABLE_TORCH_INFERENCE_MODE"


def kernel_modules() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "sgl_kernel"]


@pytest.fixture
def process(monkeypatch, tmp_path):
    """As a fresh process of a box without an accelerator, with a folder first on its path for fake packages."""
    for name in (VARIABLE, "TORCHDYNAMO_DISABLE", INFERENCE_MODE):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    path = [entry for entry in sys.path if entry != activate.STANDIN_FOLDER]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *path])
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    write_kernel(tmp_path, "raise ImportError('libcuda.so.1: cannot open shared object file')")
    before = {name: sys.modules.pop(name) for name in kernel_modules()}
    yield tmp_path
    for name in kernel_modules():
        del sys.modules[name]
    sys.modules.update(before)


def write_kernel(folder, source: str, **modules: str) -> None:
    package = folder / "sgl_kernel"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(textwrap.dedent(source))
    for name, text in modules.items():
        (package / f"{name}.py").write_text(text)


def is_untouched() -> bool:
    return activate.STANDIN_FOLDER not in sys.path and not {"TORCHDYNAMO_DISABLE", INFERENCE_MODE} & os.environ.keys()


def test_without_an_accelerator_the_standin_comes_first(process):
    assert activate.activate() is None
    assert sys.path[0] == activate.STANDIN_FOLDER
    assert activate.is_standin_active()
    assert os.environ[VARIABLE] == "1"
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert os.environ[INFERENCE_MODE] == "1"
    import sgl_kernel

    assert sgl_kernel.__file__.startswith(activate.STANDIN_FOLDER)
    assert sgl_kernel.verify_tree_greedy_cpu.__module__ == "adaptivespec.cpu_engine.kernels"


def test_twice_is_once(process):
    activate.activate()
    activate.activate()
    assert sys.path.count(activate.STANDIN_FOLDER) == 1


def test_a_child_process_that_inherits_the_environment_activates_too(process, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    activate.activate()
    assert activate.is_standin_active()


def test_with_an_accelerator_nothing_happens(process, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    activate.activate()
    assert is_untouched()
    assert VARIABLE not in os.environ
    assert "sgl_kernel" not in sys.modules


def test_with_an_accelerator_the_user_may_ask_for_the_cpu_engine(process, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv(VARIABLE, "1")
    activate.activate()
    assert activate.is_standin_active()


@pytest.mark.parametrize("value", ["0", "false", ""])
def test_the_users_no_is_respected(process, monkeypatch, value):
    monkeypatch.setenv(VARIABLE, value)
    activate.activate()
    assert is_untouched()
    assert os.environ[VARIABLE] == value


def test_the_users_dynamo_setting_is_kept(process, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    activate.activate()
    assert os.environ["TORCHDYNAMO_DISABLE"] == "0"


def test_a_working_kernel_with_cpu_functions_is_never_shadowed(process):
    write_kernel(process, "def verify_tree_greedy_cpu(): ...")
    activate.activate()
    assert is_untouched()
    import sgl_kernel

    assert sgl_kernel.__file__ == str(process / "sgl_kernel" / "__init__.py")


@pytest.mark.parametrize("error", ["ImportError('no libcuda')", "OSError('libcuda.so.1: cannot open')"])
def test_what_a_failing_kernel_left_behind_is_cleaned_out(process, monkeypatch, error):
    write_kernel(process, f"import sgl_kernel.parts\nraise {error}", parts="")
    monkeypatch.setitem(sys.modules, "sgl_kernels_of_another", torch)
    activate.activate()
    assert activate.is_standin_active()
    assert kernel_modules() == []
    assert "sgl_kernels_of_another" in sys.modules


def test_a_kernel_that_fails_for_other_reasons_is_not_hidden(process):
    write_kernel(process, "raise RuntimeError('a bug')")
    with pytest.raises(RuntimeError, match="a bug"):
        activate.activate()


def test_a_box_without_any_kernel(process):
    (process / "sgl_kernel" / "__init__.py").write_text("raise ModuleNotFoundError(name='sgl_kernel')")
    activate.activate()
    assert activate.is_standin_active()


def test_a_working_kernel_without_cpu_functions_gives_way_in_full(process):
    write_kernel(process, "")
    activate.activate()
    assert activate.is_standin_active()
    import sgl_kernel

    assert sgl_kernel.__file__.startswith(activate.STANDIN_FOLDER)
