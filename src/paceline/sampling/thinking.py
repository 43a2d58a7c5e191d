"""A budget for reasoning: once it is spent, the marker that ends the reasoning must follow, and the answer goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.sampling.sampler import Forcing, Prefix
from paceline.text.growing import overlap

if TYPE_CHECKING:
    from paceline.text.tokenizer import Tokenizer

_PATIENCE = 8
"""Tokens beyond the budget that may complete a character, or a marker that has begun."""
_BEFORE = 32
"""Last tokens of the prompt, which may hold the marker before the reasoning."""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A budget of `tokens` for reasoning at the beginning of a reply.

    start, end: Texts around the reasoning. A prompt that ends with `start` begins it, and so does an empty `start`.
    forced: Text that follows where the budget is spent; "" is `end`.
    """

    tokens: int
    start: str
    end: str
    forced: str = ""

    def limit(self, tokenizer: Tokenizer) -> ThinkingLimit:
        """Return the processor of one reply."""
        special = {i: name.encode() for i, name in tokenizer.special_in(self.start + self.end).items()}
        spelled = tokenizer.token_bytes
        return ThinkingLimit(
            self,
            tokenizer.encode(self.forced or self.end, special=False),
            lambda token: special.get(token) or spelled.get(token, b""),
        )


@dataclass(frozen=True, slots=True)
class _Reasoned:
    """State of the reasoning after some tokens of the reply.

    inside: None before it has begun, False after its end.
    tail: The bytes in which a marker may be.
    count: Tokens of the reasoning.
    forced: Forced tokens so far.
    """

    inside: bool | None
    tail: bytes = b""
    count: int = 0
    forced: int = 0


class ThinkingLimit(Forcing):
    """Allows nothing but the end of the reasoning where the budget is spent. Depends on the tokens of a prefix alone.

    The committed text is read once; each drafted path is read after it.
    """

    def __init__(self, budget: ThinkingBudget, forced: Sequence[int], spell: Callable[[int], bytes]) -> None:
        """`forced`: tokens that end the reasoning. `spell`: returns the bytes of a token."""
        self._budget, self._forced, self._spell = budget, forced, spell
        self._start, self._end = budget.start.encode(), budget.end.encode()
        self._known: dict[tuple[int, ...], _Reasoned] = {}
        """Progress after the committed text and, by their drafted tokens, after longer ones."""
        self._read = -1

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        if must := self.forced(prefix, 1):
            logits.fill_(-torch.inf)
            logits[must] = 0.0  # bans do not keep reasoning from its end
        return logits

    def forced(self, prefix: Prefix, limit: int) -> list[int]:
        """Return up to `limit` tokens of the end that must follow; none where the budget is not spent."""
        progress = self._at(prefix)
        return [*self._forced[progress.forced :][:limit]] if self._spent(progress) else []

    def _spent(self, progress: _Reasoned) -> bool:
        if not progress.inside or progress.count < self._budget.tokens:
            return False
        open_ = _unfinished(progress.tail) or overlap(progress.tail, self._end)
        return progress.forced > 0 or not open_ or progress.count >= self._budget.tokens + _PATIENCE

    def _at(self, prefix: Prefix) -> _Reasoned:
        if self._read != len(prefix.token_ids):
            progress = self._known.get(())
            if progress is None:
                progress, self._read = self._begin(prefix), prefix.num_prompt_tokens
            for token in prefix.token_ids[self._read :]:
                progress = self._after(progress, token)
            self._known, self._read = {(): progress}, len(prefix.token_ids)
        path = tuple(prefix.path)
        for size in range(1, len(path) + 1):
            if path[:size] not in self._known:
                self._known[path[:size]] = self._after(self._known[path[: size - 1]], path[size - 1])
        return self._known[path]

    def _begin(self, prefix: Prefix) -> _Reasoned:
        """Return the state at the end of the prompt."""
        prompt = prefix.token_ids[: prefix.num_prompt_tokens][-_BEFORE:]
        text = b"".join(map(self._spell, prompt)).rstrip()
        return _Reasoned(True if text.endswith(self._start.rstrip()) else None)

    def _after(self, progress: _Reasoned, token: int) -> _Reasoned:
        """Return the state after one token more."""
        if progress.inside is False:
            return progress
        if self._spent(progress):
            over = progress.forced + 1 == len(self._forced)
            return _Reasoned(False) if over else replace(progress, forced=progress.forced + 1)
        text = progress.tail + self._spell(token)
        if progress.inside is None:
            text = text.lstrip()
            if not text.startswith(self._start):
                return _Reasoned(None if self._start.startswith(text) else False, text)
            text, progress = text.removeprefix(self._start), _Reasoned(True, count=-1)
        if self._end in text:
            return _Reasoned(False)
        # A character has at most three more bytes after its first.
        return _Reasoned(True, text[-max(3, len(self._end)) :], progress.count + 1)


def _unfinished(text: bytes) -> bool:
    """Return whether a text ends inside a character of UTF-8."""
    for size, byte in enumerate(reversed(text[-3:]), 1):
        if byte >= 0xC0:
            return size < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False
