"""The same bits on every instruction set, from single products to sampled texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline import Sampling
from paceline.cache.state import Tree
from paceline.kernels.cpu.build import library
from paceline.kernels.cpu.convolution import convolve
from paceline.kernels.cpu.matrix import NativeLinear, NativeNorm
from paceline.kernels.cpu.toolchain import InstructionSet
from paceline.kernels.quantize import Mode
from paceline.testing import run
from paceline.types import Draft
from paceline.verify.tree import pack, pack_prefix
from tests.support.cache_witness import CPU, HEADS, KV, LAYERS, Witness
from tests.support.gguf_blocks import HALVES, stored
from tests.support.instruction_sets import EMULATED, SAME_BITS, using
from tests.support.native_models import BASE, GEMMA4, GEMMA4_MOE, MODELS, RECURRENT, native, text, whole
from tests.support.native_products import KINDS, make, random

pytestmark = [pytest.mark.slow, pytest.mark.skipif(library() is None, reason="there is no C++ compiler")]


@pytest.fixture(params=["here", "emulated"])
def sets(request: pytest.FixtureRequest) -> list[InstructionSet]:
    """Instruction sets with fused multiply-adds."""
    return SAME_BITS if request.param == "here" else [SAME_BITS[-1], *EMULATED]


def same_on(sets: list[InstructionSet], compute: Callable[[], Tensor | list[Tensor]]) -> None:
    results = []
    for one in sets:
        with using(one):
            result = compute()
        results.append(result if isinstance(result, list) else [result])
    for one, result in zip(sets, results, strict=True):
        for x, y in zip(result, results[0], strict=True):
            assert torch.equal(x, y), (one.name, sets[0].name)


@pytest.mark.parametrize("kind", KINDS)
def test_products(sets: list[InstructionSet], kind: str) -> None:
    def compute() -> list[Tensor]:
        out = []
        for rows in (1, 3, 8, 13):
            for size in (1e-30, 1e-3, 1.0, 1e4):
                x = random(rows, 208, seed=rows) * size
                ours, _, _ = make(kind, 130, 208)
                out += [ours.precise(x), ours(x.bfloat16())]
        return out

    same_on(sets, compute)


@pytest.mark.parametrize("kind", HALVES)
def test_products_of_ggufs_types(sets: list[InstructionSet], kind: str) -> None:
    matrix, _ = stored(kind, 37, 512)
    same_on(
        sets, lambda: [NativeLinear(matrix, None).precise(random(rows, 512, seed=rows)) for rows in (1, 3, 8, 13, 19)]
    )


def test_norms(sets: list[InstructionSet]) -> None:
    x = torch.cat([random(5, 576).bfloat16(), random(5, 576).bfloat16() * 1e-20])
    same_on(sets, lambda: [NativeNorm(random(576, seed=1), 1e-5)(rows) for rows in (x, x.float())])


@pytest.mark.parametrize("bias", [None, random(77, seed=4)], ids=["no bias", "bias"])
@pytest.mark.parametrize("activated", [False, True])
def test_short_convolutions(sets: list[InstructionSet], bias: Tensor | None, activated: bool) -> None:
    history = Tree((-1, 0, 0, 1, 2)).history(4)
    before, entries, weight = random(3, 77, seed=1), random(5, 77, seed=2), random(4, 77, seed=3)
    same_on(sets, lambda: convolve(before, entries, history, weight, bias, activated))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_attention_of_layers_that_torch_computes(sets: list[InstructionSet], stored: torch.dtype) -> None:
    """Check a prompt chunk and a tree, in layers with windows, chunks and softcaps."""

    def compute() -> list[Tensor]:
        witness = Witness(dtype=torch.float32, stored=stored, kernel=True)
        slot, out = witness.acquire(), list[Tensor]()
        for rows in (pack_prefix([0] * 90, slot, 0, CPU), pack([0], [Draft((1, 2, 3), (0, 0, 1))], [slot], [90], CPU)):
            view, count = witness.cache.begin(rows), rows.tokens.shape[1]
            out += [view.attend(i, *(witness.draw(1, count, n) for n in (HEADS, KV, KV))) for i in range(len(LAYERS))]
            witness.cache.commit(rows, [range(1, 90)] if not out[5:] else [[1]])
        return out

    same_on(sets, compute)


@pytest.mark.parametrize("mode", ["int4", "int8", None])
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma2",
        GEMMA4,
        GEMMA4_MOE,
        *RECURRENT,
        "gelu",
        "heads of 80",
        "a mixture",
        "no size in whole lanes",
    ],
)
def test_layers_with_attention_over_a_long_text(sets: list[InstructionSet], name: str, mode: Mode | None) -> None:
    def compute() -> list[Tensor]:
        logits, taps = whole(native(replace(BASE, **MODELS[name]), mode), text(150), (1, 2, "final"))
        return [logits, *taps.values()]

    same_on(sets, compute)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_layers_in_other_float_types(sets: list[InstructionSet], dtype: torch.dtype) -> None:
    c = replace(BASE, **MODELS["gemma of odd sizes"])
    same_on(sets, lambda: [whole(native(c, dtype=dtype), text(150))[0]])


@pytest.mark.parametrize("mode", ["int4", None])
def test_texts(sets: list[InstructionSet], mode: Mode | None) -> None:
    def compute() -> list[Tensor]:
        target = native(replace(BASE, layers=4), mode)
        samplings = (Sampling(max_new_tokens=60), Sampling(max_new_tokens=60, temperature=1.0, seed=3))
        return [torch.tensor(run(target, text(30), sampling)[0]) for sampling in samplings]

    same_on(sets, compute)
