"""Compilation of grammars by llguidance. Runs in forks of the helper process too (`paceline.text.sandbox`)."""

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
"""JSON on one line: a small model that may write white space may write nothing else."""
_STATES = 100_000
"""The most states of a grammar's lexer: some 10 MB."""
_ITEMS = 5000
"""The most parser items per mask: some 5 ms. Ambiguous grammars take ever more."""


def source(kind: str, text: str, whitespace: bool) -> str:
    """Return the grammar in llguidance's form, checked without a model. Raises `ValueError`."""
    from llguidance import LLMatcher

    made: str
    if kind == "regex":
        made = LLMatcher.grammar_from_regex(text)
    elif kind == "lark":
        made = LLMatcher.grammar_from_lark(text)
    else:
        schema = json_schema.enforceable(json.loads(text), _ANY_SPACE if whitespace else ONE_LINE)
        made = LLMatcher.grammar_from_json_schema(json.dumps(schema))
    wrong: str = LLMatcher.validate_grammar(made)
    # A warning is advice on how to write the grammar.
    if wrong and not wrong.startswith("WARNING"):
        raise ValueError(wrong)
    return made


def matcher(words: LLTokenizer, made: str) -> LLMatcher:
    """Return a matcher at the beginning of a text. Raises `ValueError`."""
    from llguidance import LLMatcher, LLParserLimits

    compiled = LLMatcher(
        words, made, log_level=0, limits=LLParserLimits(max_lexer_states=_STATES, step_max_items=_ITEMS)
    )
    if compiled.is_error():
        raise ValueError(compiled.get_error())
    return compiled


def one_line(said: str) -> str:
    """Return llguidance's message without its state dump."""
    line = " ".join(said.partition("<state>")[0].split())
    return line if len(line) <= 300 else line[:300] + "..."


class TokenTable:
    """The tokenizer interface of llguidance. `tokens`: the bytes of each; `special`: ids that no text spells."""

    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special: Sequence[int], ends: Sequence[int], encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, min(ends)
        self._ends, self._encode = sorted(ends), encode

    def __call__(self, text: str) -> Sequence[int]:
        return self._encode(text)

    def tokenizer(self) -> LLTokenizer:
        """Return llguidance's own."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=self._ends)


# Jobs of the helper process

_PREPARED: dict[str, LLTokenizer] = {}


def prepare(argument: tuple[str, Sequence[bytes], Sequence[int], Sequence[int]]) -> None:
    """Make the tokenizer that `measure` knows as `key`, from (key, tokens, special, ends)."""
    key, tokens, special, ends = argument
    _PREPARED[key] = TokenTable(tokens, special, ends, lambda text: []).tokenizer()


def measure(argument: tuple[str, str, str, bool]) -> int:
    """Compile (key of a tokenizer, kind, text, whitespace) and return the bytes that this took."""
    key, kind, text, whitespace = argument
    os.nice(10)
    before = _resident()
    compiled = matcher(_PREPARED[key], source(kind, text, whitespace))
    compiled.compute_bitmask()
    return max(0, _resident() - before)


def _resident() -> int:
    """Bytes of memory that this process holds; 0 where the system does not tell."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0
