"""Drafters that use what the target has: its cache, or its last hidden state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from weakref import ref

from torch import Tensor

from paceline.drafters.base import Drafter
from paceline.errors import InvalidOption
from paceline.protocols import KVCache
from paceline.types import Tap, Verdict


class CacheSharing(Drafter):
    """A drafter over the target's own cache, which it does not keep alive."""

    replayable = False
    reads_prompt = False
    _bound: Callable[[], KVCache | None] | None = None

    def bind(self, cache: KVCache) -> None:
        """Draft over this cache. Raises `InvalidOption` where the drafter serves another engine that is in use."""
        if self._bound and self._bound() not in (None, cache):
            raise InvalidOption(f"{type(self).__name__} cannot serve two models at once", "Make one for each")
        self._bound = ref(cache)

    @property
    def target_cache(self) -> KVCache:
        """The target's cache. Raises `InvalidOption` where there is none."""
        cache = self._bound() if self._bound else None
        if cache is None:
            raise InvalidOption(f"{type(self).__name__} has no target cache", "Bind the cache that holds the slots")
        return cache


class LastState(Drafter):
    """A drafter that reads a single hidden state of the target: the last one before the pending token."""

    taps: tuple[Tap, ...] = ("final",)
    reads_prompt = False

    def __init__(self) -> None:
        self._states: dict[int, Tensor] = {}
        """The state [H] of each slot, once one was received."""

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        self._states.pop(slot, None)

    def fork(self, slot: int, source: int, prompt: Sequence[int]) -> None:
        self.admit(slot, prompt)
        if source in self._states:
            self._states[slot] = self._states[source]

    @property
    def needs_past(self) -> bool:
        """False: it needs only the last token's state, which is always fed."""
        return False

    def feed(self, slot: int, tokens: Sequence[int], taps: Mapping[Tap, Tensor]) -> None:
        self._receive(slot, taps, -1)

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        self._receive(slot, out, verdict.path[-1] if verdict.path else 0)

    def release(self, slot: int) -> None:
        self._states.pop(slot, None)

    def _receive(self, slot: int, taps: Mapping[Tap, Tensor], row: int) -> None:
        # A copy: a view would keep the states of the whole pass.
        self._states[slot] = taps["final"][row].clone()
