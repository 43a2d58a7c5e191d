"""A fake compiler for wheels, set in CXX: it copies the library for the same instruction set from the cache.

The tests of instruction sets have usually compiled these libraries already. If a library is not in the cache, it is
compiled there first.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
os.environ.pop("CXX", None)

from paceline.kernels.cpu.build import SETS, compiled
from paceline.kernels.cpu.toolchain import flags_of

SOURCE = Path(__file__).resolve().parents[2] / "src/paceline/kernels/cpu/layers.cpp"


def main(*arguments: str) -> None:
    *flags, source, dash, to = arguments
    assert dash == "-o"
    assert Path(source).read_bytes() == SOURCE.read_bytes()
    (one,) = [one for one in SETS.values() if [*flags_of(one), "-s"] == flags]
    shutil.copy(compiled(one), to)


if __name__ == "__main__":
    main(*sys.argv[1:])
