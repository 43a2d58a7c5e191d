"""Calls on rank 0 that all other ranks repeat. The engine, the drafters and the server need not know about other
ranks."""

from __future__ import annotations

import atexit
import gc
import io
import itertools
import pickle
import signal
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from threading import RLock
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.errors import PacelineError, RankLost
from paceline.models.ranks import Ranks


class Mirrored:
    """An object that exists on every rank, each with its own part of the data."""

    mirror: Mirror


MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def collective(method: MethodT) -> MethodT:
    """Decorate a method that exchanges results between ranks. All ranks call it at the same time. If it fails, the
    group ends."""

    @wraps(method)
    def run(self: Mirrored, *args: Any, **options: Any) -> Any:
        with self.mirror.lock:
            run = self.mirror.run_collective if self.mirror.outermost else _run
            return run(self, method, args, options)

    return run  # type: ignore[return-value]


def repeated(method: MethodT) -> MethodT:
    """Decorate a method that exchanges no results between ranks. After it has succeeded on rank 0, the other ranks call
    it before their next pass."""

    @wraps(method)
    def run(self: Mirrored, *args: Any, **options: Any) -> Any:
        with self.mirror.lock:
            run = self.mirror.run_repeated if self.mirror.outermost else _run
            return run(self, method, args, options)

    return run  # type: ignore[return-value]


def _run(owner: Mirrored, method: Callable[..., Any], args: Any, options: Any) -> Any:
    return method(owner, *args, **options)


class Mirror:
    """Sends messages from rank 0 to the other ranks. A message contains the calls since the last message, and the call
    that all ranks run now.

    An object that a `repeated` method returns has the same number on all ranks, as long as rank 0 holds it. Messages
    are pickled, because the ranks trust each other, as with torch.distributed.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.lock = ranks, RLock()
        self.outermost = ranks.rank == 0
        """True if a call must be repeated on the other ranks. This is the case on rank 0, outside of any other such
        call."""
        self._objects: dict[int, Any] = {}
        """On the other ranks: number -> object."""
        self._numbers: dict[int, int] = {}
        """On rank 0: `id` of an object -> its number."""
        self._next = itertools.count()
        self._waiting: deque[bytes] = deque()
        self._ended: str | None = None
        if self.outermost:
            atexit.register(self.end)

    def hold(self, it: Mirrored) -> int:
        """Return the number of an object. A new object gets the next number. The first number is 0 on every rank."""
        if id(it) in self._numbers:
            return self._numbers[id(it)]
        number = next(self._next)
        if self.ranks.rank:
            self._objects[number] = it
        else:
            self._numbers[id(it)] = number
            weakref.finalize(it, self._drop, id(it)).atexit = False
        return number

    def run_collective(self, owner: Mirrored, method: Callable[..., Any], args: Any, options: Any) -> Any:
        """See `collective`."""
        if self._ended:
            raise RankLost(f"the processes of this model have ended: {self._ended}", "Start all of them again")
        call = self._packed((owner, method.__name__, args, options, None))
        try:
            self.outermost = False
            self._send(call)
            return method(owner, *args, **options)
        except BaseException as error:
            self._break(error)
            raise
        finally:
            self.outermost = True

    def run_repeated(self, owner: Mirrored, method: Callable[..., Any], args: Any, options: Any) -> Any:
        """See `repeated`."""
        try:
            self.outermost = False
            result = method(owner, *args, **options)
            number = self.hold(result) if isinstance(result, Mirrored) else None
            self._waiting.append(self._packed((owner, method.__name__, args, options, number)))
        except PacelineError:  # raised before any state changed, so the other ranks need not repeat it
            raise
        except BaseException as error:  # the state may have changed partly, which other ranks cannot repeat
            self._break(error)
            raise
        finally:
            self.outermost = True
        return result

    def _break(self, error: BaseException) -> None:
        self._ended = self._ended or str(error) or type(error).__name__
        self.ranks.leave()

    def follow(self) -> None:
        """Repeat the calls of rank 0 until rank 0 ends, and then end this process. On rank 0, this does nothing.

        Call it in the main thread. This process ignores SIGINT and SIGTERM, because rank 0 handles them and may still
        have replies to finish.

        Raises:
            SystemExit: If rank 0 has ended.
            RankLost: If the connection to another rank was lost.
        """
        if self.outermost:
            return
        gc.enable()  # the caller is still loading the model, which pauses garbage collection
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        try:
            with torch.inference_mode():
                while calls := pickle.loads(self.ranks.receive()):
                    for call in calls:
                        self._repeat(*_Unpickler(self._objects, call).load())
        finally:
            self.ranks.leave()
        raise SystemExit

    def _repeat(self, owner: Any, name: str, args: Any, options: Any, number: int | None) -> None:
        if owner is None:
            self._objects.pop(args)
            return
        result = getattr(owner, name)(*args, **options)
        if number is not None:
            self._objects[number] = result

    def end(self) -> None:
        """Tell the other ranks to end."""
        with self.lock:
            if not self._ended:
                self._ended = "rank 0 has left"
                with suppress(RankLost):  # a lost rank has already reported its error
                    self.ranks.send(pickle.dumps([]))
                self.ranks.leave()

    def _drop(self, key: int) -> None:
        """Release an object on the other ranks, with the next message. Any thread may call this."""
        self._waiting.append(self._packed((None, "", self._numbers.pop(key), {}, None)))

    def _send(self, call: bytes) -> None:
        calls = [self._waiting.popleft() for _ in range(len(self._waiting))]
        self.ranks.send(pickle.dumps([*calls, call]))

    def _packed(self, call: object) -> bytes:
        buffer = io.BytesIO()
        _Pickler(self._numbers, buffer).dump(call)
        return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles mirrored objects as their numbers, and tensors as their bytes."""

    def __init__(self, numbers: dict[int, int], buffer: io.BytesIO) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._known = numbers

    def persistent_id(self, it: object) -> int | None:
        return self._known[id(it)] if isinstance(it, Mirrored) else None

    def reducer_override(self, it: object) -> Any:
        if not isinstance(it, Tensor):
            return NotImplemented
        data = it.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (data, it.dtype, tuple(it.shape), it.device.type)


class _Unpickler(pickle.Unpickler):
    def __init__(self, objects: dict[int, Any], data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._known = objects

    def persistent_load(self, number: int) -> Any:
        return self._known[number]


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], device: str) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape).to(device)
