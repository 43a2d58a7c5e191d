"""Compiles the C++ of this folder for the machine it runs on, once, into a library on disk."""

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

from paceline.errors import InvalidOption
from paceline.files.wheels import cache_folder

_FOLDER = Path(__file__).parent
_SOURCES = ("simd.h", "team.h", "product.h", "attention.h", "layer.h", "groups.h", "noise.h", "layers.cpp")
# No contraction: which products and sums become one rounding must not differ between the copies of a template.
_FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-w")
# The first that the compiler takes: some for ARM know only -mcpu, and Apple's has no OpenMP, so that one thread runs.
_TRIES = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-march=native",), ("-mcpu=native",))
_COMPILERS = ("g++", "clang++", "c++")


def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they cannot be had (`obstacle` says why)."""
    return found if isinstance(found := _found(), ctypes.CDLL) else None


def obstacle() -> InvalidOption | None:
    """Why there are no kernels, and what to do about it; None where there are."""
    return found if isinstance(found := _found(), InvalidOption) else None


@cache
def _found() -> ctypes.CDLL | InvalidOption:
    """Tried once: a compiler that fails takes its time."""
    if os.environ.get("PACELINE_NATIVE") == "0":
        return InvalidOption("PACELINE_NATIVE is 0")
    try:
        return loaded(compiled())
    except InvalidOption as error:
        return error


def loaded(path: Path) -> ctypes.CDLL:
    """Raises `InvalidOption` where the file is no library for this machine."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise InvalidOption(f"the CPU kernels cannot be loaded: {error}", f"Delete {path}") from error


def compiled() -> Path:
    """Where the library lies, compiled first if it does not yet. Raises `InvalidOption` where that cannot be done."""
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
    """Where `compiled` puts the library for this machine."""
    return cache_folder() / f"native-{_fingerprint()}.so"


def built_for(library: ctypes.CDLL) -> str:
    """Whose instructions a library uses: "AVX-512 BF16/VNNI", "AVX2", ..."""
    said = library.paceline_built_for
    said.restype = ctypes.c_char_p
    return str(said().decode())


@cache
def multiplies_bfloat16() -> bool:
    """Whether the library has the processor's own instruction for bfloat16 products: else torch's are faster."""
    found = library()
    return found is not None and "BF16" in built_for(found)


def _compiler() -> list[str]:
    """The compiler that CXX names, with its options, else the first that is installed; empty without one."""
    try:
        if named := shlex.split(os.environ.get("CXX", "")):
            return named
    except ValueError as error:
        raise InvalidOption(
            f"CXX cannot be read ({error})", "Give it as for a shell: a compiler and options"
        ) from error
    return next(([found] for name in _COMPILERS if (found := shutil.which(name))), [])


def _compile(command: Sequence[str]) -> None:
    complaints = []
    for flags in _TRIES:
        complaint = _complaint([*command, *flags])
        if complaint is None:
            return
        complaints.append(complaint)
    said = complaints[0].splitlines()
    reason = next((line for line in said if "error" in line), said[-1])
    raise InvalidOption(
        f"{command[0]} could not compile the CPU kernels: {reason[:300]}",
        "Name another compiler in CXX",
    )


def _complaint(command: Sequence[str]) -> str | None:
    """What a compiler says when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return error.strerror or str(error)
    return (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else None


def _fingerprint() -> str:
    """Of the sources, the compiler and the processor: a home folder may be shared by several machines."""
    parts = [(_FOLDER / name).read_bytes() for name in _SOURCES]
    parts += [repr((_FLAGS, _TRIES, _compiler(), platform.machine(), sorted(cpu_flags()))).encode()]
    return sha256(b"".join(parts)).hexdigest()[:16]


@cache
def cpu_flags() -> frozenset[str]:
    """What the processor can do, in Linux's words; empty where nobody says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1] for line in lines if line.startswith(("flags", "Features"))), "").split())
