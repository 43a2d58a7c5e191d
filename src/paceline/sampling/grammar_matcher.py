"""The state of a reply in its grammar. It gives masks for the target and for drafters, and the tokens that must
follow."""

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
from paceline.sampling.sampler import Forcing, Prefix
from paceline.sampling.truncation import Floats

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Matcher(Forcing):
    """The state of one reply in its grammar.

    The committed text is read once. A drafted path is read after it, and is rolled back for the next row. The mask of a
    row depends only on its prefix, not on the order of the rows. Verification reuses the masks that were computed for a
    draft.
    """

    def __init__(
        self,
        compiled: LLMatcher,
        ends: frozenset[int],
        least: int = 0,
        late: frozenset[int] = frozenset(),
        further: frozenset[int] = frozenset(),
        held: object = None,
    ) -> None:
        """Start at the beginning of a reply.

        Args:
            compiled: The compiled grammar.
            ends: End tokens that `compiled` knows.
            least: See `Grammar.matcher`.
            late: See `Grammar.matcher`.
            further: End tokens that `compiled` does not know.
            held: An object to keep alive, so that the grammar's size counts as long as the reply is active.
        """
        self._compiled, self._ends, self._held = compiled, ends | further, held
        self._further = sum(1 << token for token in further)
        self._least, self._late = least, sum(1 << token for token in late)
        self._masks: dict[tuple[int, ...], _Allowed] = {}
        self._length = 0
        self._caps = np.empty((0, 8), np.float32)
        """Buffer for upper bounds of logits."""
        self._reset()

    def _reset(self) -> None:
        self._now = self._compiled.deep_copy()
        self._read: list[int] = []
        self._sure = 0
        """Number of committed tokens among the tokens that have been read."""
        self._runs: list[_ForcedTokens | None] = [None]
        """For each token that has been read, the forced tokens after it. None if they have not been computed."""

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        """Set the logits of forbidden tokens to -inf, in place.

        Raises:
            InvalidOption: If the grammar is too complex for llguidance.
        """
        if len(prefix.token_ids) != self._length:
            self._masks.clear()
            self._length = len(prefix.token_ids)
        path = tuple(prefix.path)
        if path not in self._masks:
            self._masks[path] = self._safely(self._allowed, prefix)
        return self._keep(logits, self._masks[path])

    def _keep(self, row: Tensor, allowed: _Allowed) -> Tensor:
        """Set all tokens of a row [V] except the allowed ones to -inf, in place."""
        if allowed is None:
            return row
        if isinstance(allowed, int):
            value = row[allowed].clone() if allowed < len(row) else None
            row.fill_(-torch.inf)
            if value is not None:
                row[allowed] = value
            return row
        if len(self._caps) != len(allowed):
            self._caps = np.empty((len(allowed), 8), np.float32)
        # This has no branch per token, so it is many times faster than a masked fill.
        _ceilings().take(np.frombuffer(allowed, np.uint8), 0, self._caps, "clip")
        caps = torch.from_numpy(self._caps.reshape(-1))[: len(row)]
        row[len(caps) :] = -torch.inf
        open_ = row[: len(caps)]
        torch.minimum(open_, caps.to(open_), out=open_)
        return row

    def forced(self, prefix: Prefix, limit: int) -> list[int]:
        """Return up to `limit` tokens that must follow. The list is empty if there is a choice, or if the text may
        end."""
        run: _ForcedTokens = self._safely(self._forced, prefix)
        return run.tokens[run.at : run.at + limit]

    def _safely(self, ask: Callable[[Prefix], Any], prefix: Prefix) -> Any:
        """Call `ask`, and reset the state if it fails."""
        try:
            return ask(prefix)
        except BaseException:
            self._reset()
            raise

    def _allowed(self, prefix: Prefix) -> _Allowed:
        if not self._go(prefix):
            return b""
        if self._over:
            return None
        run = self._run()
        if run:
            return run.next
        bits = self._now.compute_bitmask()
        self._check()
        allowed = int.from_bytes(bits, "little")
        if self._further:
            allowed &= ~self._further
            allowed |= self._further if self._now.is_accepting() else 0
        if len(self._read) < self._least:
            allowed = allowed & ~self._late or allowed
        bits = allowed.to_bytes(len(bits), "little")
        single = allowed and not allowed & (allowed - 1)
        return allowed.bit_length() - 1 if single else bits

    def _forced(self, prefix: Prefix) -> _ForcedTokens:
        return self._run() if self._go(prefix) and not self._over else _ForcedTokens([])

    @property
    def _over(self) -> bool:
        """True if an end token has been read. Drafted tokens after it do not matter."""
        return bool(self._read) and self._read[-1] in self._ends

    def _go(self, prefix: Prefix) -> bool:
        """Move to the end of the prefix's reply, or to its end token. Return True if the grammar allows the reply."""
        wanted = [*prefix.token_ids[prefix.num_prompt_tokens + self._sure :], *prefix.path]
        have = self._read[self._sure :]
        same = 0
        while same < min(len(have), len(wanted)) and have[same] == wanted[same]:
            same += 1
        if not self._back(len(have) - same):
            return self._go(prefix)
        stands = all(self._over or self._take(token) for token in wanted[same:])
        self._sure = min(len(prefix.token_ids) - prefix.num_prompt_tokens, len(self._read))
        return stands

    def _back(self, count: int) -> bool:
        """Roll back `count` tokens. Return False if the state was reset instead, so that all tokens must be read
        again."""
        if not count:
            return True
        # llguidance never receives end tokens.
        told = count - self._over
        if told and not self._now.rollback(told):
            self._reset()
            return False
        del self._read[-count:], self._runs[-count:]
        return True

    def _take(self, token: int) -> bool:
        """Read the next token if the grammar allows it."""
        run = self._run()
        if token in self._ends:
            if not self._now.is_accepting():
                return False
        elif (run and token != run.next) or not self._now.try_consume_tokens([token]):
            self._check()
            return False
        self._read.append(token)
        self._runs.append(run.rest() if run else None)
        return True

    def _run(self) -> _ForcedTokens:
        """Return the forced tokens at the current state.

        They are computed once, at the start of a forced run. llguidance tokenizes the whole run in each call, and in
        the middle of the run it might tokenize the rest differently.
        """
        run = self._runs[-1]
        if run is None:
            tokens = self._now.compute_ff_tokens()
            self._check()
            valid = self._now.validate_tokens(tokens) if tokens else 0
            text = takewhile(lambda token: token not in self._ends, tokens[:valid])
            run = self._runs[-1] = _ForcedTokens(list(text))
        return run

    def _check(self) -> None:
        if self._now.is_error():
            said = one_line(self._now.get_error())
            raise InvalidOption(
                f"the grammar became too complex after {len(self._read)} tokens: {said}", "Simplify the grammar"
            )


@dataclass(frozen=True, slots=True)
class _ForcedTokens:
    """Forced tokens. The first `at` of them have been read."""

    tokens: list[int]
    at: int = 0

    def __bool__(self) -> bool:
        return self.at < len(self.tokens)

    @property
    def next(self) -> int:
        return self.tokens[self.at]

    def rest(self) -> _ForcedTokens | None:
        """Return the forced tokens after the next token. Return None after the last of them, because more tokens may be
        forced then."""
        return _ForcedTokens(self.tokens, self.at + 1) if self.at + 1 < len(self.tokens) else None


_Allowed = int | bytes | None
"""The tokens that may follow: the id of the only one, a bit mask of several tokens (b"" for no token), or None if any
token may follow."""


@cache
def _ceilings() -> Floats:
    """Return, for each byte of a mask, the upper bounds of its tokens' logits, [256, 8]. The bound is inf for allowed
    tokens, and -inf for all others."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, np.float32(np.inf), np.float32(-np.inf))
