"""Compiles the C++ of this folder for the machine it runs on, once, into a library on disk."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

from paceline.errors import InvalidOption
from paceline.models.demo import cache_folder

_FOLDER = Path(__file__).parent
_SOURCES = ("simd.h", "product.h", "attention.h", "layers.cpp")
# No contraction: which products and sums become one rounding must not differ between the copies of a template.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fPIC", "-shared", "-w")
_COMPILERS = ("g++", "clang++", "c++")


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None without a C++ compiler, or where PACELINE_NATIVE is 0."""
    if os.environ.get("PACELINE_NATIVE") == "0":
        return None
    try:
        return ctypes.CDLL(str(compiled()))
    except (InvalidOption, OSError):
        return None


def compiled() -> Path:
    """Where the library lies, compiled first if it does not yet. Raises `InvalidOption` where that cannot be done."""
    compiler = next((found for name in _COMPILERS if (found := os.environ.get("CXX") or shutil.which(name))), None)
    place = cache_folder() / f"native-{_fingerprint(compiler)}.so"
    if place.is_file():
        return place
    if compiler is None:
        raise InvalidOption(
            "there is no C++ compiler on this machine, so the fast CPU kernels cannot be built",
            "Install g++ (Debian: apt install g++) or clang; everything runs without them, slower",
        )
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        built = Path(folder) / place.name
        _compile([compiler, *_FLAGS, str(_FOLDER / "layers.cpp"), "-o", str(built)])
        built.replace(place)
    return place


def _compile(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise InvalidOption(
            f"{command[0]} could not compile the CPU kernels: {said.strip()[-2000:]}",
            "Name another compiler in CXX, or set PACELINE_NATIVE=0 to do without them",
        ) from error


def _fingerprint(compiler: str | None) -> str:
    """Of the sources, the compiler and the processor: a home folder may be shared by several machines."""
    parts = [(_FOLDER / name).read_bytes() for name in _SOURCES]
    parts += [repr((_FLAGS, compiler, platform.machine(), sorted(cpu_flags()))).encode()]
    return sha256(b"".join(parts)).hexdigest()[:16]


@cache
def cpu_flags() -> frozenset[str]:
    """What the processor can do, in Linux's words; empty where nobody says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":")[1] for line in lines if line.startswith(("flags", "Features"))), "").split())
