"""Instruction sets, and the command that compiles this folder's C++ for one of them.

This file imports nothing but the standard library, because the hook that builds wheels loads it by its path.
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
# Without -ffp-contract=off, the compiler may fuse a product and a sum in one instance of a template but not in another,
# and the two would round differently.
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden", "-shared", "-w")
# On Windows, GCC does not align vectors of 32 and 64 bytes on the stack (GCC bug 54412).
_COMPILERS = ("clang++",) if os.name == "nt" else ("g++", "clang++", "c++")


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """An instruction set.

    Attributes:
        name: Name, as in PACELINE_ISA.
        flags: Compiler flags.
        needs: Processor features that it requires, named as in `processor_features`.
    """

    name: str
    flags: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()

    def plus(self, name: str, *features: str) -> InstructionSet:
        """Return a larger set that also requires these features."""
        return InstructionSet(name, (*self.flags, *(f"-m{x}" for x in features)), self.needs | {*features})


def sets_of(machine: str) -> dict[str, InstructionSet]:
    """Return the instruction sets of an architecture by name, best last. `machine` is as from `platform.machine`."""
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
        sets = [InstructionSet("neon"), dot, i8mm]  # NEON itself is part of the architecture
    return {one.name: one for one in sets}


def flags_of(instructions: InstructionSet, system: str | None = None) -> tuple[str, ...]:
    """Return the compiler flags for this system, or for another one named as by `platform.system`."""
    system_flags = () if (system or platform.system()) == "Windows" else ("-fPIC", "-pthread")
    return (*_FLAGS, *system_flags, *instructions.flags)


def compile_command(compiler: Sequence[str], flags: Sequence[str], to: Path) -> list[str]:
    """Return the command that compiles the library to the file `to`."""
    return [*compiler, *flags, str(_FOLDER / "layers.cpp"), "-o", str(to)]


def find_compiler() -> list[str]:
    """Return the compiler and options that CXX names, or else the first installed compiler.

    Returns:
        The beginning of a command; an empty list if there is no compiler.

    Raises:
        ValueError: If CXX cannot be parsed.
    """
    if named := shlex.split(os.environ.get("CXX", "")):
        return named
    return next(([found] for name in _COMPILERS if (found := shutil.which(name))), [])


def packaged_name(instructions: InstructionSet) -> str:
    """Return the name of a library in a wheel. Its fingerprint keeps a library of other sources from being loaded."""
    return f"{instructions.name}-{fingerprint(flags_of(instructions))}.so"


def fingerprint(*parts: object) -> str:
    """Hash the sources and everything else that a library depends on."""
    content = [path.read_bytes() for path in _SOURCES]
    return sha256(b"".join([*content, repr(parts).encode()])).hexdigest()[:16]
