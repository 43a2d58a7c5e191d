"""The state of a logits processor after a prefix. The committed tokens are read once, and drafted paths after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from paceline.sampling.sampler import Prefix

State = TypeVar("State")


class PrefixStates(Generic[State]):
    """The states that result from reading the tokens of a prefix one by one."""

    def __init__(self, begin: Callable[[Prefix], tuple[State, int]], after: Callable[[State, int], State]) -> None:
        """Set the rules.

        Args:
            begin: A function that returns the state after the first tokens of a new text, and the number of these
                tokens.
            after: A function that returns the state after another token.
        """
        self._begin, self._after = begin, after
        self._known: dict[tuple[int, ...], State] = {}
        """Drafted tokens -> the state after the committed text and these tokens."""
        self._read = -1

    def at(self, prefix: Prefix) -> State:
        """Return the state after a prefix. If the committed text has become shorter, it is read again from the
        start."""
        if self._read != len(prefix.token_ids):
            state, read = self._known.get(()), self._read
            if state is None or read > len(prefix.token_ids):
                state, read = self._begin(prefix)
            for token in prefix.token_ids[read:]:
                state = self._after(state, token)
            self._known, self._read = {(): state}, len(prefix.token_ids)
        path = tuple(prefix.path)
        for size in range(1, len(path) + 1):
            if path[:size] not in self._known:
                self._known[path[:size]] = self._after(self._known[path[: size - 1]], path[size - 1])
        return self._known[path]
