"""Replies of a given form: any JSON object, a JSON schema, a regular expression, a Lark grammar.

The grammar is a logits processor like any other: at each row, drafted or not, what it does not allow cannot come next.
So it holds for drafters and for every rule, and the text is what plain decoding under it writes. Where it leaves one
way to go on, that is known without a model: `Matcher.forced` says how, and the engine drafts it.

Masks come from llguidance (the extra "grammar"), which is imported when a grammar is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import InvalidOption
from paceline.sampling.grammar_cache import NAMES, Compiled, Form, Kind, compiled, one_line, source
from paceline.sampling.sampler import Forcing, Prefix
from paceline.sampling.truncation import Floats

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from paceline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of a reply. Make one with `json`, `json_schema`, `regex` or `lark`; all raise `InvalidOption`.

    A reply keeps to it from its first token to its end: EOS comes where the grammar may stop and nowhere else, and
    where nothing else is left. What `max_new_tokens` or a stop string cuts off is the beginning of such a text.
    """

    kind: Kind
    text: str
    whitespace: bool = False
    size: int = field(default=0, compare=False)
    """Bytes that it takes when it is compiled, where that has been measured."""

    def __post_init__(self) -> None:
        if self.kind not in NAMES or not isinstance(self.text, str):
            raise InvalidOption(f"a grammar of kind {self.kind!r} is unknown", "Use Grammar.json_schema and the others")
        source(self._form)

    @property
    def _form(self) -> Form:
        return Form(self.kind, self.text, self.whitespace)

    @staticmethod
    def json(*, whitespace: bool = False) -> Grammar:
        """Any JSON object."""
        return Grammar.json_schema({"type": "object"}, whitespace=whitespace)

    @staticmethod
    def json_schema(schema: Mapping[str, Any] | bool | str, *, whitespace: bool = False) -> Grammar:
        """JSON that a schema allows, its properties in the schema's order. `schema`: as Python has it, or as JSON.

        The text is one line as `json.dumps` writes it, so that most of what is between values needs no choice.
        `whitespace`: any white space between tokens instead. The key "x-guidance" of the schema sets llguidance's own
        options. What llguidance cannot enforce is refused.
        """
        try:
            known = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidOption(f"the JSON schema is no JSON: {error}", "Give dicts, lists, text, numbers") from error
        # What allows everything, or nothing, in the form that options can be added to.
        known = {True: {}, False: {"enum": []}}[known] if isinstance(known, bool) else known
        return Grammar("json_schema", json.dumps(known), whitespace)

    @staticmethod
    def regex(pattern: str) -> Grammar:
        """Text that matches the whole pattern, in the syntax of Rust's regex crate: no look-around, no references."""
        return Grammar("regex", pattern)

    @staticmethod
    def lark(text: str) -> Grammar:
        """Text of a context-free grammar in llguidance's dialect of Lark; its first rule is `start`."""
        return Grammar("lark", text)

    def matcher(
        self,
        tokenizer: Tokenizer,
        size: int,
        ends: Collection[int],
        least: int = 0,
        late: Collection[int] = (),
        further: Collection[int] = (),
    ) -> Matcher:
        """For one reply of a model with `size` tokens, of which `ends` end any text, and `further` ones this text.

        Before `least` tokens of reply those of `late` cannot come, unless the grammar leaves nothing else. Raises
        `InvalidOption` for a model without ends, and for special tokens that it does not have.
        """
        if not ends and not further:
            raise InvalidOption(
                "a grammar ends with an end-of-sequence token, and the model has none", "Give stop_token_ids"
            )
        known = frozenset(ends or further)
        made = compiled(self._form, tokenizer, size, known, self.size)
        return Matcher(made.matcher, known, least, frozenset(late), frozenset(further) - known, made)


