"""What holds a slot or a cache until it is closed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

_Self = TypeVar("_Self", bound="Closable")


class Closable(ABC):
    """Closed by `close`, at the end of a `with` block, or when nothing refers to it any more."""

    @abstractmethod
    def close(self) -> None:
        """Give back what is held; closing twice does nothing."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
