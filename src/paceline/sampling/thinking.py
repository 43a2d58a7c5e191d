"""A budget for reasoning. When it is spent, the marker that ends the reasoning is forced, and the answer follows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.sampling.prefix_states import PrefixStates
from paceline.sampling.sampler import ForcingProcessor, Prefix
from paceline.text.growing import overlap

if TYPE_CHECKING:
    from paceline.text.tokenizer import Tokenizer

_MAX_EXTRA_TOKENS = 8
"""Maximum number of additional tokens to complete a character, or a marker that has begun."""
_SEARCHED_PROMPT_TOKENS = 32
"""Number of last prompt tokens that are searched for the marker before the reasoning."""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A budget for reasoning at the beginning of a reply.

    Attributes:
        tokens: Maximum number of tokens.
        start: Marker before the reasoning. If it is empty or the prompt ends with it, the reply begins with reasoning.
        end: Marker after the reasoning.
        forced: The text to force when the budget is spent. "" means `end`.
    """

    tokens: int
    start: str
    end: str
    forced: str = ""

    def limit(self, tokenizer: Tokenizer) -> ThinkingLimit:
        """Create the processor of a reply."""
        special = {i: name.encode() for i, name in tokenizer.special_in(self.start + self.end).items()}
        spelled = tokenizer.token_bytes
        return ThinkingLimit(
            self,
            tokenizer.encode(self.forced or self.end, special=False),
            lambda token: special.get(token) or spelled.get(token, b""),
        )


@dataclass(frozen=True, slots=True)
class _ReasoningState:
    """The state of the reasoning after some tokens of the reply.

    Attributes:
        inside: None before the reasoning, True inside it, and False after it.
        tail: The last bytes of the text, which may contain a marker or a part of one.
        count: Number of tokens in the reasoning so far.
        forced: Number of forced tokens so far.
    """

    inside: bool | None
    tail: bytes = b""
    count: int = 0
    forced: int = 0


class ThinkingLimit(ForcingProcessor):
    """A processor that allows only the end of the reasoning when the budget is spent. Its result depends only on the
    prefix.

    The committed text is read once, and drafted paths are read after it.
    """

    def __init__(self, budget: ThinkingBudget, forced: Sequence[int], spell: Callable[[int], bytes]) -> None:
        """Create a processor.

        Args:
            budget: The budget.
            forced: Tokens that end the reasoning.
            spell: A function that returns the bytes of a token.
        """
        self._budget, self._forced, self._spell = budget, forced, spell
        self._start, self._end = budget.start.encode(), budget.end.encode()
        self._states = PrefixStates(self._first_state, self._next_state)

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        if must := self.forced(prefix, 1):
            logits.fill_(-torch.inf)
            logits[must] = 0.0  # even if it is banned
        return logits

    def forced(self, prefix: Prefix, limit: int) -> list[int]:
        """Return up to `limit` of the forced tokens that remain. The list is empty until the budget is spent."""
        progress = self._states.at(prefix)
        return [*self._forced[progress.forced :][:limit]] if self._must_end(progress) else []

    def _must_end(self, progress: _ReasoningState) -> bool:
        if not progress.inside or progress.count < self._budget.tokens:
            return False
        is_incomplete = _ends_inside_character(progress.tail) or overlap(progress.tail, self._end)
        return progress.forced > 0 or not is_incomplete or progress.count >= self._budget.tokens + _MAX_EXTRA_TOKENS

    def _first_state(self, prefix: Prefix) -> tuple[_ReasoningState, int]:
        """Return the state at the end of the prompt, and the prompt's length."""
        prompt = prefix.token_ids[: prefix.num_prompt_tokens][-_SEARCHED_PROMPT_TOKENS:]
        text = b"".join(map(self._spell, prompt)).rstrip()
        return _ReasoningState(True if text.endswith(self._start.rstrip()) else None), prefix.num_prompt_tokens

    def _next_state(self, progress: _ReasoningState, token: int) -> _ReasoningState:
        """Return the state after another token."""
        if progress.inside is False:
            return progress
        if self._must_end(progress):
            over = progress.forced + 1 == len(self._forced)
            return _ReasoningState(False) if over else replace(progress, forced=progress.forced + 1)
        text = progress.tail + self._spell(token)
        if progress.inside is None:
            text = text.lstrip()
            if not text.startswith(self._start):
                return _ReasoningState(None if self._start.startswith(text) else False, text)
            text, progress = text.removeprefix(self._start), _ReasoningState(True, count=-1)
        if self._end in text:
            return _ReasoningState(False)
        # A character has at most three bytes after its first byte.
        return _ReasoningState(True, text[-max(3, len(self._end)) :], progress.count + 1)


def _ends_inside_character(text: bytes) -> bool:
    """Return True if a text ends inside a UTF-8 character."""
    for size, byte in enumerate(reversed(text[-3:]), 1):
        if byte >= 0xC0:
            return size < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False
