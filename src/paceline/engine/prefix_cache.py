"""Prompts that begin alike are computed once: what earlier texts left in the caches, found by its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.protocols import Saved
from paceline.verify.tree import PREFILL_ROWS

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Hit:
    """A beginning that is known: load the first `length` tokens of `target` into the slot, and of what the request's
    drafter has among `drafters`."""

    length: int
    target: Saved
    drafters: Mapping[str, Saved]


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """`tokens`: all of a text that was known when it was saved, of which the first `prompt` were its prompt."""

    tokens: Tokens
    prompt: int
    target: Saved
    drafters: Mapping[str, Saved]

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.target.nbytes + sum(saved.nbytes for saved in self.drafters.values())


class PrefixCache:
    """Saved texts, of which those go first that have not been of use for longest. For the engine's thread alone.

    `queries` and `hits` count tokens, of all prompts looked up and of those found (as vLLM's prefix_cache_queries and
    prefix_cache_hits do). `nbytes`: memory held, never more than `limit`.
    """

    def __init__(self, limit: int, seamless: bool = False) -> None:
        """`limit`: in bytes. `seamless`: whether `self_check.seamless` says so of the target."""
        self._limit, self._seamless = limit, seamless
        self._entries: list[_Entry] = []
        """The latest use last."""
        self.nbytes = self.queries = self.hits = 0

    def __len__(self) -> int:
        """Texts that are held."""
        return len(self._entries)

    def find(self, tokens: Sequence[int], needs: str | None = None) -> Hit | None:
        """The longest beginning of a prompt that can be loaded. `needs`: the drafter that cannot do without its part
        (`Drafter.needs_past`), by the name it has in `store`."""
        text = np.asarray(tokens, np.int64)
        found, length = None, 0
        for entry in reversed(self._entries):
            # Most are shorter than what has been found, or need not be looked at twice.
            if self._usable(entry, len(text), len(text), needs) > length:
                usable = self._usable(entry, _common(entry.tokens, text), len(text), needs)
                parts = [entry.target, *([entry.drafters[needs]] if needs else [])]
                if usable > length and all(part.holds(usable, len(text)) for part in parts):
                    found, length = entry, usable
        self.queries += len(text)
        self.hits += length
        if found is None:
            return None
        self._entries.remove(found)
        self._entries.append(found)
        return Hit(length, found.target, found.drafters)

    def store(
        self, tokens: Sequence[int], prompt: int, target: Saved, drafters: Mapping[str, Saved | None] | None = None
    ) -> None:
        """Keep what was computed of a text. `prompt`: so many of its tokens were fed as a prompt, in chunks
        of `PREFILL_ROWS` from the first token on; the others were written by rounds. `drafters`: what `Drafter.save`
        gave, by name.

        A request that failed must not be stored: what it computed may not be finite.
        """
        kept = {name: saved for name, saved in (drafters or {}).items() if saved}
        entry = _Entry(np.array(tokens, np.int64), prompt, target, kept)
        if entry.nbytes > self._limit:
            return  # or all others would go for it, and then it too
        for other in list(self._entries):
            if self._covers(entry, other):
                entry = _merged(entry, other)
                self._drop(other)
            elif self._covers(other, entry):
                entry = _merged(other, entry)
                self._drop(other)
        if self._most(entry) > 0:
            self._entries.append(entry)
            self.nbytes += entry.nbytes
        while self.nbytes > self._limit:
            self._drop(self._entries[0])

    def clear(self) -> None:
        """Forget all texts."""
        self._entries.clear()
        self.nbytes = 0

    def _drop(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self.nbytes -= entry.nbytes

    def _usable(self, entry: _Entry, common: int, prompt: int, needs: str | None) -> int:
        """How much of an entry a prompt of `prompt` tokens can begin with, whose first `common` tokens are the same.

        Token n after the n that are loaded agrees too, since a drafter may have read it beside the hidden states of the
        one before (EAGLE); and at least one row of the prompt is fed after them, which brings such states anew.
        """
        parts = [entry.target.length]
        if needs:
            parts.append(entry.drafters[needs].length if needs in entry.drafters else 0)
        return self._whole(entry, min(common - 1, prompt - 2, *parts))

    def _most(self, entry: _Entry) -> int:
        """How much of it any prompt could begin with."""
        return self._whole(entry, min(len(entry.tokens) - 1, entry.target.length))

    def _whole(self, entry: _Entry, length: int) -> int:
        """The rule by which a text depends on no cache, bit for bit.

        Where every pass leaves the same bits (`self_check.seamless`) all may be used, up to any token.
        Elsewhere rows depend on the pass that computed them. Then only whole chunks that were fed as a prompt are used:
        a prompt that is fed alone is cut at the same places, and what follows is the same passes.
        """
        if self._seamless:
            return max(0, length)
        return max(0, min(length, entry.prompt - 1)) // PREFILL_ROWS * PREFILL_ROWS

    def _covers(self, one: _Entry, other: _Entry) -> bool:
        """Whether `one` can do all that `other` can, but for drafters: a text that goes on from it, in a cache that can
        still go back to where the other ends and, if that can, to its beginning."""
        most, count = self._most(other), len(other.tokens)
        if count > len(one.tokens) or self._most(one) < most or not np.array_equal(one.tokens[:count], other.tokens):
            return False
        ends = [length for length in (1, most) if other.target.holds(length, other.prompt)]
        return all(one.target.holds(length, other.prompt) for length in ends)


def _merged(entry: _Entry, other: _Entry) -> _Entry:
    """With the drafters of another text that this one begins with, or that begins with it."""
    both = dict(entry.drafters)
    for name, saved in other.drafters.items():
        if name not in both or both[name].length < saved.length:
            both[name] = saved
    return replace(entry, drafters=both)


def _common(one: Tokens, other: Tokens) -> int:
    """Tokens that two texts have in common from the first on."""
    count = min(len(one), len(other))
    differ = one[:count] != other[:count]
    first = int(differ.argmax()) if count else 0
    return first if count and differ[first] else count
