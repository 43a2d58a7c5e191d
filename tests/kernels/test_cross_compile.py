"""The C++ compiles for other systems, with `ziglang` from PyPI as the compiler."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.kernels.cpu.toolchain import InstructionSet, compile_command, flags_of, sets_of

pytestmark = pytest.mark.slow
TARGETS = {
    "x86_64-windows-gnu": ("Windows", "AMD64", b"\x64\x86"),
    "aarch64-macos": ("Darwin", "arm64", b"\xcf\xfa\xed\xfe"),
    "aarch64-linux-gnu": ("Linux", "aarch64", b"\x7fELF"),
    "x86_64-linux-musl": ("Linux", "x86_64", b"\x7fELF"),
}


def _generic(march: re.Match[str]) -> str:
    return f"-mcpu=generic+v{march[1]}{f'_{march[2]}' if march[2] else ''}a"


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., bytes]:
    """Return the compiler's output for a target and an instruction set."""
    pytest.importorskip("ziglang", reason="ziglang is not installed (pip install ziglang)")

    def compile_for(target: str, one: InstructionSet, *more: str) -> bytes:
        compiler = [sys.executable, "-m", "ziglang", "c++", "-target", target]
        # Zig expects the name of a processor there, followed by features.
        own = [re.sub(r"-march=armv(8|9)(?:\.(\d))?-a", _generic, flag) for flag in flags_of(one, TARGETS[target][0])]
        flags = (*own, *more)
        subprocess.run(compile_command(compiler, flags, to := tmp_path / f"{one.name}.so"), check=True)
        return to.read_bytes()

    return compile_for


@pytest.mark.parametrize("target", TARGETS)
def test_instruction_sets_compile(target: str, compiled: Callable[..., bytes]) -> None:
    system, machine, magic = TARGETS[target]
    sets = [*sets_of(machine).values()]
    assert len(sets) > 1
    if system == "Linux":  # whose own compilers compile every set; here the C library or the machine is another
        sets = [sets[0], sets[-1]]
    with ThreadPoolExecutor(2) as pool:
        # Do not link, because Zig would build a C++ library first. Do not optimise, which takes 20 s per set.
        for code in pool.map(lambda one: compiled(target, one, "-O0", "-fno-sanitize=all", "-c"), sets):
            assert code.startswith(magic)
            assert (b"export:paceline_layers" if system == "Windows" else b"paceline_layers") in code.replace(b'"', b"")


def test_a_library_for_windows(compiled: Callable[..., bytes]) -> None:
    assert compiled("x86_64-windows-gnu", sets_of("AMD64")["avx2"], "-s").startswith(b"MZ")
