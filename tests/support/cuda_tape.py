"""A substitute for CUDA graphs on the CPU: it replays every operation on the memory that it used when recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.kernels.cuda.cache import Replay
from paceline.types import Forward


class Tape(TorchDispatchMode):
    """Records operations. Refuses to read a value on the host, which a graph cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "_local_scalar_dense" not in str(func), "a graph cannot wait for a value"
        out = func(*args, **(kwargs or {}))
        self.notes.append((func, args, kwargs or {}, out))
        return out

    def play(self) -> None:
        """Replay all operations, and copy each new result to the memory of the recorded result."""
        for func, args, kwargs, out in self.notes:
            for old, new in zip(_tensors(out), _tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _tensors(out: Any) -> list[Tensor]:
    return [x for x in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(x, Tensor)]


def tape(run: Replay) -> Replay:
    """Do the same as `decoder.cuda_graph`, with a tape."""
    with Tape() as notes:
        out = run()

    def replay() -> Forward:
        # Erase earlier results: a graph must compute its results in this run.
        for x in (out.logits, *out.taps.values()):
            x.fill_(torch.nan)
        notes.play()
        return out

    return replay
