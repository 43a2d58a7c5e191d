"""The kernels' threads: distribution of work, forks, several callers, and a busy machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.kernels.cpu.build import library
from paceline.models.decoder import Decoder
from tests.support.native_models import BASE, MODELS, native, text, whole

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> Decoder:
    return native(replace(BASE, layers=4, **MODELS["llama"]), "int4")


def logits(target: Decoder, threads: int = 4) -> Tensor:
    torch.set_num_threads(threads)
    return whole(target, text(9))[0]


def test_a_forked_child_starts_its_own_threads(target: Decoder) -> None:
    expected = logits(target)
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(logits(target), expected) and torch.equal(logits(target), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(logits(target), expected)


def test_callers_at_once_get_their_own_results(target: Decoder) -> None:
    inputs = [text(9, seed) for seed in range(4)]
    expected = [whole(target, tokens)[0] for tokens in inputs]
    wrong: list[int] = []

    def call(index: int) -> None:
        torch.set_num_threads(4)
        wrong.extend(index for _ in range(30) if not torch.equal(whole(target, inputs[index])[0], expected[index]))

    callers = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not wrong
    assert not any(caller.is_alive() for caller in callers)


def test_the_number_of_threads_may_change_from_pass_to_pass(target: Decoder) -> None:
    expected = logits(target, 1)
    for threads in (8, 2, 1, 5, 3, 300, 2):
        assert torch.equal(logits(target, threads), expected)


@pytest.mark.slow
def test_a_busy_machine_changes_no_bit(target: Decoder) -> None:
    expected = logits(target, 1)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        # Long enough for several trials of fewer threads.
        for _ in range(150):
            assert torch.equal(logits(target), expected)
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.slow
def test_a_program_ends_while_threads_wait() -> None:
    program = "import torch; torch.set_num_threads(4); from tests.support.native_models import *; "
    program += "whole(native(replace(BASE, layers=1)), text(9))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
