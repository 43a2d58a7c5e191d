"""The C++ kernels: products and norms with every build, and the build itself."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import InvalidOption, OutOfMemory, is_out_of_memory
from paceline.kernels.activations import ACTIVATIONS
from paceline.kernels.cpu import build
from paceline.kernels.cpu.build import SETS, available, find, instruction_set, library, library_path
from paceline.kernels.cpu.matrix import NativeGated, NativeLinear, NativeNorm
from paceline.kernels.cpu.toolchain import sets_of
from paceline.kernels.linear import _Coded
from paceline.kernels.quantize import Codes, quantize, round_activations
from paceline.models.norms import RMSNorm
from tests.support.native_products import KINDS, make, random

needs_kernels = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
FOLDER = Path(build.__file__).parent
WARNINGS = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wno-unknown-pragmas")


SHAPES = [(16, 32), (130, 208), (5, 48), (33, 16), (96, 64), (20, 37), (1, 512)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 40]


def values(weight: Tensor | Codes) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantised()


def expected(weight: Tensor | Codes, bias: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the product in float64, and the tolerance for float32 sums."""
    if isinstance(weight, Codes):
        rows = round_activations(x).values(x.shape[-1])
    else:
        rows = x.bfloat16() if weight.dtype == torch.bfloat16 else x
    w, rows = values(weight).double(), rows.double()
    b = torch.zeros(len(w)) if bias is None else bias
    # Values and minima are added in one sum, where a large scale and a large minimum may cancel.
    size = w.abs() if isinstance(weight, Tensor) else w.abs() + 2 * w.abs().amax(1, keepdim=True)
    return rows @ w.T + b.double(), 1e-6 * (rows.abs() @ size.T + b.double().abs())


# --- products -----------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_float64(kernels: None, kind: str) -> None:
    for out, width in SHAPES:
        for bias in (True, False):
            ours, weight, b = make(kind, out, width, bias)
            for count in ROWS:
                for x in (random(count, width, seed=count), random(count, width, seed=count).bfloat16()):
                    y, bound = expected(weight, b, x)
                    assert ((ours.precise(x).double() - y).abs() <= bound).all(), (out, width, count, x.dtype)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_come_back_as_they_were_given(kernels: None, kind: str) -> None:
    for out, width in SHAPES:
        ours, weight, _ = make(kind, out, width)
        assert torch.equal(ours.weight(), values(weight))
        assert ours.matrix.nbytes > 0


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_every_form_of_a_product_is_the_precise_one_rounded_once(kernels: None, kind: str) -> None:
    ours, _, _ = make(kind, 37, 80)
    x, residual = random(2, 11, 80).bfloat16(), random(2, 11, 37, seed=5).bfloat16()
    precise = ours.precise(x)
    assert precise.dtype == torch.float32
    assert torch.equal(ours(x), precise.bfloat16())
    assert torch.equal(ours.onto(x, residual), (precise + residual.float()).bfloat16())
    assert torch.equal(ours.onto(x.transpose(0, 1), residual.transpose(0, 1)), ours.onto(x, residual).transpose(0, 1))
    wide = residual.float()
    torch.testing.assert_close(ours.onto(x, wide), wide + ours(x))
    assert torch.equal(ours(x.float()), ours.precise(x.float()))
    torch.testing.assert_close(ours.onto(x.float(), wide), wide + precise)
    assert ours(x[:, :0]).shape == (2, 0, 37)


@needs_kernels
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate_and_up_lie_in_turns_and_come_out_in_order(kernels: None, activation: str) -> None:
    weight, bias, x = random(96, 64).bfloat16(), random(96, seed=1).bfloat16(), random(6, 64, seed=2).bfloat16()
    left, right = (x.float() @ weight.float().T + bias.float()).chunk(2, -1)
    ours = NativeGated(weight, bias, activation)(x)
    torch.testing.assert_close(ours.float(), ACTIVATIONS[activation](left, right), rtol=0.03, atol=0.03)


@needs_kernels
def test_rows_of_another_width_are_refused_and_not_read() -> None:
    ours, _, _ = make("8 bits", 16, 64)
    with pytest.raises(ValueError, match="must have 64 elements per row, got 48"):
        ours(random(4, 48).bfloat16())
    with pytest.raises(ValueError, match="must have 64 elements per row, got 32"):
        NativeNorm(torch.ones(64), 1e-6)(random(2, 32).bfloat16())


