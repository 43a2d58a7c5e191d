"""Replies of a given form: any JSON object, a JSON schema, a regular expression, a Lark grammar.

The grammar is a logits processor like any other: at each row, drafted or not, what it does not allow cannot come next.
So it holds for drafters and for every rule, and the text is what plain decoding under it writes. Where it leaves one
way to go on, that is known without a model: `Matcher.forced` says how, and the engine drafts it.

Masks come from llguidance (the extra "grammar"), which is imported when a grammar is made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from paceline.cuts import Floats
from paceline.errors import InvalidOption, install_line
from paceline.sampler import Forcing, Prefix

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from paceline.tokenizer import Tokenizer

Kind = Literal["json_schema", "regex", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of a reply. Make one with `json`, `json_schema`, `regex` or `lark`; all raise `InvalidOption`.

    A reply keeps to it from its first token to its end: EOS comes where the grammar may stop and nowhere else, and
    where nothing else is left. What `max_new_tokens` or a stop string cuts off is the beginning of such a text.
    """

    kind: Kind
    text: str
    whitespace: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _NAMES or not isinstance(self.text, str):
            raise InvalidOption(f"a grammar of kind {self.kind!r} is unknown", "Use Grammar.json_schema and the others")
        _source(self)

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
        self, tokenizer: Tokenizer, size: int, ends: Collection[int], least: int = 0, late: Collection[int] = ()
    ) -> Matcher:
        """For one reply of a model with `size` tokens, of which `ends` end a text.

        Before `least` tokens of reply those of `late` cannot come, unless the grammar leaves nothing else. Raises
        `InvalidOption` for a model without ends, and for special tokens that it does not have.
        """
        if not ends:
            raise InvalidOption(
                "a grammar ends with an end-of-sequence token, and the model has none", "Give stop_token_ids"
            )
        stops = frozenset(ends)
        return Matcher(_compiled(self, tokenizer, size, stops), stops, least, frozenset(late))


class Matcher(Forcing):
    """Where one reply stands in its grammar.

    Committed text is read once; a drafted path is read behind it and taken back when another row is asked for. The
    answer depends on the prefix alone, in whatever order rows come. A row that was ranked for a draft is not computed
    again when the draft is verified.
    """

    def __init__(
        self, compiled: LLMatcher, ends: frozenset[int], least: int = 0, late: frozenset[int] = frozenset()
    ) -> None:
        self._compiled, self._ends = compiled, ends
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
        self._runs: list[_Run | None] = [None]
        """What is forced after each of the tokens read, as far as that has been asked."""

    def __call__(self, prefix: Prefix, logits: Tensor) -> Tensor:
        """A row [V], changed in place: what the grammar forbids is -inf. Raises `InvalidOption` for a grammar that
        llguidance finds too complex to follow."""
        if len(prefix.text) != self._length:
            self._masks.clear()
            self._length = len(prefix.text)
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

    def forced(self, prefix: Prefix, most: int) -> list[int]:
        """The tokens that must follow, at most so many; none where there is a choice or the text may end."""
        run: _Run = self._safely(self._forced, prefix)
        return run.tokens[run.at : run.at + most]

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
        if len(self._read) < self._least:
            allowed = allowed & ~self._late or allowed
            bits = allowed.to_bytes(len(bits), "little")
        single = allowed and not allowed & (allowed - 1)
        return allowed.bit_length() - 1 if single else bits

    def _forced(self, prefix: Prefix) -> _Run:
        return self._run() if self._go(prefix) and not self._over else _Run([])

    @property
    def _over(self) -> bool:
        """Whether an end has been read: what a draft has after it is thrown away, whatever it is."""
        return bool(self._read) and self._read[-1] in self._ends

    def _go(self, prefix: Prefix) -> bool:
        """Read exactly this prefix's reply (up to an end). Whether the grammar allows it."""
        wanted = [*prefix.text[prefix.prompt + self._sure :], *prefix.path]
        have = self._read[self._sure :]
        same = 0
        while same < min(len(have), len(wanted)) and have[same] == wanted[same]:
            same += 1
        if not self._back(len(have) - same):
            return self._go(prefix)
        stands = all(self._over or self._take(token) for token in wanted[same:])
        self._sure = min(len(prefix.text) - prefix.prompt, len(self._read))
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

    def _run(self) -> _Run:
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
            run = self._runs[-1] = _Run(list(text))
        return run

    def _check(self) -> None:
        if self._now.is_error():
            said = _one_line(self._now.get_error())
            raise InvalidOption(f"the grammar cannot be followed after {len(self._read)} tokens: {said}", "Simplify it")


