"""Which columns a position's noise may lift to the top: the long loop of `noise.py`."""

from __future__ import annotations

from ctypes import c_float, c_int32, c_uint64, c_void_p
from functools import cache
from typing import Any

import numpy as np

from paceline.kernels.cpu.build import library
from paceline.sampling.truncation import Floats, Ids


def candidates(scores: Floats, tokens: Ids | None, key: int, bound: float, highest: float) -> Ids | None:
    """The columns of float32 `scores`, ascending, whose score and noise may reach `bound`, where no noise passes
    `highest`; None where there is no library."""
    run = _function()
    if run is None or scores.dtype != np.float32:
        return None
    scores = np.ascontiguousarray(scores)
    ids = None if tokens is None else np.ascontiguousarray(tokens, dtype=np.int64)
    found = np.empty(len(scores), dtype=np.int64)
    count = run(
        scores.ctypes.data,
        None if ids is None else ids.ctypes.data,
        len(scores),
        key,
        bound,
        highest,
        found.ctypes.data,
    )
    return found[:count]


@cache
def _function() -> Any:
    lib = library()
    if lib is None:
        return None
    lib.paceline_candidates.argtypes = (c_void_p, c_void_p, c_int32, c_uint64, c_float, c_float, c_void_p)
    return lib.paceline_candidates
