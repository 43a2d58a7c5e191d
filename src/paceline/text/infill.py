"""Filling in the middle: prompts of models that have the tokens for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import InvalidPrompt
from paceline.text.template_text import TemplateText
from paceline.text.tokenizer import Tokenizer

_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, Qwen3-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder 2, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
_FILES = ("<|file_sep|>", "<file_sep>")
_ENDS = ("<|endoftext|>", "<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "▁<EOT>", *_FILES)
"""Tokens that end what is filled in; a chat model's EOS is another."""


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """Ids of the tokens before the text, before what follows the gap, and before what fills it. `file`: before a file's
    name, None for models without such a token. `ends`: end what is filled in."""

    prefix: int
    suffix: int
    middle: int
    file: int | None
    ends: tuple[int, ...]

    @staticmethod
    def of(tokenizer: Tokenizer) -> InfillTokens | None:
        """Return a model's tokens, None if it has none."""
        token_id = tokenizer.token_id
        for names in _MARKERS:
            prefix, suffix, middle = map(token_id, names)
            if prefix is not None and suffix is not None and middle is not None:
                file = next((found for name in _FILES if (found := token_id(name)) is not None), None)
                ends = tuple(found for name in _ENDS if (found := token_id(name)) is not None)
                return InfillTokens(prefix, suffix, middle, file, ends)
        return None


def fills_gaps(has: Callable[[str], bool]) -> bool:
    """Return whether a vocabulary `has` the tokens for filling gaps."""
    return any(all(map(has, names)) for names in _MARKERS)


def infill_tokens(tokenizer: Tokenizer) -> InfillTokens:
    """Return a model's tokens. Raises `InvalidPrompt`."""
    found = InfillTokens.of(tokenizer)
    if found is None:
        raise InvalidPrompt(
            "this model cannot fill in the middle: its vocabulary has no tokens for that",
            "Leave out suffix, or serve a model such as Qwen2.5-Coder",
        )
    return found


def infill_prompt(tokenizer: Tokenizer, before: str, after: str, files: Sequence[tuple[str, str]] = ()) -> list[int]:
    """Return the token ids of a prompt for the text between `before` and `after`. `files`: names and contents of other
    files, where the model has a token for them. Control tokens that the texts spell out stay text. Raises
    `InvalidPrompt`."""
    tokens = infill_tokens(tokenizer)

    def encoded(text: str) -> list[int]:
        return tokenizer.encode(TemplateText(text), special=False)

    prompt = [] if tokenizer.bos_token_id is None else tokenizer.encode("", special=True)
    if tokens.file is not None:
        for name, content in files:
            prompt += [tokens.file, *encoded(f"{name}\n{content}\n")]
    return [*prompt, tokens.prefix, *encoded(before), tokens.suffix, *encoded(after), tokens.middle]
