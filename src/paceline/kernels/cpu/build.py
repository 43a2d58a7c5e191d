"""Find or compile the kernel library for the best instruction set of this processor."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from paceline.errors import InvalidOption
from paceline.files.wheels import cache_folder, work_folder
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
"""Instruction sets of this machine's architecture by name, best last."""


def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None if they are not available (`obstacle` gives the reason)."""
    return result if isinstance(result := _library_or_error(), ctypes.CDLL) else None


def obstacle() -> InvalidOption | None:
    """Return the error that keeps the kernels from being used, or None if they are available."""
    return result if isinstance(result := _library_or_error(), InvalidOption) else None


def kernel(name: str, *argtypes: type) -> Any:
    """Return the C function `name` with these argument types. The library must be available."""
    function = getattr(library(), name)
    function.argtypes = argtypes
    return function


@cache
def _library_or_error() -> ctypes.CDLL | InvalidOption:
    """Return the library, or the error if there is none. The result is cached, since a failing compiler is slow."""
    if os.environ.get("PACELINE_NATIVE") == "0":
        return InvalidOption("PACELINE_NATIVE is 0")
    instruction_set()  # raises for a wrong option, while a missing compiler is only reported
    try:
        return loaded(find())
    except InvalidOption as error:
        return error


def loaded(path: Path) -> ctypes.CDLL:
    """Load a library.

    Raises:
        InvalidOption: If the file is not a library for this machine.
    """
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise InvalidOption(
            f"the CPU kernels cannot be loaded: {error}", f"Delete {path}; it will be compiled again"
        ) from error


def find() -> Path:
    """Return the path of the library for `instruction_set()`.

    If the compiler is too old for this processor, the path is for a smaller instruction set.

    Raises:
        InvalidOption: If there is no library and none can be compiled.
    """
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
    """Return the path of the library for these instructions: from the wheel if it has one, else `compiled`."""
    packaged = _PACKAGED / packaged_name(instructions)
    return packaged if packaged.is_file() else compiled(instructions)


def compiled(instructions: InstructionSet) -> Path:
    """Return the path of the library for these instructions in the cache. Compile it if it is missing.

    Raises:
        InvalidOption: If there is no compiler, it fails, or the library cannot be written.
    """
    compiler, place = _compiler(), library_path(instructions)
    if place.is_file():
        return place
    if not compiler:
        raise InvalidOption(
            "the fast CPU kernels need a C++ compiler, and none is installed",
            "Install g++ (Debian: apt install g++) or clang",
        )
    try:
        with work_folder(place.parent, ".compile-") as folder:
            built = folder / place.name
            _compile(compile_command(compiler, flags_of(instructions), built))
            built.replace(place)
    except OSError as error:
        raise InvalidOption(
            f"the CPU kernels cannot be stored in {place.parent} ({error.strerror or error})",
            "Set PACELINE_CACHE to a writable folder",
        ) from error
    return place


def library_path(instructions: InstructionSet) -> Path:
    """Return the path in the cache of the library for these instructions. The file may not exist yet."""
    # The name contains the machine and the compiler, because several machines may share a home folder.
    suffix = fingerprint(flags_of(instructions), _compiler(), platform.machine())
    return cache_folder() / f"native-{instructions.name}-{suffix}.so"


def instruction_set() -> InstructionSet:
    """Return the instruction set that PACELINE_ISA names, or else the best one that this processor has.

    Raises:
        InvalidOption: If PACELINE_ISA names an instruction set that does not exist or that this processor lacks.
    """
    has = available()
    name = os.environ.get("PACELINE_ISA") or has[-1]
    if name not in has:
        state = "which this processor does not have" if name in SETS else "which is not an instruction set"
        raise InvalidOption(f"PACELINE_ISA is {name}, {state}", f"Set it to one of {', '.join(has)}, or unset it")
    return SETS[name]


def available() -> list[str]:
    """Return the names of the instruction sets that this processor has, best last."""
    return [name for name, one in SETS.items() if one.needs <= processor_features()]


def built_for(library: ctypes.CDLL) -> str:
    """Return the instruction set that a library was compiled for, such as "AVX2" or "AVX-512 BF16/VNNI"."""
    name = library.paceline_built_for
    name.restype = ctypes.c_char_p
    return str(name().decode())


def _compiler() -> list[str]:
    try:
        return find_compiler()
    except ValueError as error:
        raise InvalidOption(
            f"the environment variable CXX cannot be parsed: {error}",
            "Write a compiler and its options as in a shell, for example CXX='clang++ -v'",
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
    """Run a compiler. Return its message if it fails, None if it succeeds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return error.strerror or str(error)
    return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else None


@cache
def processor_features() -> frozenset[str]:
    """Return the processor's features that the operating system has enabled, named like GCC's flags."""
    # On Linux this works without torch, so the Makefile can compile the kernels while pip is still installing torch.
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
    """Return the features that are known for certain if neither the system nor torch lists them.

    This is the case on macOS and Windows with torch 2.9.
    """
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
