"""The entry point in ``sglang.srt.platforms``: puts the stand-in ``sgl_kernel`` in place before SGLang looks for it.

Every SGLang process resolves its platform before it first imports ``sgl_kernel``, and general plugins load later than
that; so this is the one place early enough. It never claims to be a platform.
"""

import importlib
import os
import sys
from pathlib import Path

STANDIN_FOLDER = str(Path(__file__).with_name("standin"))
CPU_ENGINE_VARIABLE = "SGLANG_USE_CPU_ENGINE"


def activate() -> None:
    """Install the stand-in ``sgl_kernel`` where the CPU engine will run and no real one can serve it.

    Nothing happens where torch sees an accelerator, unless the user asked for the CPU engine there with
    ``SGLANG_USE_CPU_ENGINE=1``, and nothing where the installed ``sgl_kernel`` has the CPU kernels itself.
    Effects otherwise: ``sys.path`` starts with the stand-in's folder, and unless the user set them
    ``SGLANG_USE_CPU_ENGINE=1``, ``TORCHDYNAMO_DISABLE=1`` (20 s of C++ compilation at the first tree request) and
    ``SGLANG_ENABLE_TORCH_INFERENCE_MODE=1`` (small operators cost up to twice as much under ``no_grad``).

    Returns:
        None: "not this platform", so that SGLang goes on with its own detection.
    """
    import torch

    if torch.accelerator.is_available() and os.environ.get(CPU_ENGINE_VARIABLE) != "1":
        return
    if os.environ.get(CPU_ENGINE_VARIABLE, "1") != "1" or is_standin_active() or _has_real_cpu_kernels():
        return
    os.environ[CPU_ENGINE_VARIABLE] = "1"
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("SGLANG_ENABLE_TORCH_INFERENCE_MODE", "1")
    sys.path.insert(0, STANDIN_FOLDER)


def is_standin_active() -> bool:
    """Whether ``import sgl_kernel`` finds the stand-in in this process."""
    return STANDIN_FOLDER in sys.path


def _has_real_cpu_kernels() -> bool:
    try:
        kernels = importlib.import_module("sgl_kernel")
    except (ImportError, OSError):  # OSError: a missing libcuda shows as a failed dlopen
        kernels = None
    if hasattr(kernels, "verify_tree_greedy_cpu"):
        return True
    # Whatever was imported of it would be found before the stand-in.
    for name in [name for name in sys.modules if name.split(".")[0] == "sgl_kernel"]:
        del sys.modules[name]
    return False
