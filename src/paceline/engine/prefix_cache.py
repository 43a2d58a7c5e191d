"""The prefix cache: it saves the states of texts for later prompts that begin with the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
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


_WRITE_WHILE_CACHED, _WRITE_ON_EVICTION, _WRITE_AT_EXIT = (1024, 4), (256, 16), (16, 1024)
"""A text is written to disk only if that saves reading enough tokens later: at least n tokens, and at least one token
in every k of the text. Each pair is (n, k). The three pairs apply while the text is in memory (so that a killed process
loses little), when it leaves memory, and when the process ends. Each file holds a whole text, so writing a growing text
at every turn would wear out the disk. Because at least a quarter of each file is new (k = 4), all files written for a
growing text have at most five times its size."""
_MIN_REPORTED_TOKENS = 256
"""A difference is reported if the prompt and the cached text both have at least this number of tokens after it."""
_SHOWN_TOKENS = 16
"""Number of tokens that a `Divergence` shows of each text."""
_MIN_DISK_GAIN = 32
"""A text on disk is preferred to a text in memory only if it saves this number of additional tokens. Mapping and
checking a file takes as long as reading some tokens."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A cached prefix.

    Attributes:
        length: Number of tokens to load.
        target: State of the target.
        drafters: Name of a drafter -> its state.
        from_disk: True if the states are memory-mapped pages of a file. Copy them soon (`prefix_file.load`).
    """

    length: int
    target: Saved
    drafters: Mapping[str, Saved]
    from_disk: bool = False


class PrefixCache:
    """Saved texts with LRU eviction. A folder can keep the texts for which memory has no room. The cache is not
    thread-safe.

    Attributes:
        queries: Number of prompt tokens that were looked up (like prefix_cache_queries in vLLM).
        hits: Number of these tokens that were found (like prefix_cache_hits in vLLM).
        limit: Maximum memory, in bytes.
        nbytes: Memory of all texts in bytes. It never exceeds the limit.
        disk: The folder. None if texts are kept only in memory.
    """

    def __init__(
        self, limit: int, chunk_invariant: bool | Callable[[], bool] = False, disk: PrefixStore | None = None
    ) -> None:
        """Make an empty cache.

        Args:
            limit: Maximum memory, in bytes. A text that leaves the cache holds memory until it has been written to
                disk. Such texts count too, up to a quarter of the limit.
            chunk_invariant: Result of `self_check.chunk_invariant` for the target, or a function that returns it. The
                function is called by the first search after a text was stored, because the check takes time, and a
                process that generates a single reply does not need it.
            disk: The folder.
        """
        self.limit, self.disk = limit, disk
        self._check = chunk_invariant if callable(chunk_invariant) else None
        self._chunk_invariant = self._check is not None or bool(chunk_invariant)
        """True also while the result is not known. If it turns out to be False, texts that were stored before may take
        memory without being usable."""
        self._entries: dict[CachedText, int] = {}
        """Text -> its size in bytes, least recently used first."""
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
            needs: Name of a drafter whose state must also be cached (`Drafter.needs_past`). None if no drafter needs
                its state.
            adapter: The request's adapter. Only texts with the same adapter are found.
        """
        self._run_check()
        text = np.asarray(tokens, np.int64)
        found, length = self._longest_prefix(reversed(self._entries), text, needs, adapter)
        hit = self._on_disk(text, needs, adapter, length)
        if hit is None and found:
            self._entries[found] = self._entries.pop(found)
            hit = Hit(length, found.target, found.drafters)
        self.queries += len(text)
        self.hits += hit.length if hit else 0
        return hit

    def _longest_prefix(
        self, entries: Iterable[CachedText], text: Tokens, needs: str | None, adapter: int | None, length: int = 0
    ) -> tuple[CachedText | None, int]:
        """Return the entry with the longest usable prefix of a prompt, and the length of that prefix. The entry is None
        if no prefix is longer than `length`. `adapter`: None to search the texts of all adapters. `find` describes the
        other arguments."""
        found = None
        for entry in entries:
            if adapter in (None, entry.adapter) and self._may_exceed(length, entry, text, needs):
                usable = self._usable_tokens(entry, _common(entry.tokens, text), len(text), needs)
                parts = [entry.target, *([entry.drafters[needs]] if needs else [])]
                if (most := common_most(parts, usable, len(text))) > length:
                    found, length = entry, most
        return found, length

    def _on_disk(self, text: Tokens, needs: str | None, adapter: int, length: int) -> Hit | None:
        """Return the longest prefix in the folder, if it is longer than the `length` tokens found in memory."""
        if self.disk is None:
            return None
        self.disk.refresh()
        while True:
            found, most = self._longest_prefix(
                self.disk.texts, text, needs, adapter, length + (length and _MIN_DISK_GAIN)
            )
            if found is None:
                return None
            if kept := self.disk.read(found):  # otherwise, the file was missing or damaged, and is no longer listed
                return Hit(most, kept.target, kept.drafters, True)

    def divergence(self, tokens: Sequence[int], adapter: int = 0, known: int = 0) -> Divergence | None:
        """Return the first difference between a prompt and the cached text that shares its longest prefix.

        Args:
            tokens: Token ids of the prompt.
            adapter: The request's adapter.
            known: Number of tokens that `find` returned.

        Returns:
            The difference, or None if it makes the prompt lose fewer than `_MIN_REPORTED_TOKENS` tokens.
        """
        if len(tokens) - known < _MIN_REPORTED_TOKENS:
            return None
        text, at, nearest = np.asarray(tokens, np.int64), -1, None
        for entry in self._all_texts():
            if entry.adapter != adapter or len(entry.tokens) < max(at, 0) + _MIN_REPORTED_TOKENS:
                continue
            # A folder may hold thousands of texts. Comparing the token at `at` rules out most of them quickly.
            if (at < 0 or entry.tokens[at] == text[at]) and (common := _common(entry.tokens, text)) > at:
                at, nearest = common, entry.tokens
        if nearest is None or min(len(nearest), len(text)) - at < _MIN_REPORTED_TOKENS:
            return None
        parts = (one[at : at + _SHOWN_TOKENS] for one in (text, nearest))
        ours, theirs = (tuple(part[part >= 0].tolist()) for part in parts)  # image rows have no token ids
        return Divergence(at, len(nearest), ours, theirs)

    def estimate_hit(self, tokens: Sequence[int]) -> int:
        """Estimate the number of tokens that `find` would return for a prompt, without counting as a use of the
        text. Any thread may call this, so it does not run the check."""
        return self._longest_prefix(self._all_texts(), np.asarray(tokens, np.int64), None, None)[1]

    def _run_check(self) -> None:
        """Run the check for chunk invariance if there are texts and it has not run yet."""
        if self._check and (self._entries or self.disk):
            self._chunk_invariant, self._check = self._check(), None

    def _all_texts(self) -> list[CachedText]:
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
        """Store the state of a text. Never store the state of a failed request, because it may not be finite.

        Args:
            tokens: Token ids of the prompt and the reply.
            prompt: Number of tokens that were fed as a prompt, in chunks of `PREFILL_ROWS`. The other tokens were fed
                in rounds.
            target: State of the target.
            drafters: Name of a drafter -> result of `Drafter.save`.
            adapter: The request's adapter.
        """
        kept = {name: saved for name, saved in (drafters or {}).items() if saved}
        entry = CachedText(np.array(tokens, np.int64), prompt, target, kept, adapter)
        if entry.nbytes > self.limit:
            # In memory, this text would evict all other texts, and then itself.
            self._write(entry, *_WRITE_ON_EVICTION)
            self._drop_waiting(self.limit // 4)
            return
        for other in list(self._entries):
            if self._can_replace(entry, other):
                entry = _merged(entry, other)
                del self._entries[other]
            elif self._can_replace(other, entry):
                entry = _merged(other, entry)
                del self._entries[other]
        if self._max_usable_tokens(entry) > 0:
            self._entries[entry] = entry.nbytes
            self._write(entry, *_WRITE_WHILE_CACHED)
        room = self.limit - min(sum(text.nbytes for text in self._waiting_to_be_written()), self.limit // 4)
        while self.nbytes > room:
            oldest = next(iter(self._entries))
            self._write(oldest, *_WRITE_ON_EVICTION)
            del self._entries[oldest]
        self._drop_waiting(self.limit // 4)

    def clear(self) -> None:
        """Drop all texts from memory, including texts that have not been written to disk."""
        self._entries.clear()
        self._drop_waiting(0)

    def flush(self, seconds: float) -> None:
        """Write the texts in memory to disk, the most recently used first, in at most `seconds`."""
        if self.disk:
            self.disk.refresh()
            missing = [
                text for text in reversed(self._entries) if self._is_worth_writing(text, *_WRITE_AT_EXIT, waits=False)
            ]
            self.disk.flush([(text, self._superfluous_after(text)) for text in missing], seconds)

    def write(self) -> list[CachedText]:
        """Start writing the texts that are in memory but not on disk, in the background. Return these texts."""
        if not self.disk:
            return []
        self.disk.refresh()
        missing = [text for text in self._entries if self._is_worth_writing(text, *_WRITE_AT_EXIT)]
        for text in missing:  # the most recently used text comes last, so that it gets the newest file
            self.disk.offer(text, self._superfluous_after(text))
        return missing

    def kept_tokens(self) -> int:
        """Return the total number of tokens of all texts on disk."""
        if not self.disk:
            return 0
        self.disk.refresh()
        return sum(len(text.tokens) for text in self.disk.texts)

    def _write(self, text: CachedText, least: int, part: int) -> None:
        """Write a text to disk in the background if that is worth it (see `_WRITE_WHILE_CACHED`)."""
        if self.disk and self._is_worth_writing(text, least, part):
            self.disk.offer(text, self._superfluous_after(text))

    def _is_worth_writing(self, text: CachedText, least: int, part: int, waits: bool = True) -> bool:
        """Return True if writing a text would save reading enough tokens later (see `_WRITE_WHILE_CACHED`).

        `waits`: Treat texts that wait to be written as if they were on disk.
        """
        assert self.disk
        others = [*self.disk.texts, *(self.disk.waiting if waits else ())]
        more = []
        for needs in (None, *filter(self.disk.keeps, text.drafters)):
            own = min(self._max_usable_tokens(text), text.drafters[needs].length if needs else len(text.tokens))
            more.append(
                self._exact_length(text, own) - self._longest_prefix(others, text.tokens, needs, text.adapter)[1]
            )
        return max(more) >= max(least, len(text.tokens) // part)

    def _superfluous_after(self, text: CachedText) -> list[CachedText]:
        """Return the texts, on disk or waiting to be written, that become superfluous once this text is on disk."""
        assert self.disk
        return [
            other
            for other in (*self.disk.texts, *self.disk.waiting)
            if other is not text
            and self._can_replace(text, other)
            and all(
                name in text.drafters and text.drafters[name].length >= saved.length
                for name, saved in other.drafters.items()
            )
        ]

    def _waiting_to_be_written(self) -> list[CachedText]:
        """Return the texts that have left the cache, but hold memory until they are written to disk."""
        return [text for text in (self.disk.waiting if self.disk else ()) if text not in self._entries]

    def _drop_waiting(self, limit: int) -> None:
        """Give up writing the oldest texts of `_waiting_to_be_written` until they hold at most `limit` bytes. A single
        text is always written, unless the limit is 0."""
        waiting = self._waiting_to_be_written()
        while waiting[bool(limit) :] and sum(text.nbytes for text in waiting) > limit:
            assert self.disk
            self.disk.withdraw(waiting.pop(0))
            _LOG.debug("a prefix is not written to disk, because too many prefixes are waiting")

    def _may_exceed(self, length: int, entry: CachedText, text: Tokens, needs: str | None) -> bool:
        """Return False if it is clear, from lengths and a single token, that no more than `length` tokens of an entry
        can be used for a prompt."""
        if self._usable_tokens(entry, len(text), len(text), needs) <= length or len(entry.tokens) < length + 2:
            return False
        return bool(entry.tokens[length + 1] == text[length + 1])

    def _usable_tokens(self, entry: CachedText, common: int, prompt: int, needs: str | None) -> int:
        """Return how many tokens of an entry can be used for a prompt of `prompt` tokens, if both share their first
        `common` tokens.

        The token after the loaded tokens must be the same as well, because a drafter may have read it together with the
        hidden states at the last loaded token (EAGLE). At least one row of the prompt must still be fed, so that
        drafters receive new hidden states.
        """
        parts = [entry.target.length]
        if needs:
            parts.append(entry.drafters[needs].length if needs in entry.drafters else 0)
        return self._exact_length(entry, min(common - 1, prompt - 2, *parts))

    def _max_usable_tokens(self, entry: CachedText) -> int:
        """Return the maximum number of tokens of an entry that any prompt can use."""
        return self._exact_length(entry, min(len(entry.tokens) - 1, entry.target.length))

    def _exact_length(self, entry: CachedText, length: int) -> int:
        """Shorten a length such that using the cache does not change a single bit.

        If all passes leave the same bits (`self_check.chunk_invariant`), any length is possible. Otherwise, the bits of
        a row depend on the pass that computed it, so only whole prompt chunks are used. Without the cache, the prompt
        would be cut at the same places and would go through the same passes.
        """
        if self._chunk_invariant:
            return max(0, length)
        return max(0, min(length, entry.prompt - 1)) // PREFILL_ROWS * PREFILL_ROWS

    def _can_replace(self, one: CachedText, other: CachedText) -> bool:
        """Return True if `one` can replace `other`, ignoring drafters.

        The text of `one` must continue the text of `other`. The state of `one` must allow loading as much as the state
        of `other` does. This is checked for all usable tokens of `other`, and for a single token, because a sliding
        window may no longer hold short prefixes.
        """
        most, count = self._max_usable_tokens(other), len(other.tokens)
        if one.adapter != other.adapter:
            return False
        if (
            count > len(one.tokens)
            or self._max_usable_tokens(one) < most
            or not np.array_equal(one.tokens[:count], other.tokens)
        ):
            return False
        return all(one.target.most(n, other.prompt) >= other.target.most(n, other.prompt) for n in (1, most))


def _merged(entry: CachedText, other: CachedText) -> CachedText:
    """Return `entry` with the longer state of each drafter. `other`: A text that is a prefix of `entry`, or continues
    it."""
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
