"""Adaptive EAGLE-3 speculative decoding for SGLang: the algorithm `ADAPTIVE`, with a tree shape chosen at every step."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("adaptivespec")
except PackageNotFoundError:  # a checkout that is not installed, as `scripts/gpu_check.py` runs on a bare machine
    __version__ = "0+unknown"
