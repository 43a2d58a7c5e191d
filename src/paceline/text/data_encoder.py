"""Encodes `TemplateText`: control tokens come only from text that the template wrote, never from data."""

from __future__ import annotations

import re
import secrets
from contextlib import suppress

import tokenizers

from paceline.text.template_text import TemplateText

_MARKER = re.compile(r"<[|\uff5c].*[|\uff5c]>|<fim[-_]\w+>|▁<(PRE|SUF|MID|EOT)>", re.DOTALL)
"""Matches the spelling of control tokens. Some tokenizers, such as DeepSeek's and Qwen2.5-Coder's, do not flag all
control tokens as special."""


def control_tokens(backend: tokenizers.Tokenizer) -> dict[str, int]:
    """Return, as text -> id, all tokens that data must not form: special tokens, and added tokens that are spelled like
    control tokens."""
    added = backend.get_added_tokens_decoder().items()
    return {token.content: i for i, token in added if token.special or _MARKER.fullmatch(token.content)}


def _pieces(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """Split a text into the model's pieces, and return their ids. The list is empty if the model cannot spell the
    text."""
    with suppress(Exception):  # `tokenizers` raises only plain Exception here
        return [token.id for token in backend.model.tokenize(text)]
    return []


class DataEncoder:
    """Encodes `TemplateText` as the backend encodes a string, except that data forms no control tokens.

    A second tokenizer shares the backend's model, but knows each control token under a random alias. Control tokens
    that the template wrote are replaced by their aliases. So if a text has no control tokens in its data, it gets the
    same tokens as from the backend. All other texts are split by the same rules.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        control = control_tokens(backend)
        salt = secrets.token_hex(16)
        self._aliases = {text: f"{salt}x{i}z" for text, i in control.items()}
        longest_first = sorted(map(re.escape, control), key=len, reverse=True)
        self._control = re.compile("|".join(longest_first) or r"(?!)")
        self._twin = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._twin.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._twin.pre_tokenizer = backend.pre_tokenizer
        self._ids = self._add_tokens(backend)
        # The model's ordinary vocabulary may contain the same control tokens. If data forms one of them, its letters
        # become separate tokens.
        unknown = set(_pieces(backend, "\U0010ffff"))
        self._respelled = {
            i: [k for letter in text for k in _pieces(backend, letter) if k in unknown or k not in control.values()]
            for text, i in control.items()
            if i not in unknown and backend.model.token_to_id(text) == i
        }

    def _add_tokens(self, backend: tokenizers.Tokenizer) -> dict[int, int]:
        """Add the backend's added tokens to the twin. Return, for these tokens, the twin's id -> the backend's id."""
        ids: dict[int, int] = {}
        self._skip_gaps(backend)
        for i, token in sorted(backend.get_added_tokens_decoder().items()):
            name = self._aliases.get(token.content, token.content)
            flags = {key: getattr(token, key) for key in ("lstrip", "rstrip", "single_word", "normalized")}
            self._twin.add_tokens([tokenizers.AddedToken(name, **flags)])
            if (own := self._twin.token_to_id(name)) is not None:
                ids[own] = i
        return ids

    def _skip_gaps(self, backend: tokenizers.Tokenizer) -> None:
        """Keep the twin from assigning ids that the model uses.

        The twin counts new ids up from the number of tokens in the model. If the model's ids have gaps, some of these
        ids are already used.
        """
        used = backend.get_vocab(with_added_tokens=False)
        gaps = max(used.values(), default=-1) + 1 - len(used)
        self._twin.add_tokens([secrets.token_hex(16) for _ in range(gaps)])

    def encode(self, text: TemplateText) -> list[int]:
        """Return token ids without BOS and EOS. Errors of `tokenizers` are not converted."""
        plain, parts, at = text.plain(), [], 0
        for start, end in text.spans():
            parts += [plain[at:start], self._control.sub(lambda found: self._aliases[found[0]], plain[start:end])]
            at = end
        # Encode a batch of one text, because `encode` would hold the GIL and block all other threads.
        made = self._twin.encode_batch_fast(["".join([*parts, plain[at:]])], add_special_tokens=False)[0].ids
        if self._respelled.keys().isdisjoint(made):
            return [self._ids.get(i, i) for i in made]
        return [k for i in made for k in self._respelled.get(i, [self._ids.get(i, i)])]