@needs_kernels
@given(kind=st.sampled_from(sorted(KINDS)), count=st.integers(1, 20), data=st.data())
def test_a_row_has_the_same_bits_in_any_batch(kernels: None, kind: str, count: int, data: st.DataObject) -> None:
    seed, at = data.draw(st.integers(0, 9)), data.draw(st.integers(0, count - 1))
    ours, _, _ = make(kind, 21, 48)
    x = random(count, 48, seed=seed) * 10.0 ** data.draw(st.integers(-3, 3))
    for rows in (x, x.bfloat16()):
        together, alone = ours.precise(rows), ours.precise(rows[at : at + 1])
        assert torch.equal(together[at], alone[0])
        assert torch.equal(ours.precise(rows[at:])[0], alone[0])


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit_even_where_there_are_more_than_outputs(kernels: None, kind: str) -> None:
    ours, _, _ = make(kind, 40, 48)
    x = random(9, 48)
    alone = ours.precise(x)
    try:
        for threads in (2, 7):
            torch.set_num_threads(threads)
            assert torch.equal(ours.precise(x), alone)
    finally:
        torch.set_num_threads(1)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_stays_so_and_harms_no_other(kernels: None, kind: str, bad: float) -> None:
    ours, _, _ = make(kind, 33, 64)
    x = random(10, 64).bfloat16()
    before = ours.precise(x)
    x[3, 40] = bad
    after = ours.precise(x)
    assert not after[3].isfinite().any()
    others = [0, 1, 2, *range(4, 10)]
    assert torch.equal(after[others], before[others])


