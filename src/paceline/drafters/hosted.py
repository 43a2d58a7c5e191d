"""Base classes for drafters that use the target's cache, or its last hidden state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import ref

from torch import Tensor

from paceline.drafters.base import Drafter
from paceline.errors import InvalidOption
from paceline.protocols import KVCache
from paceline.types import Tap, Verdict


class CacheSharing(Drafter):
    """A drafter that uses the target's own cache. It holds only a weak reference to that cache."""

    replayable = False
    reads_prompt = False
    _bound: Callable[[], KVCache | None] | None = None

    def bind(self, cache: KVCache) -> None:
        """Set the cache.

        Raises:
            InvalidOption: If the drafter already belongs to another engine that still exists.
        """
        if self._bound and self._bound() not in (None, cache):
            raise InvalidOption(f"{type(self).__name__} cannot serve two models at once", "Make one drafter per model")
        self._bound = ref(cache)

    @property
    def target_cache(self) -> KVCache:
        """The target's cache.

        Raises:
            InvalidOption: If no cache has been bound, or it no longer exists.
        """
        cache = self._bound() if self._bound else None
        if cache is None:
            raise InvalidOption(f"{type(self).__name__} has no target cache", "Call bind with the target's cache first")
        return cache


class LastState(Drafter):
    """A drafter that reads only the target's last hidden state, at the position before the pending token."""

    taps: tuple[Tap, ...] = ("final",)
    reads_prompt = False

    def __init__(self) -> None:
        self._states: dict[int, Tensor] = {}
        """Slot -> its latest state [H]. A slot has no entry before its first state."""

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        self._states.pop(slot, None)

    def fork(self, slot: int, source: int, prompt: Sequence[int]) -> None:
        self.admit(slot, prompt)
        if source in self._states:
            self._states[slot] = self._states[source]

    @property
    def needs_past(self) -> bool:
        """False, because only the last token's state is needed, and that token is always fed."""
        return False

    def feed(self, slot: int, tokens: Sequence[int], taps: Mapping[Tap, Tensor]) -> None:
        self._receive(slot, taps, -1)

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        self._receive(slot, out, verdict.path[-1] if verdict.path else 0)

    def release(self, slot: int) -> None:
        self._states.pop(slot, None)

    def _receive(self, slot: int, taps: Mapping[Tap, Tensor], row: int) -> None:
        # Copy the row, because a view would keep the states of the whole pass in memory.
        self._states[slot] = taps["final"][row].clone()
