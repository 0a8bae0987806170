"""SGLang's CPU engine from PyPI packages alone.

PyPI's ``sglang-kernel`` needs a CUDA driver even to be imported, so stock SGLang does not start on a box without one.
This package supplies what is missing: the ``*_cpu`` kernels in torch, an attention backend that knows draft trees, and
half-precision matrix products for processors without bfloat16 instructions.
"""
