"""The C++ compiles for systems that are not at hand, with `ziglang` from PyPI as the compiler."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.parametrize("target", TARGETS)
def test_every_instruction_set_compiles(target: str, tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="ziglang is not installed (pip install ziglang)")
    system, machine, magic = TARGETS[target]
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", target]

    def compiled(one: InstructionSet) -> bytes:
        # No linking, for which Zig would first build a C++ library, and nothing is optimised, which takes 20 s a set.
        flags = (*flags_of(one, system), "-O0", "-fno-sanitize=all", "-c")
        subprocess.run(compile_command(compiler, flags, to := tmp_path / f"{one.name}.o"), check=True)
        return to.read_bytes()

    sets = sets_of(machine)
    assert len(sets) > 1
    with ThreadPoolExecutor(2) as pool:
        for code in pool.map(compiled, sets.values()):
            assert code.startswith(magic)
            assert (b"export:paceline_layers" if system == "Windows" else b"paceline_layers") in code.replace(b'"', b"")
