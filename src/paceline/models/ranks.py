"""The processes that share a model by tensor parallelism (Megatron-LM, arXiv 1909.08053), connected by
torch.distributed.

Every rank adds partial results in the order of the ranks. So all ranks get the same bits, in every pass and every run.
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
"""Size, in bytes, of the first part of a message, which begins with the message's length. Nearly all messages fit into
this part."""
_IDLE = timedelta(days=3650)
"""Timeout for the next message. It is very long, because a server may be idle."""
_PASS = timedelta(minutes=10)
"""Timeout for waiting for the other ranks within a pass."""


class Exchange(Structure):
    """The structure `Exchange` in exchange.h."""

    _fields_ = (("memory", c_void_p), ("rank", c_int32), ("ranks", c_int32))


class Ranks:
    """The processes of a group. Rank 0 drafts, accepts and answers requests. The other ranks compute their part of each
    pass."""

    def __init__(self) -> None:
        """Join the processes that torchrun started. Raise `InvalidOption` if torchrun did not start this process."""
        if "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
            raise InvalidOption(
                "tensor parallelism needs at least 2 processes",
                "Start them: torchrun --nproc-per-node 2 -m paceline serve ...",
            )
        if dist.is_initialized():
            raise InvalidOption("these processes already share a model", "Start separate processes for each model")
        with _lost_named():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=_PASS)
            self._messages: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=_IDLE)
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.shared_memory: Exchange | None = None
        """The memory through which the ranks of one machine add numbers (`share_memory`). None if they use torch's
        all-gather."""
        atexit.register(self.leave)

    def device(self, given: torch.device) -> torch.device:
        """Return this rank's device of the given type. Each rank uses the GPU whose index is its local rank."""
        if given.type != "cuda":
            return given
        own = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
        torch.cuda.set_device(own)
        return own

    @contextmanager
    def ended_by_failure(self) -> Iterator[None]:
        """Run work that all ranks do. If it fails on this rank, end the group, so that the other ranks do not wait for
        this rank."""
        try:
            yield
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """End the group. Other ranks that are waiting in a sum or for a message get an error."""
        if self.shared_memory:
            kernel("paceline_leave", c_void_p)(addressof(self.shared_memory))
        self._messages = None  # the connections of a group stay open as long as anything refers to it
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Run work on rank 0 first, and then on the other ranks."""
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
        """Raise `InvalidOption` unless `str(facts)` is the same on all ranks."""
        own = torch.frombuffer(bytearray(sha256(str(facts).encode()).digest()), dtype=torch.int64)
        every = [torch.empty_like(own) for _ in range(self.count)]
        with _lost_named():
            dist.all_gather(every, own, self._messages)
        if not all(torch.equal(own, other) for other in every):
            raise InvalidOption(
                "the processes hold different models, or run them differently",
                "Give all processes the same files, options and type of processor",
            )

    def share_memory(self) -> None:
        """Use shared memory for sums, which then take microseconds. This happens only if all ranks are on one Linux
        machine, with the CPU kernels."""
        together = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        if not together or self.shared_memory or library() is None or sys.platform != "linux":
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
        self.shared_memory = Exchange(start, self.rank, self.count)
        kernel("paceline_join", c_void_p)(addressof(self.shared_memory))
        self._wait()
        if self.rank == 0:
            os.unlink(path)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks, added in the order of the ranks. float16 and bfloat16 values are added in
        float32."""
        if self.shared_memory and x.device.type == "cpu" and x.dtype != torch.float64:
            sums = x.to(torch.float32, copy=True).contiguous()
            if kernel("paceline_sum", c_void_p, c_void_p, c_int64)(
                addressof(self.shared_memory), sums.data_ptr(), sums.numel()
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
        """Concatenate x [..., sizes[rank]] of all ranks along the last dimension. Only rank 0 gets the result, and the
        other ranks get zeros."""
        widest = max(sizes)
        own = F.pad(x, (0, widest - x.shape[-1])).contiguous()
        parts = [torch.empty_like(own) for _ in sizes] if self.rank == 0 else None
        with _lost_named():
            dist.gather(own, parts, 0)
        if parts is None:
            return x.new_zeros(()).expand(*x.shape[:-1], sum(sizes))
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    def send(self, message: bytes) -> None:
        """Send a message from rank 0 to all other ranks."""
        whole = len(message).to_bytes(8, "little") + message
        head = torch.frombuffer(bytearray(whole.ljust(_HEAD, b"\0")), dtype=torch.uint8)
        with _lost_named():
            for part in (head[:_HEAD], head[_HEAD:]):
                if len(part):
                    dist.broadcast(part, 0, self._messages)

    def receive(self) -> bytes:
        """Wait for the next message from rank 0."""
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
    """Convert errors of torch.distributed to `RankLost`, with the reason."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise lost(str(error)) from error


def lost(how: str) -> RankLost:
    """Return the error to raise when another rank has left the group."""
    return RankLost(f"another process of this model has ended or does not answer: {how}", "Start all of them again")


class Summed:
    """A linear layer or feed-forward network whose inner dimension is split across ranks."""

    def __init__(self, part: Callable[[Tensor], Tensor], ranks: Ranks) -> None:
        self._part, self._ranks = part, ranks

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.sum(self._part(x))

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + self(x)."""
        return residual + self(x)
