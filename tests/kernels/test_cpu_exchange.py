"""Sums over processes through shared memory. Threads simulate the processes."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from ctypes import addressof, c_int32, c_int64, c_uint8, c_void_p

import pytest
import torch
from torch import Tensor

from paceline.kernels.cpu.build import kernel, library
from paceline.models.ranks import Exchange

pytestmark = pytest.mark.skipif(
    library() is None or sys.platform != "linux", reason="only the kernels on Linux add through memory"
)
RANKS = 3
BOX, PROCESS = 64, 8
"""Bytes of a box, and the offset of its process number."""


def shared() -> tuple[object, list[Exchange]]:
    size = kernel("paceline_exchange_bytes", c_int32)
    size.restype = c_int64
    memory = (c_uint8 * (size(RANKS) + 64))()
    start = -(-addressof(memory) // 64) * 64
    return memory, [Exchange(start, rank, RANKS) for rank in range(RANKS)]


def add(exchange: Exchange, x: Tensor) -> int:
    return int(kernel("paceline_sum", c_void_p, c_void_p, c_int64)(addressof(exchange), x.data_ptr(), x.numel()))


@pytest.mark.parametrize("size", [1, 1000, 65536, 200001])
def test_all_ranks_have_the_sum_in_the_order_of_the_ranks(size: int) -> None:
    memory, exchanges = shared()
    noise = torch.Generator().manual_seed(size)
    for _ in range(5):
        parts = [torch.randn(size, generator=noise) * 10.0**rank for rank in range(RANKS)]
        expected = (parts[0] + parts[1]) + parts[2]
        with ThreadPoolExecutor(RANKS) as pool:
            assert list(pool.map(add, exchanges, parts)) == [0] * RANKS
        assert all(torch.equal(part, expected) for part in parts)
    assert memory


def test_a_rank_that_has_ended_is_noticed() -> None:
    memory, exchanges = shared()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    c_int64.from_address(exchanges[0].memory + 1 * BOX + PROCESS).value = ended.pid
    assert add(exchanges[0], torch.ones(4)) == 1
    assert memory
