"""Compile the C++ of this folder for this machine, once, into a library on disk."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from paceline.errors import InvalidOption
from paceline.files.wheels import cache_folder

_FOLDER = Path(__file__).parent
_SOURCES = ("simd.h", "barrier.h", "product.h", "attention.h", "layer.h", "groups.h", "noise.h", "layers.cpp")
# No contraction: which products and sums become one rounding must not differ between the copies of a template.
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-w")
# The first that the compiler accepts: some for ARM know only -mcpu, and Apple's has no OpenMP, so it runs one thread.
_ALTERNATIVES = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",))
_COMPILERS = ("g++", "clang++", "c++")


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
    try:
        return loaded(compiled())
    except InvalidOption as error:
        return error


def loaded(path: Path) -> ctypes.CDLL:
    """Load a library. Raises `InvalidOption` if the file is not one for this machine."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise InvalidOption(f"the CPU kernels cannot be loaded: {error}", f"Delete {path}") from error


def compiled() -> Path:
    """Path of the library, compiled if it is missing. Raises `InvalidOption` if that fails."""
    compiler, place = _compiler(), library_path()
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
            _compile([*compiler, *_FLAGS, str(_FOLDER / "layers.cpp"), "-o", str(built)])
            built.replace(place)
    except OSError as error:
        raise InvalidOption(
            f"the CPU kernels cannot be stored in {place.parent} ({error.strerror or error})",
            "Name a folder that can be written in PACELINE_CACHE",
        ) from error
    return place


def library_path() -> Path:
    """Path of the library for this machine, whether it exists or not."""
    return cache_folder() / f"native-{_fingerprint()}.so"


def built_for(library: ctypes.CDLL) -> str:
    """Instruction set that a library was compiled for: "AVX-512 BF16/VNNI", "AVX2", ..."""
    name = library.paceline_built_for
    name.restype = ctypes.c_char_p
    return str(name().decode())


@cache
def multiplies_bfloat16() -> bool:
    """Whether the library multiplies bfloat16 by an instruction of its own; otherwise torch is faster."""
    found = library()
    return found is not None and "BF16" in built_for(found)


def _compiler() -> list[str]:
    """The compiler that CXX names, with its options, else the first that is installed; empty if there is none."""
    try:
        if named := shlex.split(os.environ.get("CXX", "")):
            return named
    except ValueError as error:
        raise InvalidOption(
            f"CXX cannot be read ({error})", "Give it as for a shell: a compiler and options"
        ) from error
    return next(([found] for name in _COMPILERS if (found := shutil.which(name))), [])


def _compile(command: Sequence[str]) -> None:
    messages = []
    for flags in _ALTERNATIVES:
        message = _failure([*command, *flags])
        if message is None:
            return
        messages.append(message.splitlines())
    reason = next((line for line in messages[0] if "error" in line), messages[0][-1])
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


def _fingerprint() -> str:
    """Hash of sources, compiler and processor: a home folder may be shared by several machines."""
    parts = [(_FOLDER / name).read_bytes() for name in _SOURCES]
    parts += [repr((_FLAGS, _ALTERNATIVES, _compiler(), platform.machine(), sorted(cpu_flags()))).encode()]
    return sha256(b"".join(parts)).hexdigest()[:16]


@cache
def cpu_flags() -> frozenset[str]:
    """Features of the processor, as Linux names them; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1] for line in lines if line.startswith(("flags", "Features"))), "").split())
