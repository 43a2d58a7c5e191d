"""Kernels of another instruction set than the best."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import update_wrapper

import pytest

from paceline.kernels.cpu import build
from paceline.kernels.cpu.build import SETS, available, library_for, loaded
from paceline.kernels.cpu.toolchain import InstructionSet

FUSED = [SETS[name] for name in available() if name not in ("portable", "sse4")]
"""Sets of this processor with fused multiply-adds, whose bits are the same."""


@contextmanager
def using(instructions: InstructionSet) -> Iterator[None]:
    """Context that makes models with the kernels for these instructions."""
    lib = build.library() and loaded(library_for(instructions))
    with pytest.MonkeyPatch.context() as patch:
        if lib:
            patch.setattr(build, "_found", update_wrapper(lambda: lib, build._found.__wrapped__))
        yield