@needs_kernels
def test_activations_of_any_size_are_rounded_as_in_python(kernels: None) -> None:
    weight = quantize(random(16, 64), 8)
    ours = NativeLinear(weight, None)
    for size in (0.0, 1e-44, 1e-38, 1e-31, 1e-20, 1e20, 1e30):
        x = random(3, 64) * size
        y, bound = expected(weight, None, x)
        assert ((ours.precise(x).double() - y).abs() <= bound + 1e-30).all(), size


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_give_by_torch_what_the_kernels_give(kernels: None, bits: int) -> None:
    weight, x = quantize(random(40, 208) / 14, bits), random(9, 208)
    bias = random(40, seed=1)
    ours, theirs = NativeLinear(weight, bias), _Coded(weight, bias)
    torch.testing.assert_close(theirs.precise(x), ours.precise(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(theirs.weight(), ours.weight())
    alone = torch.cat([ours.precise(row[None]) for row in x])
    assert torch.equal(alone, ours.precise(x))


@needs_kernels
def test_a_linear_layer_without_memory_names_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _, _ = make("8 bits", 16, 32)
    ours._run = lambda *arguments: 1  # type: ignore[assignment]
    with pytest.raises(OutOfMemory, match="matrix multiplication of 3 rows") as caught:
        ours(random(3, 32))
    assert is_out_of_memory(caught.value)


# --- norms --------------------------------------------------------------------------------------------------------


@needs_kernels
@given(
    count=st.integers(1, 9),
    width=st.sampled_from([16, 19, 576]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 9),
)
def test_norms_equal_float64_and_single_rows(
    kernels: None, count: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    weight, x = random(width, seed=seed + 1), random(count, width, seed=seed).to(dtype) * 3
    ours = NativeNorm(weight, 1e-5)
    y = ours(x)
    root = x.double().square().mean(-1, keepdim=True).add(1e-5).sqrt()
    exact = x.double() / root * weight.double()
    torch.testing.assert_close(y.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    at = seed % count
    assert torch.equal(ours(x[at : at + 1])[0], y[at])
    assert torch.equal(ours(x.expand(2, -1, -1).transpose(0, 1))[at, 1], y[at])


@needs_kernels
def test_a_norm_of_a_row_that_is_not_finite_is_not(kernels: None) -> None:
    x = random(3, 32).bfloat16()
    x[1, 5] = torch.nan
    y = RMSNorm(torch.ones(32), 1e-6)(x)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


# --- building -----------------------------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("PACELINE_NATIVE", raising=False)
    return tmp_path


def script(place: Path, text: str) -> str:
    place.write_text(f"#!/bin/sh\n{text}\n")
    place.chmod(0o755)
    return str(place)


def test_without_a_compiler_the_error_says_what_to_install(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(empty_cache))
    with pytest.raises(InvalidOption, match=r"need a C\+\+ compiler, .* apt install g\+\+"):
        find()
    assert isinstance(build._library_or_error.__wrapped__(), InvalidOption)


@pytest.mark.parametrize("how", ["absent", "fails"])
def test_a_broken_compiler_is_quoted(empty_cache: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    broken = str(empty_cache / "nowhere")
    if how == "fails":
        broken = script(empty_cache / "broken", "echo 'no such standard: $*' >&2; exit 1")
    monkeypatch.setenv("CXX", broken)
    with pytest.raises(InvalidOption, match=r"could not compile .*(no such standard|No such file).* another compiler"):
        find()
    assert isinstance(build._library_or_error.__wrapped__(), InvalidOption)
    assert not list((empty_cache / "cache").iterdir()), "nothing half-built stays behind"


def test_a_library_that_cannot_be_loaded_is_skipped(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The output is the last argument before the options for this processor.
    text = 'while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"'
    monkeypatch.setenv("CXX", script(empty_cache / "odd", text))
    assert find().read_text() == "rubbish\n"
    assert isinstance(build._library_or_error.__wrapped__(), InvalidOption)


@pytest.mark.skipif(len(available()) < 2, reason="this processor has one instruction set")
def test_a_compiler_may_be_older_than_the_processor(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_ISA", raising=False)
    unknown = SETS[available()[-1]].flags[-1]
    text = f'case "$*" in *{unknown}*) exit 1;; esac; while [ "$1" != -o ]; do shift; done; echo "$*" > "$2"'
    monkeypatch.setenv("CXX", script(empty_cache / "old", text))
    assert find() == library_path(SETS[available()[-2]])
    monkeypatch.setenv("PACELINE_ISA", available()[-1])
    with pytest.raises(InvalidOption, match="could not compile"):
        find()


def test_features_where_nothing_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for level, name in {"AVX2": "avx2", "AVX512": "avx512", "DEFAULT": "portable"}.items():
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda level=level: level)
        if "avx2" in SETS:
            assert [s for s, one in SETS.items() if one.needs <= build._level() and "vnni" not in s][-1] == name
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(build, "_apple_has", lambda feature: feature == b"FEAT_DotProd")
    assert build._level() == {"dot"}
    assert [one.name for one in sets_of("arm64").values() if one.needs <= build._level()] == ["neon", "neondot"]


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_every_instruction_set_compiles_without_warnings(name: str) -> None:
    command = [*build._compiler(), *WARNINGS, *SETS[name].flags, "-fsyntax-only", str(FOLDER / "layers.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr


@pytest.mark.slow
@needs_kernels
def test_an_instruction_set_can_be_forced() -> None:
    code = "from paceline.kernels.cpu.build import built_for, library; print(built_for(library()))"
    env = {**os.environ, "PACELINE_ISA": next(iter(SETS))}
    assert ("NEON" if "neon" in SETS else "generic") in subprocess.check_output(
        [sys.executable, "-c", code], env=env, text=True
    )


def test_an_instruction_set_is_the_one_that_is_named_else_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_ISA", raising=False)
    assert instruction_set().name == available()[-1]
    for name in available():
        monkeypatch.setenv("PACELINE_ISA", name)
        assert instruction_set() == SETS[name]
    monkeypatch.setattr(build, "processor_features", lambda: frozenset({"avx2", "fma", "f16c"}))
    for name, cause in {
        "avx513": "which is not an instruction set",
        list(SETS)[-1]: "which this processor does not have",
    }.items():
        monkeypatch.setenv("PACELINE_ISA", name)
        with pytest.raises(
            InvalidOption, match=rf"PACELINE_ISA is {name}, .*{cause}.* one of {', '.join(available())}"
        ):
            build._library_or_error.__wrapped__()


def test_two_processes_may_build_at_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes wait in the compiler, and both get a complete library."""
    text = 'while [ "$1" != -o ]; do shift; done; printf part > "$2"; sleep 0.3; printf " whole" >> "$2"'
    monkeypatch.setenv("CXX", script(empty_cache / "slow", text))

    def build_in_child() -> int:
        if not (child := os.fork()):
            os._exit(0 if find().read_text() == "part whole" else 1)
        return child

    children = [build_in_child() for _ in range(2)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert len(list((empty_cache / "cache").iterdir())) == 1


def test_native_0_finds_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_NATIVE", "0")
    assert "PACELINE_NATIVE is 0" in str(build._library_or_error.__wrapped__())


@pytest.mark.slow
def test_native_0_leaves_everything_to_torch() -> None:
    code = (
        "import torch; from paceline.kernels.cpu.build import library;"
        "from paceline.kernels.linear import linear; from paceline.testing import tiny_target;"
        "t = tiny_target(0, torch.bfloat16, hidden=32, head_dim=16);"
        "print(library(), t._stack.native, type(t._head).__name__)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "PACELINE_NATIVE": "0"}, text=True)
    assert said.split()[:2] == ["None", "None"]
    assert said.split()[2] in ("_Packed", "_Plain")
