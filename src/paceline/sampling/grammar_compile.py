"""The compilation of grammars with llguidance. This code also runs in forks of the helper process
(`paceline.text.sandbox`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.sampling import json_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_ANY_SPACE: JsonCompileOptions = {}
ONE_LINE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line. If a grammar allows any white space, small models sometimes write white space without end."""
_MAX_LEXER_STATES = 100_000
"""Maximum number of lexer states of a grammar. They take about 10 MB."""
_MAX_PARSER_ITEMS = 5000
"""Maximum number of parser items per mask. They take about 5 ms. Without a limit, each mask of an ambiguous grammar
would take longer than the mask before it."""


def llguidance_source(kind: str, text: str, whitespace: bool) -> str:
    """Convert a grammar to llguidance's form, and check it without a model.

    Raises:
        ValueError: If the grammar is not valid or not supported.
    """
    from llguidance import LLMatcher

    grammar: str
    if kind == "regex":
        grammar = LLMatcher.grammar_from_regex(text)
    elif kind == "lark":
        grammar = LLMatcher.grammar_from_lark(text)
    else:
        schema = json_schema.enforceable_schema(json.loads(text), _ANY_SPACE if whitespace else ONE_LINE)
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    problem: str = LLMatcher.validate_grammar(grammar)
    # Ignore warnings, which only advise how to write a better grammar.
    if problem and not problem.startswith("WARNING"):
        raise ValueError(problem)
    return grammar


def compile_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar in llguidance's form. Return a matcher at the beginning of a text.

    Raises:
        ValueError: If the grammar is too large or names unknown tokens.
    """
    from llguidance import LLMatcher, LLParserLimits

    compiled = LLMatcher(
        tokenizer,
        grammar,
        log_level=0,
        limits=LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, step_max_items=_MAX_PARSER_ITEMS),
    )
    if compiled.is_error():
        raise ValueError(compiled.get_error())
    return compiled


def one_line(message: str) -> str:
    """Return llguidance's message on one line, without the dump of its state."""
    line = " ".join(message.partition("<state>")[0].split())
    return line if len(line) <= 300 else line[:300] + "..."


class TokenTable:
    """The tokenizer interface that llguidance expects.

    Attributes:
        tokens: Bytes of each token.
        special_token_ids: Ids of the tokens that cannot occur as text.
        eos_token_id: The lowest end token.
    """

    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special: Sequence[int], ends: Sequence[int], encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, min(ends)
        self._ends, self._encode = sorted(ends), encode

    def __call__(self, text: str) -> Sequence[int]:
        return self._encode(text)

    def tokenizer(self) -> LLTokenizer:
        """Return llguidance's own tokenizer."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=self._ends)


# Jobs of the helper process

_TOKENIZERS: dict[str, LLTokenizer] = {}


def prepare(argument: tuple[str, Sequence[bytes], Sequence[int], Sequence[int]]) -> None:
    """Create the tokenizer that `measure` finds under `key`, from (key, tokens, special, ends)."""
    key, tokens, special, ends = argument
    _TOKENIZERS[key] = TokenTable(tokens, special, ends, lambda text: []).tokenizer()


def measure(argument: tuple[str, str, str, bool]) -> int:
    """Compile a grammar, and return the memory that this took, in bytes. `argument`: (key of the tokenizer, kind, text,
    whitespace)."""
    key, kind, text, whitespace = argument
    os.nice(10)
    before = _resident()
    compiled = compile_matcher(_TOKENIZERS[key], llguidance_source(kind, text, whitespace))
    compiled.compute_bitmask()
    return max(0, _resident() - before)


def _resident() -> int:
    """Return the resident memory of this process in bytes, or 0 if the system does not report it."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0
