"""Prompts for filling in the middle of a text. The model needs special tokens for this."""

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
"""Tokens that end the generated text, in addition to a chat model's EOS."""


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """Ids of a model's special tokens for filling in the middle.

    Attributes:
        prefix: Begins the text before the gap.
        suffix: Begins the text after the gap.
        middle: Begins the text that fills the gap.
        file: Begins the name of another file. None if the model has no such token.
        ends: Tokens that end the text that fills the gap.
    """

    prefix: int
    suffix: int
    middle: int
    file: int | None
    ends: tuple[int, ...]

    @staticmethod
    def of(token_id: Callable[[str], int | None]) -> InfillTokens | None:
        """Return a model's tokens, or None if it cannot fill in the middle. `token_id`: Maps a token's text to its id,
        or to None."""
        for names in _MARKERS:
            prefix, suffix, middle = map(token_id, names)
            if prefix is not None and suffix is not None and middle is not None:
                file = next((found for name in _FILES if (found := token_id(name)) is not None), None)
                ends = tuple(found for name in _ENDS if (found := token_id(name)) is not None)
                return InfillTokens(prefix, suffix, middle, file, ends)
        return None


def infill_tokens(tokenizer: Tokenizer) -> InfillTokens:
    """Return a model's tokens. Raise `InvalidPrompt` if it cannot fill in the middle."""
    found = InfillTokens.of(tokenizer.token_id)
    if found is None:
        raise InvalidPrompt(
            "this model cannot fill in the middle: its vocabulary has no tokens for it",
            "Leave out suffix, or serve a model such as Qwen2.5-Coder",
        )
    return found


def infill_prompt(tokenizer: Tokenizer, before: str, after: str, files: Sequence[tuple[str, str]] = ()) -> list[int]:
    """Return the token ids of a prompt for the text between `before` and `after`.

    Special tokens that the texts spell out remain ordinary text.

    Args:
        tokenizer: The model's tokenizer.
        before: Text before the gap.
        after: Text after the gap.
        files: Names and contents of other files. They are left out if the model has no token for files.

    Raises:
        InvalidPrompt: If the model cannot fill in the middle.
    """
    tokens = infill_tokens(tokenizer)

    def encoded(text: str) -> list[int]:
        return tokenizer.encode(TemplateText(text), special=False)

    prompt = [] if tokenizer.bos_token_id is None else tokenizer.encode("", special=True)
    if tokens.file is not None:
        for name, content in files:
            prompt += [tokens.file, *encoded(f"{name}\n{content}\n")]
    return [*prompt, tokens.prefix, *encoded(before), tokens.suffix, *encoded(after), tokens.middle]
