"""Structured output: any JSON object, a JSON schema, a regular expression, a Lark grammar.

A grammar is a logits processor. In each row, drafted or not, it bans the tokens that the grammar does not allow there.
So it works with any drafter and any acceptance rule, and the text equals plain decoding. If only one continuation is
possible, `Matcher.forced` finds it without a model, and the engine uses it as a draft.

llguidance (the extra "grammar") computes the masks. It is imported when a grammar is created.
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

_COMPILED_CACHE_BYTES, _SOURCE_CACHE_BYTES = 384 * 2**20, 16 * 2**20
"""Sizes, in bytes, of the cache of compiled grammars and of the cache of grammars in llguidance's form."""
_MAX_GROWTH = 12 * 2**20
"""Maximum growth of a compiled grammar while it is used, in bytes (`grammar_compile._MAX_LEXER_STATES`)."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the text of a reply. Create one with `json`, `json_schema`, `regex` or `lark`.

    The whole reply follows the grammar. EOS is allowed only where the text may end, and is forced where no other token
    is allowed. If `max_new_tokens` or a stop string ends the reply early, the reply is the beginning of a valid text.

    Attributes:
        kind: "json_schema", "regex" or "lark".
        text: The schema, pattern or grammar.
        whitespace: True to allow any white space between the tokens of JSON.
        size: Measured size of the compiled grammar, in bytes. 0 if it has not been measured.

    Raises:
        InvalidOption: If the grammar is not valid or not supported.
    """

    kind: Kind
    text: str
    whitespace: bool = False
    size: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in NAMES or not isinstance(self.text, str):
            raise InvalidOption(
                f"the kind of a grammar must be one of {', '.join(NAMES)}, got {self.kind!r}",
                "Create it with Grammar.json_schema, Grammar.regex or Grammar.lark",
            )
        self._source()

    @staticmethod
    def json(*, whitespace: bool = False) -> Grammar:
        """Allow any JSON object."""
        return Grammar.json_schema({"type": "object"}, whitespace=whitespace)

    @staticmethod
    def json_schema(schema: Mapping[str, Any] | bool | str, *, whitespace: bool = False) -> Grammar:
        """Allow JSON that follows a schema, with properties in the schema's order.

        By default, the text is a single line in the format of `json.dumps`, so the model chooses only the values. An
        object with `properties` has no other keys unless the schema allows them.

        Args:
            schema: A dict, or JSON text. Its key "x-guidance" sets llguidance's options.
            whitespace: True to allow any white space between tokens.

        Raises:
            InvalidOption: If the schema cannot be enforced. With {"x-guidance": {"lenient": true}} in the schema,
                keywords that cannot be enforced are ignored.
        """
        try:
            known = json.loads(schema if isinstance(schema, str) else json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidOption(
                f"the JSON schema is not valid JSON: {error}",
                "Use only dicts, lists, strings, numbers, booleans and None",
            ) from error
        # Options can only be added to an object, so write `true` and `false` as objects.
        known = {True: {}, False: {"enum": []}}[known] if isinstance(known, bool) else known
        return Grammar("json_schema", json.dumps(known), whitespace)

    @staticmethod
    def regex(pattern: str) -> Grammar:
        """Allow text that matches the whole pattern.

        It has the syntax of Rust's regex crate, which has no look-around and no back-references.
        """
        return Grammar("regex", pattern)

    @staticmethod
    def lark(text: str) -> Grammar:
        """Allow the texts of a context-free grammar, written in llguidance's dialect of Lark. The first rule is
        `start`."""
        return Grammar("lark", text)

    def matcher(
        self,
        tokenizer: Tokenizer,
        size: int,
        ends: Collection[int],
        min_tokens: int = 0,
        delayed_ends: Collection[int] = (),
        extra_ends: Collection[int] = (),
    ) -> Matcher:
        """Create the matcher for one reply.

        Args:
            tokenizer: The model's tokenizer.
            size: Number of tokens in the model's vocabulary.
            ends: Tokens that end every text.
            min_tokens: Minimum number of tokens before a token of `delayed_ends` may come, unless the grammar allows no
                other token.
            delayed_ends: See `min_tokens`.
            extra_ends: Additional tokens that end this text.

        Raises:
            InvalidOption: If there are no end tokens, or the grammar names special tokens that the model lacks.
        """
        if not ends and not extra_ends:
            raise InvalidOption(
                "a grammar needs an end-of-sequence token, and the model has none", "Set stop_token_ids"
            )
        known = frozenset(ends or extra_ends)
        compiled = self._compile(tokenizer, size, known)
        return Matcher(
            compiled.matcher, known, min_tokens, frozenset(delayed_ends), frozenset(extra_ends) - known, compiled
        )

    def _source(self) -> str:
        """Convert the grammar to llguidance's form, and check it without a model. Raise `InvalidOption` if it is not
        valid."""
        check_installed()

        def make() -> tuple[str, int]:
            with _grammar_errors(self.kind):
                source = grammar_compile.llguidance_source(self.kind, self.text, self.whitespace)
            return source, len(self.text) + len(source)

        return _sources.get(self, make)

    def _compile(self, tokenizer: Tokenizer, size: int, ends: frozenset[int]) -> Compiled:
        """Compile the grammar for a model with `size` tokens, or return it from the cache."""
        key = (self, tokenizer, size, ends)

        def make() -> tuple[Compiled, int]:
            if (found := _all_compiled.get(key)) is not None:
                return found, found.size
            with _grammar_errors(self.kind):
                matcher = grammar_compile.compile_matcher(_llguidance_tokenizer(tokenizer, size, ends), self._source())
            made = _all_compiled[key] = Compiled(matcher, self.size + _MAX_GROWTH)
            return made, made.size

        return _compiled.get(key, make)


class Compiled:
    """A compiled grammar at the start of a text. Copies of its matcher take no time, and share its lexer states."""

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        """Hold a compiled grammar. `size`: Size in bytes, including the growth while the grammar is used."""
        self.matcher, self.size = matcher, size


_all_compiled: WeakValueDictionary[Hashable, Compiled] = WeakValueDictionary()
"""All compiled grammars, including evicted grammars that active replies still use."""


def live_bytes() -> int:
    """Return the total size, in bytes, of all compiled grammars that are cached or in use."""
    return sum(one.size for one in list(_all_compiled.values()))


class Cache(Generic[K, V]):
    """A least-recently-used cache with a limit in bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._kept = limit, OrderedDict[K, tuple[V, int]]()
        self._lock = Lock()

    def get(self, key: K, make: Callable[[], tuple[V, int]]) -> V:
        """Return the value of a key. If it is not cached, `make` returns the value and its size in bytes."""
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


_sources: Cache[Grammar, str] = Cache(_SOURCE_CACHE_BYTES)
_compiled: Cache[Hashable, Compiled] = Cache(_COMPILED_CACHE_BYTES)


@contextmanager
def _grammar_errors(kind: Kind) -> Iterator[None]:
    """Convert llguidance's errors to `InvalidOption`."""
    try:
        yield
    except ValueError as error:
        raise grammar_error(kind, f"{error}") from error


def grammar_error(kind: Kind, message: str) -> InvalidOption:
    """Return the error for a grammar of this kind. `message`: llguidance's message."""
    return InvalidOption(
        f"{NAMES[kind]} cannot be used: {one_line(message)}",
        "Change it as described in Paceline's docs/how-to/structured-output.md",
    )


@lru_cache(maxsize=4)
def _llguidance_tokenizer(tokenizer: Tokenizer, size: int, ends: frozenset[int]) -> LLTokenizer:
    """Return llguidance's tokenizer for a model."""
    tokens, special = token_texts(tokenizer, size, ends)
    return grammar_compile.TokenTable(tokens, special, sorted(ends), tokenizer.spell).tokenizer()


def token_texts(tokenizer: Tokenizer, size: int, ends: frozenset[int]) -> tuple[list[bytes], list[int]]:
    """Return the bytes that each token adds to a text, and the ids of tokens that cannot occur as text."""
    names = {i: name.encode(errors="replace") for name, i in tokenizer.vocabulary.items()}
    texts = {i: said for i, said in tokenizer.token_bytes.items() if i not in ends}
    # A model's vocabulary may be larger than its tokenizer's.
    return [texts.get(i, names.get(i, b"")) for i in range(size)], [
        i for i in range(size) if i in names and i not in texts
    ]


def check_installed() -> None:
    """Raise `InvalidOption` if llguidance is not installed."""
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise InvalidOption(
            "grammars need llguidance, which is not installed", f"Install it: {install_line('grammar')}"
        ) from error
