"""Tensors that stay in their file until they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, read (dequantised, merged) at each access and by nothing else.

    `Mapping` itself would read one to say whether its name is there.
    """

    _names: Mapping[str, object]
    """All there are, in order."""

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
