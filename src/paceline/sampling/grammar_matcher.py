"""The state of a reply in its grammar: masks of allowed tokens, for the target and for drafters, and forced tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import InvalidOption
from paceline.sampling.grammar_compile import one_line
from paceline.sampling.sampler import ForcingProcessor, Prefix
from paceline.sampling.truncation import Floats

if TYPE_CHECKING:
    from llguidance import LLMatcher

_Allowed = int | bytes | None
"""The tokens that a grammar allows next.

- None: any token.
- int: the id of the only allowed token.
- bytes: a bit mask with a bit for each token, lowest bit first. Tokens after its end are forbidden, so b"" allows no
  token.
"""


class Matcher(ForcingProcessor):
    """The state of one reply in its grammar.

    The matcher consumes the committed text once. It then consumes the drafted path of a row, and rolls back for the
    next row. The mask of a row depends only on its prefix, not on the order of the rows. Verification reuses the masks
    that were computed while drafting.
    """

    def __init__(
        self,
        compiled: LLMatcher,
        ends: frozenset[int],
        min_tokens: int = 0,
        delayed_ends: frozenset[int] = frozenset(),
        extra_ends: frozenset[int] = frozenset(),
        owner: object = None,
    ) -> None:
        """Start at the beginning of a reply.

        Args:
            compiled: The compiled grammar.
            ends: End tokens that `compiled` knows.
            min_tokens: See `Grammar.matcher`.
            delayed_ends: See `Grammar.matcher`.
            extra_ends: End tokens that `compiled` does not know.
            owner: An object to keep alive, so that the grammar's size counts as long as the reply is active.
        """
        self._compiled, self._ends, self._owner = compiled, ends | extra_ends, owner
        self._extra_ends = sum(1 << token for token in extra_ends)
        self._min_tokens, self._delayed_ends = min_tokens, sum(1 << token for token in delayed_ends)
        self._allowed: dict[tuple[int, ...], _Allowed] = {}
        """Drafted path after the committed text -> the tokens that the grammar allows after it."""
        self._committed = 0
        """Number of committed tokens for which `_allowed` is valid."""
        self._bounds = np.empty((0, 8), np.float32)
        """Buffer for upper bounds of logits, [bytes of a mask, 8]."""
        self._reset()

    def _reset(self) -> None:
        self._state = self._compiled.deep_copy()
        self._read: list[int] = []
        self._read_committed = 0
        """Number of committed tokens among the tokens that have been read."""
        self._forced_runs: list[_ForcedRun | None] = [None]
        """The forced tokens at the start, and after each token that has been read. None if they have not been
        computed."""

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        """Set the logits of forbidden tokens to -inf, in place.

        Raises:
            InvalidOption: If the grammar is too complex for llguidance.
        """
        if len(prefix.token_ids) != self._committed:
            self._allowed.clear()
            self._committed = len(prefix.token_ids)
        path = tuple(prefix.path)
        if path not in self._allowed:
            self._allowed[path] = self._reset_on_error(self._compute_allowed, prefix)
        return self._mask(logits, self._allowed[path])

    def _mask(self, row: Tensor, allowed: _Allowed) -> Tensor:
        """Set all tokens of a row [V] except the allowed ones to -inf, in place."""
        if allowed is None:  # any token
            return row
        if isinstance(allowed, int):  # a single token
            value = row[allowed].clone() if allowed < len(row) else None
            row.fill_(-torch.inf)
            if value is not None:
                row[allowed] = value
            return row
        if len(self._bounds) != len(allowed):
            self._bounds = np.empty((len(allowed), 8), np.float32)
        # This has no branch per token, so it is many times faster than a masked fill.
        _bounds_of_bytes().take(np.frombuffer(allowed, np.uint8), 0, self._bounds, "clip")
        bounds = torch.from_numpy(self._bounds.reshape(-1))[: len(row)]
        row[len(bounds) :] = -torch.inf
        covered = row[: len(bounds)]
        torch.minimum(covered, bounds.to(covered), out=covered)
        return row

    def forced(self, prefix: Prefix, limit: int) -> list[int]:
        """Return up to `limit` forced tokens, which are the only ones that the grammar allows next. The list is empty
        if several tokens are allowed, or if the text may end here."""
        run: _ForcedRun = self._reset_on_error(self._compute_forced, prefix)
        return run.tokens[run.position : run.position + limit]

    def _reset_on_error(self, compute: Callable[[Prefix], Any], prefix: Prefix) -> Any:
        """Return `compute(prefix)`. If it raises an error, reset the state, which may be inconsistent."""
        try:
            return compute(prefix)
        except BaseException:
            self._reset()
            raise

    def _compute_allowed(self, prefix: Prefix) -> _Allowed:
        if not self._advance_to(prefix):
            return b""  # no token: the grammar does not allow the prefix itself
        if self._finished:
            return None  # any token: drafted tokens after an end token do not matter
        run = self._forced_run()
        if run:
            return run.next_token
        bits = self._state.compute_bitmask()
        self._raise_if_failed()
        allowed = int.from_bytes(bits, "little")
        if self._extra_ends:
            allowed &= ~self._extra_ends
            allowed |= self._extra_ends if self._state.is_accepting() else 0
        if len(self._read) < self._min_tokens:
            allowed = allowed & ~self._delayed_ends or allowed
        bits = allowed.to_bytes(len(bits), "little")
        single = allowed and not allowed & (allowed - 1)
        return allowed.bit_length() - 1 if single else bits

    def _compute_forced(self, prefix: Prefix) -> _ForcedRun:
        return self._forced_run() if self._advance_to(prefix) and not self._finished else _ForcedRun([])

    @property
    def _finished(self) -> bool:
        """True if an end token has been read."""
        return bool(self._read) and self._read[-1] in self._ends

    def _advance_to(self, prefix: Prefix) -> bool:
        """Read the prefix's reply up to its end or its first end token. Roll back other tokens first.

        Return True if the grammar allows the reply.
        """
        wanted = [*prefix.token_ids[prefix.num_prompt_tokens + self._read_committed :], *prefix.path]
        have = self._read[self._read_committed :]
        same = 0
        while same < min(len(have), len(wanted)) and have[same] == wanted[same]:
            same += 1
        if not self._roll_back(len(have) - same):
            return self._advance_to(prefix)
        is_allowed = all(self._finished or self._consume(token) for token in wanted[same:])
        self._read_committed = min(len(prefix.token_ids) - prefix.num_prompt_tokens, len(self._read))
        return is_allowed

    def _roll_back(self, count: int) -> bool:
        """Roll back `count` tokens. Return False if the state was reset instead, so that all tokens must be read
        again."""
        if not count:
            return True
        # llguidance never receives end tokens.
        received = count - self._finished
        if received and not self._state.rollback(received):
            self._reset()
            return False
        del self._read[-count:], self._forced_runs[-count:]
        return True

    def _consume(self, token: int) -> bool:
        """Read the next token if the grammar allows it. Return False if it does not."""
        run = self._forced_run()
        if token in self._ends:
            if not self._state.is_accepting():
                return False
        elif (run and token != run.next_token) or not self._state.try_consume_tokens([token]):
            self._raise_if_failed()
            return False
        self._read.append(token)
        self._forced_runs.append(run.rest() if run else None)
        return True

    def _forced_run(self) -> _ForcedRun:
        """Return the forced tokens at the current state.

        They are computed once, at the start of a forced run. llguidance tokenizes the whole run in each call, and in
        the middle of the run it might tokenize the rest differently.
        """
        run = self._forced_runs[-1]
        if run is None:
            tokens = self._state.compute_ff_tokens()
            self._raise_if_failed()
            valid = self._state.validate_tokens(tokens) if tokens else 0
            text = takewhile(lambda token: token not in self._ends, tokens[:valid])
            run = self._forced_runs[-1] = _ForcedRun(list(text))
        return run

    def _raise_if_failed(self) -> None:
        if self._state.is_error():
            message = one_line(self._state.get_error())
            raise InvalidOption(
                f"the grammar became too complex after {len(self._read)} tokens: {message}", "Simplify the grammar"
            )


@dataclass(frozen=True, slots=True)
class _ForcedRun:
    """A run of forced tokens. The first `position` tokens have been read. The run is false if no token is left."""

    tokens: list[int]
    position: int = 0

    def __bool__(self) -> bool:
        return self.position < len(self.tokens)

    @property
    def next_token(self) -> int:
        return self.tokens[self.position]

    def rest(self) -> _ForcedRun | None:
        """Return the run after its next token. Return None if that is its last token, because more tokens may be forced
        after it."""
        return _ForcedRun(self.tokens, self.position + 1) if self.position + 1 < len(self.tokens) else None


@cache
def _bounds_of_bytes() -> Floats:
    """Return a table of upper bounds of logits, [256, 8]: for each byte of a bit mask, the bounds of its eight tokens.
    The bound is inf for allowed tokens, and -inf for all others."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, np.float32(np.inf), np.float32(-np.inf))
