"""Decoding on a CUDA device: attention by a length on the device, products of one tile, one CUDA graph per pass.

Nothing here has run on a GPU yet: the kernels were tried in Triton's interpreter, and everything around them on the CPU
with a tape in the graphs' place (tests/kernels/cuda). So `load` takes it only where it is asked to, by `exact=True`.
"""

from __future__ import annotations

from importlib.util import find_spec


def has_triton() -> bool:
    """Whether the kernels can be compiled here."""
    return find_spec("triton") is not None
