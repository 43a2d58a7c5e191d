"""Find the tensors that an object holds, to measure its memory."""

from __future__ import annotations

import gc
from types import CellType, FunctionType

from torch import Tensor, nn


def tensors_of(root: object, exclude: object = None) -> list[Tensor]:
    """Return the tensors that an object of Paceline holds, each of them once. Tensors that only the object `exclude`
    holds are left out."""
    tensors: dict[int, Tensor] = {}
    seen, pending = {id(exclude)}, [root]
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            tensors[id(item) if item.is_mkldnn else item.data_ptr()] = item
        elif isinstance(item, FunctionType):
            pending += item.__closure__ or ()
        elif isinstance(item, (dict, list, tuple, CellType)) or _is_searched(item):
            pending += gc.get_referents(item)
    return list(tensors.values())


def _is_searched(item: object) -> bool:
    return isinstance(item, nn.Module) or type(item).__module__.startswith("paceline")


def held_bytes(*roots: object) -> int:
    """Return the total size, in bytes, of the tensors that these objects hold."""
    return sum(t.numel() * t.element_size() for t in tensors_of(roots))
