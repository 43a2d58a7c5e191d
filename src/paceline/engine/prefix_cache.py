"""The prefix cache: saved states of earlier texts, for prompts that begin with the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.engine.prefix_file import CachedText
from paceline.engine.prefix_store import PrefixStore
from paceline.engine.stats import Divergence
from paceline.protocols import Saved, common_most
from paceline.verify.tree import PREFILL_ROWS

_LOG = logging.getLogger("paceline.prefixes")

Tokens = NDArray[np.int64]


_BEHIND, _LEAVING, _ENDING = (1024, 4), (256, 16), (16, 1024)
"""Texts are written to disk once that saves reading at least this many tokens, and this part of the text (one in ...):
while they are in memory, so that a killed process loses little; when they leave it; and when the process ends. Each
file holds a whole text, so writing a growing text at every turn would wear out disks. With a quarter, all files of a
text have at most five times its size."""
_NOTABLE = 256
"""Tokens of a cached text and of a prompt after their first difference that make it worth a line in the log."""
_SHOWN = 16
"""Tokens of a `Divergence` that are kept of each text."""
_PREFER_MEMORY = 32
"""Tokens that a text on disk must save beyond a text in memory. Mapping and checking takes as long as reading some."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A cached prefix.

    Attributes:
        length: Number of tokens to load.
        target: State of the target.
        drafters: Name of a drafter -> its state.
        from_disk: True if the states are pages of a file. Copy them soon (`prefix_file.load`).
    """

    length: int
    target: Saved
    drafters: Mapping[str, Saved]
    from_disk: bool = False


class PrefixCache:
    """Saved texts with LRU eviction, and optionally a folder for texts that memory has no room for. It is not
    thread-safe.

    Attributes:
        queries: Number of prompt tokens looked up (as prefix_cache_queries in vLLM).
        hits: Number of these tokens found (as prefix_cache_hits in vLLM).
        nbytes: Memory of all texts in bytes. It never exceeds the limit.
        disk: The folder, or None.
    """

    def __init__(self, limit: int, seamless: bool = False, disk: PrefixStore | None = None) -> None:
        """Make an empty cache.

        Args:
            limit: Maximum memory, in bytes. Texts that leave the cache hold memory until they are written. They are
                counted too, up to a quarter of the limit.
            seamless: Result of `self_check.seamless` for the target.
            disk: The folder.
        """
        self._limit, self._seamless, self.disk = limit, seamless, disk
        self._entries: dict[CachedText, int] = {}
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
        found, length = self._longest(reversed(self._entries), text, needs, adapter)
        hit = self._on_disk(text, needs, adapter, length)
        if hit is None and found:
            self._entries[found] = self._entries.pop(found)
            hit = Hit(length, found.target, found.drafters)
        self.queries += len(text)
        self.hits += hit.length if hit else 0
        return hit

    def _longest(
        self, entries: Iterable[CachedText], text: Tokens, needs: str | None, adapter: int | None, length: int = 0
    ) -> tuple[CachedText | None, int]:
        """Return the entry with the longest usable prefix of a prompt, and its length. None if it is not longer than
        `length`. `adapter`: None for texts of any adapter. For the other arguments see `find`."""
        found = None
        for entry in entries:
            if adapter in (None, entry.adapter) and self._may_exceed(length, entry, text, needs):
                usable = self._usable(entry, _common(entry.tokens, text), len(text), needs)
                parts = [entry.target, *([entry.drafters[needs]] if needs else [])]
                if (most := common_most(parts, usable, len(text))) > length:
                    found, length = entry, most
        return found, length

    def _on_disk(self, text: Tokens, needs: str | None, adapter: int, length: int) -> Hit | None:
        """Do the work of `find` for the folder, if it has more than `length` tokens."""
        if self.disk is None:
            return None
        self.disk.refresh()
        while True:
            found, most = self._longest(self.disk.texts, text, needs, adapter, length + (length and _PREFER_MEMORY))
            if found is None:
                return None
            if kept := self.disk.read(found):  # or the file was damaged, and is no longer listed
                return Hit(most, kept.target, kept.drafters, True)

    def divergence(self, tokens: Sequence[int], adapter: int = 0, known: int = 0) -> Divergence | None:
        """Return where a prompt first differs from the text that agrees with it for longest.

        Args:
            tokens: Token ids of the prompt.
            adapter: The request's adapter.
            known: Number of tokens that `find` returned.

        Returns:
            The difference. None if it costs fewer than `_NOTABLE` tokens.
        """
        if len(tokens) - known < _NOTABLE:
            return None
        text, at, nearest = np.asarray(tokens, np.int64), -1, None
        for entry in self._all():
            if entry.adapter != adapter or len(entry.tokens) < max(at, 0) + _NOTABLE:
                continue
            # A folder may hold thousands of texts, and the token at `at` tells most of them from the prompt.
            if (at < 0 or entry.tokens[at] == text[at]) and (common := _common(entry.tokens, text)) > at:
                at, nearest = common, entry.tokens
        if nearest is None or min(len(nearest), len(text)) - at < _NOTABLE:
            return None
        parts = (one[at : at + _SHOWN] for one in (text, nearest))
        ours, theirs = (tuple(part[part >= 0].tolist()) for part in parts)  # rows of images have no text
        return Divergence(at, len(nearest), ours, theirs)

    def known(self, tokens: Sequence[int]) -> int:
        """Estimate how many tokens of a prompt `find` would return, without counting as a use."""
        return self._longest(self._all(), np.asarray(tokens, np.int64), None, None)[1]

    def _all(self) -> list[CachedText]:
        """Return all texts, in memory and on disk."""
        return [*self._entries, *(self.disk.texts if self.disk else ())]

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
        entry = CachedText(np.array(tokens, np.int64), prompt, target, kept, adapter)
        if entry.nbytes > self._limit:
            # In memory, it would evict all other texts, and then itself.
            self._write(entry, *_LEAVING)
            self._drop_leaving(self._limit // 4)
            return
        for other in list(self._entries):
            if self._covers(entry, other):
                entry = _merged(entry, other)
                del self._entries[other]
            elif self._covers(other, entry):
                entry = _merged(other, entry)
                del self._entries[other]
        if self._most(entry) > 0:
            self._entries[entry] = entry.nbytes
            self._write(entry, *_BEHIND)
        room = self._limit - min(sum(text.nbytes for text in self._leaving()), self._limit // 4)
        while self.nbytes > room:
            oldest = next(iter(self._entries))
            self._write(oldest, *_LEAVING)
            del self._entries[oldest]
        self._drop_leaving(self._limit // 4)

    def clear(self) -> None:
        """Drop all texts from memory, even if they have not been written to disk."""
        self._entries.clear()
        self._drop_leaving(0)

    def flush(self, seconds: float) -> None:
        """Write the texts in memory to disk, the most recently used first, in at most `seconds`."""
        if self.disk:
            self.disk.refresh()
            missing = [text for text in reversed(self._entries) if self._is_worth_writing(text, *_ENDING, waits=False)]
            self.disk.flush([(text, self._replaced(text)) for text in missing], seconds)

    def write(self) -> list[CachedText]:
        """Begin to write the texts in memory that the disk lacks, in the background, and return them."""
        if not self.disk:
            return []
        self.disk.refresh()
        missing = [text for text in self._entries if self._is_worth_writing(text, *_ENDING)]
        for text in missing:  # the most recently used comes last, and gets the newest file
            self.disk.offer(text, self._replaced(text))
        return missing

    def kept_tokens(self) -> int:
        """Return the number of tokens of all texts on disk."""
        if not self.disk:
            return 0
        self.disk.refresh()
        return sum(len(text.tokens) for text in self.disk.texts)

    def _write(self, text: CachedText, least: int, part: int) -> None:
        """Write a text to disk in the background if that is worth it (see `_BEHIND`)."""
        if self.disk and self._is_worth_writing(text, least, part):
            self.disk.offer(text, self._replaced(text))

    def _is_worth_writing(self, text: CachedText, least: int, part: int, waits: bool = True) -> bool:
        """Return True if the disk lacks enough of a text. `waits`: Count texts that wait to be written as written."""
        assert self.disk
        others = [*self.disk.texts, *(self.disk.waiting if waits else ())]
        more = []
        for needs in (None, *filter(self.disk.keeps, text.drafters)):
            own = min(self._most(text), text.drafters[needs].length if needs else len(text.tokens))
            more.append(self._whole(text, own) - self._longest(others, text.tokens, needs, text.adapter)[1])
        return max(more) >= max(least, len(text.tokens) // part)

    def _replaced(self, text: CachedText) -> list[CachedText]:
        """Return the texts on disk, or waiting to be written, that are not needed once this text is written."""
        assert self.disk
        return [
            other
            for other in (*self.disk.texts, *self.disk.waiting)
            if other is not text
            and self._covers(text, other)
            and all(
                name in text.drafters and text.drafters[name].length >= saved.length
                for name, saved in other.drafters.items()
            )
        ]

    def _leaving(self) -> list[CachedText]:
        """Return the texts that are no longer in the cache, but hold memory until they are written."""
        return [text for text in (self.disk.waiting if self.disk else ()) if text not in self._entries]

    def _drop_leaving(self, limit: int) -> None:
        """Do not write the oldest of these texts if they hold more than `limit` bytes. A single text is always written,
        unless the limit is 0."""
        leaving = self._leaving()
        while leaving[bool(limit) :] and sum(text.nbytes for text in leaving) > limit:
            assert self.disk
            self.disk.withdraw(leaving.pop(0))
            _LOG.debug("a prefix is not written to disk: too many wait")

    def _may_exceed(self, length: int, entry: CachedText, text: Tokens, needs: str | None) -> bool:
        """Return False if an entry cannot be used for more than `length` tokens of a prompt, as its sizes or one token
        show."""
        if self._usable(entry, len(text), len(text), needs) <= length or len(entry.tokens) < length + 2:
            return False
        return bool(entry.tokens[length + 1] == text[length + 1])

    def _usable(self, entry: CachedText, common: int, prompt: int, needs: str | None) -> int:
        """Return the usable length of an entry for a prompt of `prompt` tokens that shares its first `common` tokens.

        The token after the loaded tokens must be the same as well, because a drafter may have read it together with the
        hidden states at the last loaded token (EAGLE). And at least one row of the prompt must still be fed, which
        gives drafters new hidden states.
        """
        parts = [entry.target.length]
        if needs:
            parts.append(entry.drafters[needs].length if needs in entry.drafters else 0)
        return self._whole(entry, min(common - 1, prompt - 2, *parts))

    def _most(self, entry: CachedText) -> int:
        """Return the longest usable length of an entry, for any prompt."""
        return self._whole(entry, min(len(entry.tokens) - 1, entry.target.length))

    def _whole(self, entry: CachedText, length: int) -> int:
        """Shorten a length so that the cache changes no bit of any text.

        If every pass leaves the same bits (`self_check.seamless`), any length is possible. Otherwise, rows depend on
        the pass that computed them, so only whole chunks of a prompt are used. Without the cache, a prompt would be cut
        at the same places and go through the same passes.
        """
        if self._seamless:
            return max(0, length)
        return max(0, min(length, entry.prompt - 1)) // PREFILL_ROWS * PREFILL_ROWS

    def _covers(self, one: CachedText, other: CachedText) -> bool:
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


def _merged(entry: CachedText, other: CachedText) -> CachedText:
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
