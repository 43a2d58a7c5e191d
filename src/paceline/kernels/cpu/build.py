"""The library of kernels for the best instruction set of this processor, from the wheel or compiled once."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from paceline.errors import InvalidOption
from paceline.files.wheels import cache_folder
from paceline.kernels.cpu.toolchain import (
    InstructionSet,
    compile_command,
    find_compiler,
    fingerprint,
    flags_of,
    packaged_name,
    sets_of,
)

_PACKAGED = Path(__file__).with_name("lib")

SETS = sets_of(platform.machine())
"""Instruction sets of this machine's architecture by name, the best last."""


def library() -> ctypes.CDLL | None:
    """The compiled kernels; None if they are not available (`obstacle` says why)."""
    return found if isinstance(found := _found(), ctypes.CDLL) else None


def obstacle() -> InvalidOption | None:
    """Why the kernels are not available, and what to do about it; None if they are."""
    return found if isinstance(found := _found(), InvalidOption) else None


def kernel(name: str, *argtypes: type) -> Any:
    """The C function `name` of the library, which must be available, for arguments of these ctypes types."""
    function = getattr(library(), name)
    function.argtypes = argtypes
    return function


@cache
def _found() -> ctypes.CDLL | InvalidOption:
    """The library, or why there is none. Tried once: a compiler that fails takes its time."""
    if os.environ.get("PACELINE_NATIVE") == "0":
        return InvalidOption("PACELINE_NATIVE is 0")
    instruction_set()  # an option that is wrong is raised, unlike a compiler that is missing
    try:
        return loaded(find())
    except InvalidOption as error:
        return error


def loaded(path: Path) -> ctypes.CDLL:
    """Load a library. Raises `InvalidOption` if the file is not one for this machine."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise InvalidOption(f"the CPU kernels cannot be loaded: {error}", f"Delete {path}") from error


def find() -> Path:
    """Path of the library for `instruction_set()`, or for a smaller set if the compiler is older than the processor.
    Raises `InvalidOption` if there is none and none can be compiled."""
    first = instruction_set()
    try:
        return library_for(first)
    except InvalidOption as error:
        smaller = [] if os.environ.get("PACELINE_ISA") else available()[-2::-1]
        for name in smaller:
            with suppress(InvalidOption):
                return library_for(SETS[name])
        raise error


def library_for(instructions: InstructionSet) -> Path:
    """Path of the library for these instructions: the one that a wheel brought, else one that is `compiled`."""
    packaged = _PACKAGED / packaged_name(instructions)
    return packaged if packaged.is_file() else compiled(instructions)


def compiled(instructions: InstructionSet) -> Path:
    """Path of the library for these instructions in the cache, where it is compiled if it is missing. Raises
    `InvalidOption` if that fails."""
    compiler, place = _compiler(), library_path(instructions)
    if place.is_file():
        return place
    if not compiler:
        raise InvalidOption(
            "there is no C++ compiler on this machine to build the fast CPU kernels with",
            "Install g++ (Debian: apt install g++) or clang",
        )
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            built = Path(folder) / place.name
            _compile(compile_command(compiler, flags_of(instructions), built))
            built.replace(place)
    except OSError as error:
        raise InvalidOption(
            f"the CPU kernels cannot be stored in {place.parent} ({error.strerror or error})",
            "Name a folder that can be written in PACELINE_CACHE",
        ) from error
    return place


def library_path(instructions: InstructionSet) -> Path:
    """Path in the cache of the library for these instructions, whether it exists or not."""
    # A home folder may be shared by several machines.
    of = fingerprint(flags_of(instructions), _compiler(), platform.machine())
    return cache_folder() / f"native-{instructions.name}-{of}.so"


def instruction_set() -> InstructionSet:
    """The set that PACELINE_ISA names, else the best that this processor has. Raises `InvalidOption` if it has not."""
    has = available()
    name = os.environ.get("PACELINE_ISA") or has[-1]
    if name not in has:
        state = "this processor does not have it" if name in SETS else "there is no such instruction set"
        raise InvalidOption(f"PACELINE_ISA is {name}, but {state}", f"Name one of {', '.join(has)}, or unset it")
    return SETS[name]


def available() -> list[str]:
    """Names of the instruction sets that this processor has, the best last."""
    return [name for name, one in SETS.items() if one.needs <= processor_features()]


def built_for(library: ctypes.CDLL) -> str:
    """Instruction set that a library was compiled for: "AVX-512 BF16/VNNI", "AVX2", ..."""
    name = library.paceline_built_for
    name.restype = ctypes.c_char_p
    return str(name().decode())


def _compiler() -> list[str]:
    try:
        return find_compiler()
    except ValueError as error:
        raise InvalidOption(
            f"CXX cannot be read ({error})", "Give it as for a shell: a compiler and options"
        ) from error


def _compile(command: Sequence[str]) -> None:
    message = _failure(command)
    if message is None:
        return
    lines = message.splitlines()
    reason = next((line for line in lines if "error" in line), lines[-1])
    raise InvalidOption(
        f"{command[0]} could not compile the CPU kernels: {reason[:300]}", "Name another compiler in CXX"
    )


def _failure(command: Sequence[str]) -> str | None:
    """The message of a compiler that fails; None if it succeeds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return error.strerror or str(error)
    return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else None


@cache
def processor_features() -> frozenset[str]:
    """Features of the processor that the operating system has switched on, named as by GCC's flags."""
    # Linux first: the kernels can then be compiled while pip still installs torch (Makefile).
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = next((line.split(":")[1] for line in lines if line.startswith(("flags", "Features"))), "")
        return frozenset(names.replace("_", "").replace("asimddp", "dot").split())
    import torch

    if not hasattr(torch.cpu, "get_capabilities"):
        return _level()
    found = torch.cpu.get_capabilities()
    return frozenset(name.replace("_", "").replace("fma3", "fma") for name, has in found.items() if has)


def _level() -> frozenset[str]:
    """Features that are certain where neither the system nor torch lists them (macOS and Windows with torch 2.9)."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        names = {"dot": b"FEAT_DotProd", "i8mm": b"FEAT_I8MM"}
        return frozenset(name for name, feature in names.items() if _apple_has(feature))
    import torch

    avx2 = {"sse41", "avx2", "fma", "f16c"}
    levels = {"AVX2": avx2, "AVX512": avx2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}
    return frozenset(levels.get(torch.backends.cpu.get_cpu_capability(), ()))


def _apple_has(feature: bytes) -> bool:
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    name = b"hw.optional.arm." + feature
    failed = ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return not failed and value.value != 0
