"""Trimmed output heads: drafters score only the tokens that the target is likely to write.

In a small model, an output head over a large vocabulary takes as long as half of the layers (FR-Spec, arXiv
2502.14856). Tokens that a drafter cannot propose lower acceptance, but never change the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoints.head_fit import vocabulary_of
from paceline.checkpoints.loader import Loaded
from paceline.drafters.vocabulary import choose, count
from paceline.errors import InvalidData, InvalidOption
from paceline.files.reading import MIB, open_regular
from paceline.text.prompt_rows import parse_object
from paceline.text.tokenizer import Tokenizer

DraftVocab = int | str | Path
"""The tokens that a drafter scores: "auto", a number of tokens (0 for all), or a JSONL file of the target's answers,
which selects their most frequent tokens."""

_TRIM_ABOVE = 1 << 16
"""Vocabulary size above which "auto" trims the head."""
_KEPT_LOWEST_IDS = 3 << 14
"""Number of tokens that "auto" keeps. It keeps the lowest ids, because tokenizers number merges in order of frequency.
In answers of Qwen2.5-Coder 1.5B, 3% of the tokens have higher ids. With only 32k tokens kept, 6% of the tokens would be
missing, and with 16k tokens 11% (docs/notes/drafters.md#trimmed-output-heads)."""
_KEPT_FREQUENT = 1 << 15
"""Number of tokens to keep if a file of answers shows which tokens are frequent."""
_MAX_ANSWER_BYTES = 16 * MIB
"""Maximum number of bytes to read from a file of answers. They hold about four million tokens, and reading them takes
about 4 s."""


def check_draft_vocab(wanted: DraftVocab) -> None:
    """Check the option `draft_vocab` before anything is loaded.

    Raises:
        InvalidOption: If the number is negative or the file does not exist.
    """
    if not isinstance(wanted, int) and wanted != "auto" and not Path(wanted).is_file():
        raise InvalidOption(f"draft_vocab: there is no file {wanted}", "Use auto, a number, or a JSONL file of answers")
    if isinstance(wanted, bool) or (isinstance(wanted, int) and wanted < 0):
        raise InvalidOption(f"draft_vocab must be 0 or more tokens, got {wanted!r}", "Use auto, or 0 for all")


def head_tokens(wanted: DraftVocab, target: Loaded, tokenizer: Tokenizer, size: int) -> Tensor | None:
    """Choose the tokens that a drafter's output head scores.

    EOS tokens are always kept. The head is not trimmed if the drafter's vocabulary differs from the target's.

    Args:
        wanted: The option `draft_vocab`.
        target: The target.
        tokenizer: The drafter's tokenizer.
        size: Number of tokens of the drafter's head.

    Returns:
        Token ids, int64, in ascending order. None if all tokens are kept.

    Raises:
        InvalidOption: If the number of tokens is not possible.
        InvalidData: If the file holds no answers, or a line is invalid.
    """
    size = min(size, target.target.vocab_size)
    if vocabulary_of(tokenizer) != vocabulary_of(target.tokenizer):
        return None
    counts, kept = torch.zeros(size, dtype=torch.int64), _KEPT_LOWEST_IDS if size > _TRIM_ABOVE else 0
    if isinstance(wanted, int):
        kept = wanted
    elif wanted != "auto":
        counts, kept = count(_answers(Path(wanted), tokenizer, size), size), _KEPT_FREQUENT
    always = [token for token in target.eos if token < size]
    return choose(counts, max(kept, len(always)), always) if 0 < kept < size else None


def _answers(path: Path, tokenizer: Tokenizer, size: int) -> Iterator[list[int]]:
    """Yield, for each answer in the first `_MAX_ANSWER_BYTES` bytes of a file, its token ids below `size`.

    The rows have the format of answers of `paceline train`: {"answer": text, "token_ids"?: [...]}. Raises
    `InvalidData`.
    """
    found = False
    with open_regular(path) as file:
        number = 0
        while (left := _MAX_ANSWER_BYTES - file.tell()) > 0 and (line := file.readline(left)):
            number += 1
            if line.strip() and (line.endswith(b"\n") or file.tell() < _MAX_ANSWER_BYTES):
                found = True
                yield [token for token in _token_ids(path, number, line, tokenizer) if token < size]
    if not found:
        raise InvalidData(f"{path} holds no answers", 'Use a JSONL file whose rows have an "answer"')


def _token_ids(path: Path, number: int, line: bytes, tokenizer: Tokenizer) -> list[int]:
    try:
        row = parse_object(line)
        ids, text = row.get("token_ids"), row.get("answer")
        if ids is None:
            if not isinstance(text, str):
                raise ValueError("'answer' must be text")
            return tokenizer.encode(text, special=False)
        if not isinstance(ids, list) or any(type(i) is not int or i < 0 for i in ids):
            raise ValueError("'token_ids' must hold whole numbers >= 0")
        return ids
    except ValueError as error:
        raise InvalidData(f"{path}, line {number}: {error}", "Correct or remove the line") from None
