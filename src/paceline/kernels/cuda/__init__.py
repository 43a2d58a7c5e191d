"""Decoding on a CUDA device: attention that reads lengths from the device, products with a fixed tile shape, and one
CUDA graph per pass.

This code has not run on a GPU yet. The kernels were tested in Triton's interpreter, and the rest was tested on the CPU,
with a recorded tape in place of the graphs (tests/kernels/cuda). Therefore, `load` uses it only with `exact=True`.
"""

from __future__ import annotations

from importlib.util import find_spec


def has_triton() -> bool:
    """Return True if Triton, which compiles the kernels, is installed."""
    return find_spec("triton") is not None
