"""Decoding on a CUDA device: attention with lengths on the device, products of one tile shape, one CUDA graph per pass.

This code has not run on a GPU yet. The kernels were tested in Triton's interpreter, and the rest on the CPU with a tape
in place of the graphs (tests/kernels/cuda). So `load` uses it only with `exact=True`.
"""

from __future__ import annotations

from importlib.util import find_spec


def has_triton() -> bool:
    """Return True if Triton is installed, which compiles the kernels."""
    return find_spec("triton") is not None
