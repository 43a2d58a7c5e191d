"""Compiled grammars, kept for the next reply up to a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from paceline.errors import InvalidOption, install_line
from paceline.sampling import grammar_compile

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from paceline.text.tokenizer import Tokenizer

Kind = Literal["json_schema", "regex", "lark"]
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Form(NamedTuple):
    """A grammar as it was given. `whitespace`: JSON with any white space, see `Grammar.json_schema`."""

    kind: Kind
    text: str
    whitespace: bool = False


NAMES: dict[Kind, str] = {"json_schema": "the JSON schema", "regex": "the regular expression", "lark": "the grammar"}

_COMPILED, _SOURCES = 384 * 2**20, 16 * 2**20
"""Bytes of compiled grammars, and of their sources, that are kept for the next text."""
_GROWTH = 12 * 2**20
"""Bytes that a grammar may come to hold while texts are written by it (`grammar_compile._STATES`)."""


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


_sources: Cache[Form, str] = Cache(_SOURCES)
_compiled: Cache[Hashable, Compiled] = Cache(_COMPILED)


def source(form: Form) -> str:
    """Return the grammar in llguidance's form, checked without a model. Raises `InvalidOption`."""
    check_installed()

    def make() -> tuple[str, int]:
        with _named(form.kind):
            made = grammar_compile.source(*form)
        return made, len(form.text) + len(made)

    return _sources.get(form, make)


def compiled(form: Form, tokenizer: Tokenizer, size: int, ends: frozenset[int], measured: int = 0) -> Compiled:
    """Return a grammar compiled for a model with `size` tokens. `measured`: its bytes. Raises `InvalidOption`."""
    key = (form, tokenizer, size, ends)

    def make() -> tuple[Compiled, int]:
        if (found := _live.get(key)) is not None:
            return found, found.size
        with _named(form.kind):
            matcher = grammar_compile.matcher(_words(tokenizer, size, ends), source(form))
        made = _live[key] = Compiled(matcher, measured + _GROWTH)
        return made, made.size

    return _compiled.get(key, make)


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


def one_line(said: str) -> str:
    """Return llguidance's message without its state dump."""
    line = " ".join(said.partition("<state>")[0].split())
    return line if len(line) <= 300 else line[:300] + "..."


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
