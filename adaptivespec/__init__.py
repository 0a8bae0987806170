"""Adaptive EAGLE-3 speculative decoding for SGLang: the algorithm `ADAPTIVE`, with a tree shape chosen at every step."""

from importlib.metadata import version

__version__ = version("adaptivespec")
