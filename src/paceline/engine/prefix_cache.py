"""The prefix cache: saved states of earlier texts, for prompts that begin with the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.protocols import Saved, common_most
from paceline.verify.tree import PREFILL_ROWS

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Hit:
    """A cached prefix.

    Attributes:
        length: Number of tokens to load.
        target: State of the target.
        drafters: Name of a drafter -> its state.
    """

    length: int
    target: Saved
    drafters: Mapping[str, Saved]


@dataclass(frozen=True, slots=True, eq=False)
class _CachedText:
    """A saved text.

    Attributes:
        tokens: The tokens of prompt and reply.
        prompt: Length of the prompt.
        target: State of the target.
        drafters: Name of a drafter -> its state.
        adapter: Adapter of the request.
    """

    tokens: Tokens
    prompt: int
    target: Saved
    drafters: Mapping[str, Saved]
    adapter: int

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.target.nbytes + sum(saved.nbytes for saved in self.drafters.values())


class PrefixCache:
    """Saved texts with LRU eviction. It is not thread-safe.

    Attributes:
        queries: Number of prompt tokens looked up (as prefix_cache_queries in vLLM).
        hits: Number of these tokens found (as prefix_cache_hits in vLLM).
        nbytes: Memory of all texts in bytes. It never exceeds the limit.
    """

    def __init__(self, limit: int, seamless: bool = False) -> None:
        """Make an empty cache.

        Args:
            limit: Maximum memory, in bytes.
            seamless: Result of `self_check.seamless` for the target.
        """
        self._limit, self._seamless = limit, seamless
        self._entries: dict[_CachedText, int] = {}
        """Text -> its bytes, in the order of last use."""
        self.queries = self.hits = 0

    @property
    def nbytes(self) -> int:
        return sum(self._entries.values())

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._entries)

    def find(self, tokens: Sequence[int], needs: str | None = None, adapter: int = 0) -> Hit | None:
        """Return the longest cached prefix of a prompt.

        Args:
            tokens: Token ids of the prompt.
            needs: Name of the drafter whose state must also be cached (`Drafter.needs_past`). None if there is none.
            adapter: The request's adapter. Only texts with the same adapter are found.
        """
        text = np.asarray(tokens, np.int64)
        found, length = None, 0
        for entry in reversed(self._entries):
            # Skip entries that cannot be longer than the best so far.
            if entry.adapter == adapter and self._usable(entry, len(text), len(text), needs) > length:
                usable = self._usable(entry, _common(entry.tokens, text), len(text), needs)
                parts = [entry.target, *([entry.drafters[needs]] if needs else [])]
                if (most := common_most(parts, usable, len(text))) > length:
                    found, length = entry, most
        self.queries += len(text)
        self.hits += length
        if found is None:
            return None
        self._entries[found] = self._entries.pop(found)
        return Hit(length, found.target, found.drafters)

    def known(self, tokens: Sequence[int]) -> int:
        """Estimate how many tokens of a prompt `find` would return, without counting as a use."""
        text, length = np.asarray(tokens, np.int64), 0
        for entry in self._entries:
            if self._usable(entry, len(text), len(text), None) > length:
                length = max(length, self._usable(entry, _common(entry.tokens, text), len(text), None))
        return length

    def store(
        self,
        tokens: Sequence[int],
        prompt: int,
        target: Saved,
        drafters: Mapping[str, Saved | None] | None = None,
        adapter: int = 0,
    ) -> None:
        """Store the state of a text. Never store a failed request, because its state may not be finite.

        Args:
            tokens: Token ids of prompt and reply.
            prompt: Number of tokens that were fed as a prompt, in chunks of `PREFILL_ROWS`. Rounds wrote the others.
            target: State of the target.
            drafters: Name of a drafter -> result of `Drafter.save`.
            adapter: The request's adapter.
        """
        kept = {name: saved for name, saved in (drafters or {}).items() if saved}
        entry = _CachedText(np.array(tokens, np.int64), prompt, target, kept, adapter)
        if entry.nbytes > self._limit:
            return  # it would evict all other texts, and then itself
        for other in list(self._entries):
            if self._covers(entry, other):
                entry = _merged(entry, other)
                del self._entries[other]
            elif self._covers(other, entry):
                entry = _merged(other, entry)
                del self._entries[other]
        if self._most(entry) > 0:
            self._entries[entry] = entry.nbytes
        while self.nbytes > self._limit:
            del self._entries[next(iter(self._entries))]

    def clear(self) -> None:
        """Drop all texts."""
        self._entries.clear()

    def _usable(self, entry: _CachedText, common: int, prompt: int, needs: str | None) -> int:
        """Return the usable length of an entry for a prompt of `prompt` tokens that shares its first `common` tokens.

        The token after the loaded tokens must be the same as well, because a drafter may have read it together with the
        hidden states at the last loaded token (EAGLE). And at least one row of the prompt must still be fed, which
        gives drafters new hidden states.
        """
        parts = [entry.target.length]
        if needs:
            parts.append(entry.drafters[needs].length if needs in entry.drafters else 0)
        return self._whole(entry, min(common - 1, prompt - 2, *parts))

    def _most(self, entry: _CachedText) -> int:
        """Return the longest usable length of an entry, for any prompt."""
        return self._whole(entry, min(len(entry.tokens) - 1, entry.target.length))

    def _whole(self, entry: _CachedText, length: int) -> int:
        """Shorten a length so that the cache changes no bit of any text.

        If every pass leaves the same bits (`self_check.seamless`), any length is possible. Otherwise, rows depend on
        the pass that computed them, so only whole chunks of a prompt are used. Without the cache, a prompt would be cut
        at the same places and go through the same passes.
        """
        if self._seamless:
            return max(0, length)
        return max(0, min(length, entry.prompt - 1)) // PREFILL_ROWS * PREFILL_ROWS

    def _covers(self, one: _CachedText, other: _CachedText) -> bool:
        """Return True if `one` can replace `other`, ignoring drafters.

        Its text must continue the other text. Its state must allow loading the other text as a whole, and a single
        token if the other state allows that.
        """
        most, count = self._most(other), len(other.tokens)
        if one.adapter != other.adapter:
            return False
        if count > len(one.tokens) or self._most(one) < most or not np.array_equal(one.tokens[:count], other.tokens):
            return False
        return all(one.target.most(n, other.prompt) >= other.target.most(n, other.prompt) for n in (1, most))


def _merged(entry: _CachedText, other: _CachedText) -> _CachedText:
    """Return `entry` with the longer of both drafter states. `other`: A text that is its prefix or continues it."""
    both = dict(entry.drafters)
    for name, saved in other.drafters.items():
        if name not in both or both[name].length < saved.length:
            both[name] = saved
    return replace(entry, drafters=both)


def _common(one: Tokens, other: Tokens) -> int:
    """Return the length of the common prefix."""
    count = min(len(one), len(other))
    differ = one[:count] != other[:count]
    first = int(differ.argmax()) if count else 0
    return first if count and differ[first] else count
