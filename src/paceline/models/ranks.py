"""The processes that share one model by tensor parallelism (Megatron-LM, arXiv 1909.08053), over torch.distributed.

Sums run in the order of the ranks, on every rank, so that all have the same bits in each pass and in each run.
"""

from __future__ import annotations

import atexit
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure, addressof, c_int32, c_int64, c_uint8, c_void_p
from datetime import timedelta
from hashlib import sha256

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import InvalidOption, RankLost
from paceline.kernels.cpu.build import kernel, library

_HEAD = 4096
"""Bytes of the first part of a message, which holds nearly all messages whole; the length is its first number."""
_IDLE = timedelta(days=3650)
"""Time that a rank waits for the next message: a server may have nothing to do for long."""
_PASS = timedelta(minutes=10)
"""Time that a rank waits for the others within a pass."""


class Exchange(Structure):
    """`Exchange` of exchange.h."""

    _fields_ = (("memory", c_void_p), ("rank", c_int32), ("ranks", c_int32))


class Ranks:
    """The processes of a group. Rank 0 drafts, accepts and answers; the others compute their part of each pass."""

    def __init__(self) -> None:
        """Join the processes that torchrun started. Raises `InvalidOption` if it did not start this one."""
        if "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
            raise InvalidOption(
                "one process cannot share a model", "Start several: torchrun --nproc-per-node 2 -m paceline serve ..."
            )
        if dist.is_initialized():
            raise InvalidOption("these processes share a model already", "Load each model in processes of its own")
        with _lost_named():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=_PASS)
            self._messages: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=_IDLE)
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.exchange: Exchange | None = None
        """Memory that all ranks share, where all are on one machine."""
        atexit.register(self.leave)

    def device(self, given: torch.device) -> torch.device:
        """This rank's device of the given type: the GPU of its number among the ranks of its machine."""
        if given.type != "cuda":
            return given
        own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
        torch.cuda.set_device(own)
        return own

    @contextmanager
    def ended_by_failure(self) -> Iterator[None]:
        """Context of work that all ranks do: if it fails at this one, the others need not wait for it."""
        try:
            yield
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """End the group: the other ranks' sum or message, which they may wait in, fails."""
        if self.exchange:
            kernel("paceline_leave", c_void_p)(addressof(self.exchange))
        self._messages = None  # while anything holds a group, its connections stay open
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Context that the other ranks enter when rank 0 has left it."""
        if self.rank:
            self._wait()
        with self.ended_by_failure():
            yield
        if not self.rank:
            self._wait()

    def _wait(self) -> None:
        with _lost_named():
            dist.barrier(self._messages)

    def check_alike(self, facts: object) -> None:
        """Raise `InvalidOption` unless the text of `facts` is the same at all ranks."""
        own = torch.frombuffer(bytearray(sha256(str(facts).encode()).digest()), dtype=torch.int64)
        every = [torch.empty_like(own) for _ in range(self.count)]
        with _lost_named():
            dist.all_gather(every, own, self._messages)
        if not all(torch.equal(own, other) for other in every):
            raise InvalidOption(
                "the processes hold different models, or run them differently",
                "Give all the same files, options and kind of processor",
            )

    def share_memory(self) -> None:
        """Add through memory, which takes microseconds, if all ranks are on this machine and have the CPU kernels."""
        together = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        if not together or self.exchange or library() is None or sys.platform != "linux":
            return
        size = kernel("paceline_exchange_bytes", c_int32)
        size.restype = c_int64
        if self.rank == 0:
            file, path = tempfile.mkstemp(prefix="paceline-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
            os.truncate(file, size(self.count))
            self.send(path.encode())
        else:
            file = os.open(path := self.receive().decode(), os.O_RDWR)
        self._memory = mmap.mmap(file, size(self.count))
        os.close(file)
        start = addressof(c_uint8.from_buffer(self._memory))
        self.exchange = Exchange(start, self.rank, self.count)
        kernel("paceline_join", c_void_p)(addressof(self.exchange))
        self._wait()
        if self.rank == 0:
            os.unlink(path)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, which have one shape, in the order of the ranks; float16 and bfloat16 in float32."""
        if self.exchange and x.device.type == "cpu" and x.dtype != torch.float64:
            sums = x.to(torch.float32, copy=True).contiguous()
            if kernel("paceline_sum", c_void_p, c_void_p, c_int64)(
                addressof(self.exchange), sums.data_ptr(), sums.numel()
            ):
                raise lost("within a sum")
            return sums.to(x.dtype)
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.count)]
        with _lost_named():
            dist.all_gather(parts, x.contiguous())
        total = parts[0].to(torch.promote_types(x.dtype, torch.float32))
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """The ranks' x [..., sizes[rank]] side by side, at rank 0; the others get zeros."""
        widest = max(sizes)
        own = F.pad(x, (0, widest - x.shape[-1])).contiguous()
        parts = [torch.empty_like(own) for _ in sizes] if self.rank == 0 else None
        with _lost_named():
            dist.gather(own, parts, 0)
        if parts is None:
            return x.new_zeros(()).expand(*x.shape[:-1], sum(sizes))
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    def send(self, message: bytes) -> None:
        """Send a message from rank 0 to all others."""
        whole = len(message).to_bytes(8, "little") + message
        head = torch.frombuffer(bytearray(whole.ljust(_HEAD, b"\0")), dtype=torch.uint8)
        with _lost_named():
            for part in (head[:_HEAD], head[_HEAD:]):
                if len(part):
                    dist.broadcast(part, 0, self._messages)

    def receive(self) -> bytes:
        """Wait for the next message of rank 0."""
        head = torch.empty(_HEAD, dtype=torch.uint8)
        with _lost_named():
            dist.broadcast(head, 0, self._messages)
            size = 8 + int.from_bytes(head[:8].numpy().tobytes(), "little")
            rest = torch.empty(max(0, size - _HEAD), dtype=torch.uint8)
            if len(rest):
                dist.broadcast(rest, 0, self._messages)
        return torch.cat([head, rest]).numpy().tobytes()[8:size]


@contextmanager
def _lost_named() -> Iterator[None]:
    """Name the reason for a broken connection."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise lost(str(error)) from error


def lost(how: str) -> RankLost:
    """The error of a rank that others have left."""
    return RankLost(f"another process of this model has ended or does not answer: {how}", "Start all of them again")


class Summed:
    """A product, or a feed-forward network, of which each rank has a part of the inner dimension."""

    def __init__(self, part: Callable[[Tensor], Tensor], ranks: Ranks) -> None:
        self._part, self._ranks = part, ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.sum(self._part(x))

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + self(x)."""
        return residual + self(x)
