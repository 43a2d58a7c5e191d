"""Kernels for all instruction sets, not only the best. `python -m tests.support.instruction_sets` compiles them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, update_wrapper
from pathlib import Path

import pytest

from paceline.kernels.cpu import build, delta
from paceline.kernels.cpu.build import SETS, available, compiled, library, library_for, loaded
from paceline.kernels.cpu.toolchain import InstructionSet
from paceline.sampling import noise

FUSED = [SETS[name] for name in available() if name not in ("portable", "sse4")]
"""Instruction sets of this processor with fused multiply-adds, which compute the same bits."""


def _emulated() -> list[InstructionSet]:
    """Return the instruction sets that this processor lacks, emulated in plain C++, and always the largest set."""
    names = ("avxvnni", "avx512", "avx512vnni", "avx512bf16")
    header = str(Path(__file__).parents[1] / "kernels" / "emulated.h")
    return [
        InstructionSet(f"{name}-emulated", (*SETS["avx2"].flags, f"-DEMULATED={level}", "-include", header, "-O1"))
        for level, name in enumerate(names)
        if name not in available() or name == names[-1]
    ]


EMULATED = _emulated() if "avx2" in available() else []

# SSE 4.1 has no fused multiply-add. With it, its code represents other processors' code with 16-byte vectors.
SAME_BITS = [*([InstructionSet("sse4-fma", ("-mfma", "-O1"))] if "avx2" in available() else []), *FUSED]
"""Instruction sets that this processor runs and that compute the same bits."""


@contextmanager
def using(instructions: InstructionSet) -> Iterator[None]:
    """Create models with the kernels for these instructions inside the context."""
    lib = build.library() and loaded(library_for(instructions))
    with pytest.MonkeyPatch.context() as patch:
        if lib:
            patch.setattr(build, "_library_or_error", update_wrapper(lambda: lib, build._library_or_error.__wrapped__))
        # These cache a function of a library.
        for kept in (noise._native, delta._kernel):
            patch.setattr(sys.modules[kept.__module__], kept.__name__, cache(kept.__wrapped__))
        yield


if __name__ == "__main__" and library():
    every = {one.name: one for one in (*(SETS[name] for name in available()), *SAME_BITS[:1], *EMULATED)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for path in pool.map(compiled, every.values()):
            print(path)
