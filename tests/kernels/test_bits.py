"""The same bits on every instruction set of this processor, and on emulated ARM instruction sets."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.kernels.cpu import toolchain
from paceline.kernels.cpu.build import SETS, available, compiled, library
from paceline.kernels.cpu.toolchain import InstructionSet, find_compiler, sets_of
from tests.support.instruction_sets import FUSED

pytestmark = [pytest.mark.slow, pytest.mark.skipif(library() is None, reason="there is no C++ compiler")]

DRIVER = Path(__file__).with_name("bits.cpp")
ARM, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PROCESSORS = {"neon": "cortex-a53", "neondot": "cortex-a76", "neoni8mm": "max"}
"""ARM instruction set -> a processor without larger instruction sets."""

VANISHING = "product BF16 vanishing"
"""The result that may differ with AVX-512 BF16, because of AMD's processors: sums below 2^-126."""

needs_arm = pytest.mark.skipif(
    platform.machine() == "aarch64" or not (shutil.which(ARM) and shutil.which(EMULATOR)),
    reason=f"there is no {ARM}, or no {EMULATOR} (Debian: apt install g++-aarch64-linux-gnu qemu-user)",
)


def bits(one: InstructionSet, folder: Path, *emulator: str) -> dict[str, str]:
    """Return the hash of each result, computed with the library that users of the set have."""
    built, program = compiled(one), folder / one.name
    flags = ("-std=c++17", "-O1", "-ffp-contract=off", "-w", *one.flags, "-I", str(Path(toolchain.__file__).parent))
    link = ("-pthread", f"-Wl,-rpath,{built.parent}")
    subprocess.run([*find_compiler(), *flags, str(DRIVER), str(built), *link, "-o", str(program)], check=True)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=True, timeout=1200)
    found = dict(line.split("\t") for line in done.stdout.splitlines())
    assert len(found) > 100
    assert not {"NaN", "failed"} & {*found.values()}
    assert found["attention of floats"] == found["attention of pairs"]
    for name in (name for name in found if "threads: 3" in name):
        assert found[name] == found[name.replace("threads: 3", "threads: 1")], name
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if not FUSED:
        pytest.skip("this processor has no fused multiply-add")
    return bits(FUSED[0], tmp_path_factory.mktemp("bits"))


@pytest.mark.parametrize("one", FUSED[1:], ids=lambda one: one.name)
def test_sets_of_this_processor(one: InstructionSet, expected: dict[str, str], tmp_path: Path) -> None:
    found = bits(one, tmp_path)
    differing = {key for key in expected if found[key] != expected[key]}
    assert differing <= ({VANISHING} if one.name == "avx512bf16" else set())


@needs_arm
@pytest.mark.parametrize("name", PROCESSORS)
def test_sets_of_arm(name: str, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", ARM)
    emulator = (EMULATOR, "-L", "/usr/aarch64-linux-gnu", "-cpu", PROCESSORS[name])
    assert bits(sets_of("aarch64")[name], tmp_path, *emulator) == expected


@pytest.mark.skipif("sse4" not in available(), reason="this processor has no SSE 4.1")
def test_without_fused_multiply_add_bits_are_others(expected: dict[str, str], tmp_path: Path) -> None:
    small, portable = bits(SETS["sse4"], tmp_path), bits(SETS["portable"], tmp_path)
    assert small == portable
    assert portable["product Q4_K"] != expected["product Q4_K"]
    assert portable["packed Q4_K"] == expected["packed Q4_K"]