class Matcher(Forcing):
    """Where one reply stands in its grammar.

    Committed text is read once; a drafted path is read behind it and taken back when another row is asked for. The
    answer depends on the prefix alone, in whatever order rows come. A row that was ranked for a draft is not computed
    again when the draft is verified.
    """

    def __init__(
        self,
        compiled: LLMatcher,
        ends: frozenset[int],
        least: int = 0,
        late: frozenset[int] = frozenset(),
        further: frozenset[int] = frozenset(),
        held: Compiled | None = None,
    ) -> None:
        """`ends`: those that `compiled` knows. `further`: ends that it does not know. `held`: what counts the grammar's
        bytes as long as a reply is written by it."""
        self._compiled, self._ends, self._held = compiled, ends | further, held
        self._further = sum(1 << token for token in further)
        self._least, self._late = least, sum(1 << token for token in late)
        self._masks: dict[tuple[int, ...], _Allowed] = {}
        self._length = 0
        self._caps = np.empty((0, 8), np.float32)
        """Room for what logits may be at most."""
        self._reset()

    def _reset(self) -> None:
        self._now = self._compiled.deep_copy()
        self._read: list[int] = []
        self._sure = 0
        """So many of the tokens read are committed."""
        self._runs: list[_ForcedTokens | None] = [None]
        """What is forced after each of the tokens read, as far as that has been asked."""

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        """A row [V], changed in place: what the grammar forbids is -inf. Raises `InvalidOption` for a grammar that
        llguidance finds too complex to follow."""
        if len(prefix.token_ids) != self._length:
            self._masks.clear()
            self._length = len(prefix.token_ids)
        path = tuple(prefix.path)
        if path not in self._masks:
            self._masks[path] = self._safely(self._allowed, prefix)
        return self._keep(logits, self._masks[path])

    def _keep(self, row: Tensor, allowed: _Allowed) -> Tensor:
        """A row [V], changed in place: -inf but where a token is allowed."""
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
        # No branch per token: many times as fast as to fill by a mask.
        _ceilings().take(np.frombuffer(allowed, np.uint8), 0, self._caps, "clip")
        caps = torch.from_numpy(self._caps.reshape(-1))[: len(row)]
        row[len(caps) :] = -torch.inf
        open_ = row[: len(caps)]
        torch.minimum(open_, caps.to(open_), out=open_)
        return row

    def forced(self, prefix: Prefix, limit: int) -> list[int]:
        """Return up to `limit` tokens that must follow; none where there is a choice or the text may end."""
        run: _ForcedTokens = self._safely(self._forced, prefix)
        return run.tokens[run.at : run.at + limit]

    def _safely(self, ask: Callable[[Prefix], Any], prefix: Prefix) -> Any:
        """A failure must not leave a state that the next row then trusts."""
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
        """Whether an end has been read: what a draft has after it is thrown away, whatever it is."""
        return bool(self._read) and self._read[-1] in self._ends

    def _go(self, prefix: Prefix) -> bool:
        """Read exactly this prefix's reply (up to an end). Whether the grammar allows it."""
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
        """Take back so many tokens. False where that cannot be done, and all must be read anew."""
        if not count:
            return True
        # An end is none of llguidance's business: it was never told.
        told = count - self._over
        if told and not self._now.rollback(told):
            self._reset()
            return False
        del self._read[-count:], self._runs[-count:]
        return True

    def _take(self, token: int) -> bool:
        """Read one token more, if the grammar allows it."""
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
        """What is forced where the matcher stands.

        Asked of llguidance once, where a forced stretch begins: it spells the whole stretch anew each time, and not
        always alike from within.
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
            raise InvalidOption(f"the grammar cannot be followed after {len(self._read)} tokens: {said}", "Simplify it")


@dataclass(frozen=True, slots=True)
class _ForcedTokens:
    """Forced tokens, of which the first `at` have been read."""

    tokens: list[int]
    at: int = 0

    def __bool__(self) -> bool:
        return self.at < len(self.tokens)

    @property
    def next(self) -> int:
        return self.tokens[self.at]

    def rest(self) -> _ForcedTokens | None:
        """After one token more; None where that is the last one, and more may be forced then."""
        return _ForcedTokens(self.tokens, self.at + 1) if self.at + 1 < len(self.tokens) else None


_Allowed = int | bytes | None
"""The one token that may follow, or a bit for each of several (b"": none), or None for any."""


@cache
def _ceilings() -> Floats:
    """[256, 8]: for each byte of a mask what its tokens' logits may be at most."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, np.float32(np.inf), np.float32(-np.inf))
