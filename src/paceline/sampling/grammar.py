"""Structured output: any JSON object, a JSON schema, a regular expression, a Lark grammar.

The grammar is a logits processor like any other: at each row, drafted or not, it bans the tokens that it does not
allow. So it holds for drafters and for every rule, and the text is that of plain decoding. Where only one continuation
is possible, `Matcher.forced` returns it without a model, and the engine drafts it.

Masks come from llguidance (the extra "grammar"), which is imported when a grammar is made.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar
from weakref import WeakValueDictionary

from paceline.errors import InvalidOption, install_line
from paceline.sampling import grammar_compile
from paceline.sampling.grammar_compile import one_line
from paceline.sampling.grammar_matcher import Matcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from paceline.text.tokenizer import Tokenizer

Kind = Literal["json_schema", "regex", "lark"]
NAMES: dict[Kind, str] = {"json_schema": "the JSON schema", "regex": "the regular expression", "lark": "the grammar"}

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_COMPILED, _SOURCES = 384 * 2**20, 16 * 2**20
"""Bytes of compiled grammars, and of their sources, that are kept for the next text."""
_GROWTH = 12 * 2**20
"""Bytes that a grammar may come to hold while texts are written by it (`grammar_compile._STATES`)."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """Constraint on a reply. Make one with `json`, `json_schema`, `regex` or `lark`; all raise `InvalidOption`.

    The whole reply follows it: EOS is allowed only where the grammar may end, and forced where nothing else is allowed.
    A reply that `max_new_tokens` or a stop string cuts short is the beginning of a valid text.
    """

    kind: Kind
    text: str
    whitespace: bool = False
    size: int = field(default=0, compare=False)
    """Measured bytes of the compiled grammar; 0 if unknown."""

    def __post_init__(self) -> None:
        if self.kind not in NAMES or not isinstance(self.text, str):
            raise InvalidOption(f"a grammar of kind {self.kind!r} is unknown", "Use Grammar.json_schema and the others")
        self._source()

    @staticmethod
    def json(*, whitespace: bool = False) -> Grammar:
        """Any JSON object."""
        return Grammar.json_schema({"type": "object"}, whitespace=whitespace)

    @staticmethod
    def json_schema(schema: Mapping[str, Any] | bool | str, *, whitespace: bool = False) -> Grammar:
        """JSON that follows a schema, its properties in the schema's order. `schema`: a dict, or JSON text.

        The text is one line in the format of `json.dumps`, so that the model chooses little besides the values.
        `whitespace`: allow any white space between tokens instead. An object with `properties` has no further keys
        unless the schema says so. A schema that cannot be enforced is refused, unless its key "x-guidance", which sets
        llguidance's options, holds {"lenient": true}.
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
        made = self._compile(tokenizer, size, known)
        return Matcher(made.matcher, known, least, frozenset(late), frozenset(further) - known, made)

    def _source(self) -> str:
        """Return the grammar in llguidance's form, checked without a model. Raises `InvalidOption`."""
        check_installed()

        def make() -> tuple[str, int]:
            with _named(self.kind):
                made = grammar_compile.source(self.kind, self.text, self.whitespace)
            return made, len(self.text) + len(made)

        return _sources.get(self, make)

    def _compile(self, tokenizer: Tokenizer, size: int, ends: frozenset[int]) -> Compiled:
        """Return the grammar compiled for a model with `size` tokens. Raises `InvalidOption`."""
        key = (self, tokenizer, size, ends)

        def make() -> tuple[Compiled, int]:
            if (found := _live.get(key)) is not None:
                return found, found.size
            with _named(self.kind):
                matcher = grammar_compile.matcher(_words(tokenizer, size, ends), self._source())
            made = _live[key] = Compiled(matcher, self.size + _GROWTH)
            return made, made.size

        return _compiled.get(key, make)


class Compiled:
    """A compiled grammar at the start of a text. Copies are free and share its learned states."""

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        """`size`: its bytes, growth included."""
        self.matcher, self.size = matcher, size


_live: WeakValueDictionary[Hashable, Compiled] = WeakValueDictionary()
"""All compiled grammars, evicted ones that active replies still use included."""


def live_bytes() -> int:
    """Return the bytes of all compiled grammars, cached or in use."""
    return sum(one.size for one in list(_live.values()))


class Cache(Generic[K, V]):
    """A least-recently-used cache bounded in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._kept = limit, OrderedDict[K, tuple[V, int]]()
        self._lock = Lock()

    def get(self, key: K, make: Callable[[], tuple[V, int]]) -> V:
        """Return the value of a key. `make` returns it and its bytes if it is not cached."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
        value, size = make()
        with self._lock:
            self._kept[key] = (value, size)
            while sum(size for _, size in self._kept.values()) > self._limit:
                self._kept.popitem(last=False)
        return value


_sources: Cache[Grammar, str] = Cache(_SOURCES)
_compiled: Cache[Hashable, Compiled] = Cache(_COMPILED)


@contextmanager
def _named(kind: Kind) -> Iterator[None]:
    """Turn llguidance's errors into `InvalidOption`."""
    try:
        yield
    except ValueError as error:
        raise refused(kind, f"{error}") from error


def refused(kind: Kind, said: str) -> InvalidOption:
    """Return the error for a grammar of this kind, with llguidance's message."""
    return InvalidOption(
        f"{NAMES[kind]} cannot be used: {one_line(said)}",
        "Change it; Paceline's docs/how-to/structured-output.md says what is possible",
    )


@lru_cache(maxsize=4)
def _words(tokenizer: Tokenizer, size: int, ends: frozenset[int]) -> LLTokenizer:
    """Return llguidance's tokenizer for a model."""
    tokens, special = spelled(tokenizer, size, ends)
    return grammar_compile.TokenTable(tokens, special, sorted(ends), tokenizer.spell).tokenizer()


def spelled(tokenizer: Tokenizer, size: int, ends: frozenset[int]) -> tuple[list[bytes], list[int]]:
    """Return the bytes that each token adds to a text, and the ids of tokens that no text spells."""
    names = {i: name.encode(errors="replace") for name, i in tokenizer.vocabulary.items()}
    texts = {i: said for i, said in tokenizer.token_bytes.items() if i not in ends}
    # A model may have more rows than there are tokens.
    return [texts.get(i, names.get(i, b"")) for i in range(size)], [
        i for i in range(size) if i in names and i not in texts
    ]


def check_installed() -> None:
    """Check that llguidance is installed. Raises `InvalidOption`."""
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise InvalidOption(
            "grammars take llguidance, which is not installed", f"Install it: {install_line('grammar')}"
        ) from error
