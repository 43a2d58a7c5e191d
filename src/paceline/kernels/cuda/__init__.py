"""Decoding on a CUDA device: attention with lengths on the device, products of one tile shape, one CUDA graph per pass.

Nothing here has run on a GPU yet: the kernels were tested in Triton's interpreter, everything else on the CPU with a
tape in place of the graphs (tests/kernels/cuda). So `load` uses it only with `exact=True`.
"""

from __future__ import annotations

from importlib.util import find_spec


def has_triton() -> bool:
    """Whether the kernels can be compiled here."""
    return find_spec("triton") is not None
