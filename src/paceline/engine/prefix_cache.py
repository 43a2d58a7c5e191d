"""Prefix cache: saved state of earlier texts, found by their tokens, for prompts that begin alike."""

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
    """A cached prefix: load the first `length` tokens of `target` into the slot, and of the request's drafter's entry
    in `drafters`, if it has one."""

    length: int
    target: Saved
    drafters: Mapping[str, Saved]


@dataclass(frozen=True, slots=True, eq=False)
class _CachedText:
    """A saved text: its `tokens`, of which the first `prompt` were the prompt, and its request's `adapter`."""

    tokens: Tokens
    prompt: int
    target: Saved
    drafters: Mapping[str, Saved]
    adapter: int

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.target.nbytes + sum(saved.nbytes for saved in self.drafters.values())


class PrefixCache:
    """Saved texts, least recently used evicted first. Not thread-safe.

    `queries` and `hits` count the tokens of prompts looked up and found (as vLLM's prefix_cache_queries and
    prefix_cache_hits). `nbytes`: memory held, never more than `limit`.
    """

    def __init__(self, limit: int, seamless: bool = False) -> None:
        """`limit`: bytes. `seamless`: the target's `self_check.seamless`."""
        self._limit, self._seamless = limit, seamless
        self._entries: dict[_CachedText, int] = {}
        """Texts and their bytes, in the order of their last use."""
        self.queries = self.hits = 0

    @property
    def nbytes(self) -> int:
        return sum(self._entries.values())

    def __len__(self) -> int:
        """Number of texts held."""
        return len(self._entries)

    def find(self, tokens: Sequence[int], needs: str | None = None, adapter: int = 0) -> Hit | None:
        """Return the longest cached prefix of a prompt. `needs`: the name of the drafter whose state must be cached as
        well (`Drafter.needs_past`). `adapter`: the request's, under which alone the state is the same."""
        text = np.asarray(tokens, np.int64)
        found, length = None, 0
        for entry in reversed(self._entries):
            # Skip entries that cannot beat what was found.
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

    def store(
        self,
        tokens: Sequence[int],
        prompt: int,
        target: Saved,
        drafters: Mapping[str, Saved | None] | None = None,
        adapter: int = 0,
    ) -> None:
        """Keep the state of a text. `prompt`: number of tokens that were fed as a prompt, in chunks of `PREFILL_ROWS`
        from the first one; rounds wrote the others. `drafters`: results of `Drafter.save` by name. `adapter`: that of
        the request.

        A failed request must not be stored: its state may not be finite.
        """
        kept = {name: saved for name, saved in (drafters or {}).items() if saved}
        entry = _CachedText(np.array(tokens, np.int64), prompt, target, kept, adapter)
        if entry.nbytes > self._limit:
            return  # it would evict all others, and then itself
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
        """Forget all texts."""
        self._entries.clear()

    def _usable(self, entry: _CachedText, common: int, prompt: int, needs: str | None) -> int:
        """Return the usable length of an entry for a prompt of `prompt` tokens that shares its first `common` tokens.

        Token n after the n loaded ones must agree too, since a drafter may have read it beside the hidden states of the
        one before (EAGLE); and at least one row of the prompt is fed after them, which yields such states anew.
        """
        parts = [entry.target.length]
        if needs:
            parts.append(entry.drafters[needs].length if needs in entry.drafters else 0)
        return self._whole(entry, min(common - 1, prompt - 2, *parts))

    def _most(self, entry: _CachedText) -> int:
        """Return the longest usable length of an entry, for any prompt."""
        return self._whole(entry, min(len(entry.tokens) - 1, entry.target.length))

    def _whole(self, entry: _CachedText, length: int) -> int:
        """Cut a length so that no text depends on the cache, bit for bit.

        Where every pass leaves the same bits (`self_check.seamless`), any length will do. Elsewhere rows depend on the
        pass that computed them, and only whole chunks of a prompt are used: a prompt fed alone is cut at the same
        places, and the same passes follow.
        """
        if self._seamless:
            return max(0, length)
        return max(0, min(length, entry.prompt - 1)) // PREFILL_ROWS * PREFILL_ROWS

    def _covers(self, one: _CachedText, other: _CachedText) -> bool:
        """Whether `one` can replace `other`, but for drafters: its text continues the other's, and its saved state
        still reaches back to the other's end and, if the other's does, to its beginning."""
        most, count = self._most(other), len(other.tokens)
        if one.adapter != other.adapter:
            return False
        if count > len(one.tokens) or self._most(one) < most or not np.array_equal(one.tokens[:count], other.tokens):
            return False
        return all(one.target.most(n, other.prompt) >= other.target.most(n, other.prompt) for n in (1, most))


def _merged(entry: _CachedText, other: _CachedText) -> _CachedText:
    """Return `entry` with the drafter states of another text that is its prefix or continues it."""
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
