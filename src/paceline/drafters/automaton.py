"""An online suffix automaton over token ids. For every substring of a text, it finds the tokens that followed, and
their counts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

_CHAIN = 16
"""Maximum number of contexts updated per token. Text rarely has more. Repetitive text has as many contexts as tokens,
but its shortest contexts, which are skipped, predict the same tokens as its longest contexts."""
_AHEAD = 8
"""The next automaton is built during the last `limit / _AHEAD` tokens, a few tokens at a time."""


class SuffixAutomaton:
    """The suffix automaton of a growing text (Blumer et al. 1985), as SAM decoding uses it (arXiv 2411.10666).

    A state stands for all substrings that end at the same set of positions in the text. State 0 is the empty context.
    There are at most two states and three transitions per token, `push` takes amortised O(1) time, and no transition is
    ever removed. Beyond the classic construction, each state counts its occurrences, and keeps its transitions in the
    order of their last use.

    Attributes:
        limit: Maximum number of tokens, at least 2. When it is exceeded, the automaton starts over with the latest half
            of the text. That half is read in advance, so that each token takes O(1) time. There are never more than `2
            * limit` states, plus `limit` states of the next automaton.
        text: The tokens.
        generation: Increases whenever the automaton starts over. States of an earlier generation are invalid.
    """

    def __init__(self, limit: int = 1 << 15) -> None:
        self.limit = max(limit, 2)
        self.text: list[int] = []
        self.generation = 0
        self._empty()
        self._heir: SuffixAutomaton | None = None
        """The next automaton, which covers the latest half of the text as far as it has been built."""

    def clear(self) -> None:
        """Forget the text."""
        self._restart()

    def _empty(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._last = 0

    @property
    def states(self) -> int:
        return len(self._link)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text, except tokens that would be dropped immediately."""
        tokens = list(tokens)
        if len(tokens) > self.limit:
            self._restart()
            tokens = tokens[-self.limit :]
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """Append `token` to the text."""
        if self._heir and len(self.text) == self.limit:
            self._inherit(self._heir)
        self._grow(token)
        left = self.limit - len(self.text)
        if left * _AHEAD <= self.limit:
            self._build_ahead(left)

    def _build_ahead(self, left: int) -> None:
        """Build a part of the next automaton, so that all steps are equal. `left`: Number of steps that remain until it
        is needed."""
        heir = self._heir = self._heir or SuffixAutomaton(self.limit)
        start = self.limit - self.limit // 2 + len(heir.text)
        for token in self.text[start : start - (start - self.limit) // (left + 1)]:
            heir._grow(token)

    def _inherit(self, heir: SuffixAutomaton) -> None:
        self._restart()
        self.text, self._last = heir.text, heir._last
        self._next, self._link, self._length, self._count = heir._next, heir._link, heir._length, heir._count

    def _restart(self) -> None:
        self.generation += 1
        self.text, self._heir = [], None
        self._empty()

    def _grow(self, token: int) -> None:
        self.text.append(token)
        after, link = self._next, self._link
        state, new = self._last, self._add({}, self._length[self._last] + 1, 1)
        while state >= 0 and token not in after[state]:
            after[state][token] = new
            state = link[state]
        link[new] = self._split(state, token) if state >= 0 else 0
        self._last = new
        self._notice(state, token)

    def _add(self, after: dict[int, int], length: int, count: int) -> int:
        self._next.append(after)
        self._link.append(0)
        self._length.append(length)
        self._count.append(count)
        return len(self._link) - 1

    def _split(self, state: int, token: int) -> int:
        """Return the state that contains the longest string of `state`, followed by `token`. If that state also holds
        longer strings, split it."""
        after, link = self._next, self._link
        old = after[state][token]
        if self._length[old] == self._length[state] + 1:
            return old
        clone = self._add(after[old].copy(), self._length[state] + 1, self._count[old])
        link[clone], link[old] = link[old], clone
        while state >= 0 and after[state].get(token) == old:
            after[state][token] = clone
            state = link[state]
        return clone

    def _notice(self, state: int, token: int) -> None:
        """Count `token` as a follower of `state` and of its shorter contexts, and make it their most recent
        follower."""
        previous = -1
        for _ in range(_CHAIN):
            if state < 0:
                return
            after = self._next[state]
            target = after[token] = after.pop(token)
            if target != previous:
                self._count[target] += 1
                previous = target
            state = self._link[state]

    def context(self) -> tuple[int, int]:
        """Return the state and the length, in tokens, of the longest suffix of the text that also occurs earlier."""
        state = max(self._link[self._last], 0)
        return state, self._length[state]

    def shorter(self, state: int) -> tuple[int, int]:
        """Return the next shorter context that may have other followers, and its length. State 0 returns itself."""
        state = max(self._link[state], 0)
        return state, self._length[state]

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Follow another text by one token. This takes amortised O(1) time.

        Args:
            state: The state of the longest suffix of that text that occurs in this automaton's text.
            length: Length of that suffix.
            token: The next token.

        Returns:
            The state and the length after the token. (0, 0) if the token never occurs.
        """
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        target = self._next[state].get(token)
        return (0, 0) if target is None else (target, length + 1)

    def settle(self, state: int, length: int) -> tuple[int, int]:
        """Return the state that now holds a context of `length` tokens, which was in `state`. That state may have been
        split since."""
        while state and self._length[self._link[state]] >= length:
            state = self._link[state]
        return state, length

    def followers(self, state: int, most: int) -> list[tuple[int, int]]:
        """Return up to `most` followers of a context, as pairs (token, count), the most recent first."""
        count = self._count
        return [(token, count[target]) for token, target in islice(reversed(self._next[state].items()), most)]