@dataclass(frozen=True, slots=True)
class _Run:
    """Forced tokens, of which the first `at` have been read."""

    tokens: list[int]
    at: int = 0

    def __bool__(self) -> bool:
        return self.at < len(self.tokens)

    @property
    def next(self) -> int:
        return self.tokens[self.at]

    def rest(self) -> _Run | None:
        """After one token more; None where that is the last one, and more may be forced then."""
        return _Run(self.tokens, self.at + 1) if self.at + 1 < len(self.tokens) else None


_Allowed = int | bytes | None
"""The one token that may follow, or a bit for each of several (b"": none), or None for any."""


@cache
def _ceilings() -> Floats:
    """[256, 8]: for each byte of a mask what its tokens' logits may be at most."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, np.float32(np.inf), np.float32(-np.inf))


_NAMES: dict[Kind, str] = {"json_schema": "the JSON schema", "regex": "the regular expression", "lark": "the grammar"}


@lru_cache(maxsize=256)
def _source(grammar: Grammar) -> str:
    """The grammar as llguidance reads it, checked as far as that needs no model."""
    make = _library().LLMatcher
    source: str
    if grammar.kind == "regex":
        source = make.grammar_from_regex(grammar.text)
    elif grammar.kind == "lark":
        source = make.grammar_from_lark(grammar.text)
    else:
        line = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        try:
            source = make.grammar_from_json_schema(grammar.text, defaults={} if grammar.whitespace else line)
        except ValueError as error:
            raise _bad(grammar, str(error)) from error
    wrong: str = make.validate_grammar(source)
    # What it merely warns of is how a grammar should be written.
    if wrong and not wrong.startswith("WARNING"):
        raise _bad(grammar, wrong)
    return source


@lru_cache(maxsize=32)
def _compiled(grammar: Grammar, tokenizer: Tokenizer, size: int, ends: frozenset[int]) -> LLMatcher:
    """At the beginning of a text; to be copied, which costs nothing and shares what is learnt of the grammar."""
    compiled: LLMatcher = _library().LLMatcher(_words(tokenizer, size, ends), _source(grammar), log_level=0)
    if compiled.is_error():
        raise _bad(grammar, compiled.get_error())
    return compiled


def _bad(grammar: Grammar, said: str) -> InvalidOption:
    return InvalidOption(f"{_NAMES[grammar.kind]} cannot be used: {_one_line(said)}", "See docs/sampling.md")


def _one_line(said: str) -> str:
    """What llguidance says, without its state."""
    line = " ".join(said.partition("<state>")[0].split())
    return line if len(line) <= 300 else line[:300] + "..."


@lru_cache(maxsize=4)
def _words(tokenizer: Tokenizer, size: int, ends: frozenset[int]) -> LLTokenizer:
    """A model's tokens as llguidance knows them: by the bytes that they add to a text."""
    library = _library()
    asked = library.TokenizerWrapper(_Words(tokenizer, size, ends))
    words: LLTokenizer = library.LLTokenizer(asked, n_vocab=size, eos_token=sorted(ends))
    return words


class _Words:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, ends: frozenset[int]) -> None:
        self._encode = tokenizer.spell
        names = {i: name.encode(errors="replace") for name, i in tokenizer.vocabulary.items()}
        texts = {i: said for i, said in tokenizer.surfaces.items() if i not in ends}
        self.eos_token_id = min(ends)
        self.tokens = [texts.get(i, names.get(i, b"")) for i in range(size)]
        # A model may have more rows than there are tokens.
        self.special_token_ids = [i for i in range(size) if i in names and i not in texts]

    def __call__(self, text: str) -> Sequence[int]:
        return self._encode(text)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise InvalidOption(
            "grammars take llguidance, which is not installed", f"Install it: {install_line('grammar')}"
        ) from error
    return llguidance
