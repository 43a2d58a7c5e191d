"""Mixtures of experts in C++: a pass reads the experts that its rows chose, and no others."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.kernels.cpu.build import library
from paceline.models.decoder import Decoder
from paceline.models.layers import Mixture
from tests.support.native_models import BASE, MODELS, by_torch, native, text, whole

pytestmark = [
    pytest.mark.skipif(library() is None, reason="there is no C++ compiler"),
    pytest.mark.usefixtures("kernels"),
]
CONFIG = replace(BASE, **MODELS["twenty experts, ragged"])
TOKENS = text(4)


def chosen(tokens: list[int]) -> list[set[int]]:
    """Return the experts of each layer for a text, computed by torch."""
    found: list[set[int]] = []
    own = Mixture._route

    def watched(self: Mixture, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, numbers = own(self, rows)
        found.append({*numbers.flatten().tolist()})
        return weights, numbers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mixture, "_route", watched)
        whole(by_torch(CONFIG, torch.float32), tokens)
    return found


def test_padding_chooses_no_experts_of_its_own() -> None:
    """Check this with torch, where a pass has at least four rows."""
    assert [len(some) for some in chosen(TOKENS[:1])] == [3, 3]


@contextmanager
def without(target: Decoder, lost: list[set[int]]) -> Iterator[None]:
    """Remove the weights of these experts in each layer, so that reading them crashes."""
    layers = target._stack.native
    assert layers
    matrices = [
        matrix
        for layer, numbers in zip(layers._structures, lost, strict=True)
        for number in numbers
        for matrix in (layer.experts[number].gate_up, layer.experts[number].down)
    ]
    held = [matrix.weights for matrix in matrices]
    for matrix in matrices:
        matrix.weights = None
    yield
    for matrix, weights in zip(matrices, held, strict=True):
        matrix.weights = weights


def in_child(check: Callable[[], bool]) -> int:
    """Return the exit status of a child that checks: 0 if it holds, negative for a signal."""
    if not (child := os.fork()):
        faulthandler.disable()
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_pass_reads_only_the_experts_that_its_rows_chose() -> None:
    target, numbers = native(CONFIG, dtype=torch.float32), chosen(TOKENS)
    assert all(len(some) < 12 for some in numbers)
    right, _ = whole(target, TOKENS)

    def same() -> bool:
        return torch.equal(whole(target, TOKENS)[0], right)

    every = {*range(20)}
    with without(target, [every - some for some in numbers]):
        assert in_child(same) == 0
    with without(target, [{max(numbers[0])}, set()]):
        assert in_child(same) == -signal.SIGSEGV
    assert same()
