"""Instruction sets, and how the C++ of this folder is compiled for one.

Imports the standard library alone: the hook that builds wheels loads this file by its path.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

_FOLDER = Path(__file__).parent
_SOURCES = sorted(path for path in _FOLDER.iterdir() if path.suffix in (".h", ".cpp"))
# No contraction: which products and sums become one rounding must not differ between the copies of a template.
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden", "-shared", "-w")
# On Windows, GCC keeps vectors of 32 and 64 bytes at addresses that are not multiples of that (GCC bug 54412).
_COMPILERS = ("clang++",) if os.name == "nt" else ("g++", "clang++", "c++")


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """`flags`: of the compiler. `needs`: features of the processor, as `processor_features` names them."""

    name: str
    flags: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()

    def plus(self, name: str, *features: str) -> InstructionSet:
        """A larger set."""
        return InstructionSet(name, (*self.flags, *(f"-m{x}" for x in features)), self.needs | {*features})


def sets_of(machine: str) -> dict[str, InstructionSet]:
    """Instruction sets by name, the best last, of an architecture as `platform.machine` names it."""
    sets = [portable := InstructionSet("portable")]
    if machine.lower() in ("x86_64", "amd64"):
        sse4 = InstructionSet("sse4", ("-msse4.1",), frozenset({"sse41"}))
        avx2 = portable.plus("avx2", "avx2", "fma", "f16c")
        avx512 = avx2.plus("avx512", "avx512f", "avx512bw", "avx512dq", "avx512vl")
        vnni = avx512.plus("avx512vnni", "avx512vnni")
        sets += [sse4, avx2, avx2.plus("avxvnni", "avxvnni"), avx512, vnni, vnni.plus("avx512bf16", "avx512bf16")]
    elif machine.lower() in ("aarch64", "arm64"):
        dot = InstructionSet("neondot", ("-march=armv8.2-a+dotprod",), frozenset({"dot"}))
        i8mm = InstructionSet("neoni8mm", ("-march=armv8.2-a+dotprod+i8mm",), dot.needs | {"i8mm"})
        sets = [InstructionSet("neon"), dot, i8mm]  # NEON itself is a part of the architecture
    return {one.name: one for one in sets}


def flags_of(instructions: InstructionSet, system: str | None = None) -> tuple[str, ...]:
    """Flags of the compiler, for this or another system as `platform.system` names it."""
    own = () if (system or platform.system()) == "Windows" else ("-fPIC", "-pthread")
    return (*_FLAGS, *own, *instructions.flags)


def compile_command(compiler: Sequence[str], flags: Sequence[str], to: Path) -> list[str]:
    """The command that compiles a library."""
    return [*compiler, *flags, str(_FOLDER / "layers.cpp"), "-o", str(to)]


def find_compiler() -> list[str]:
    """The compiler that CXX names, with its options, else the first that is installed; empty if there is none. Raises
    `ValueError` if CXX cannot be read."""
    if named := shlex.split(os.environ.get("CXX", "")):
        return named
    return next(([found] for name in _COMPILERS if (found := shutil.which(name))), [])


def packaged_name(instructions: InstructionSet) -> str:
    """Name of a library in a wheel, with a fingerprint: one of other sources is not loaded."""
    return f"{instructions.name}-{fingerprint(flags_of(instructions))}.so"


def fingerprint(*parts: object) -> str:
    """Hash of the sources and of what else a library depends on."""
    content = [path.read_bytes() for path in _SOURCES]
    return sha256(b"".join([*content, repr(parts).encode()])).hexdigest()[:16]
