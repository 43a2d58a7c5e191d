"""Trimmed output heads: drafters that score only the tokens which the target is likely to write.

A small model's head over a large vocabulary takes as long as half of its layers (FR-Spec, arXiv 2502.14856). What a
drafter cannot draft costs acceptance, never the text.
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
"""How many tokens a drafter scores: "auto", a number (0: all), or a JSONL file of the target's answers, whose most
frequent tokens are taken."""

_LARGE = 1 << 16
"""Vocabulary beyond which "auto" trims."""
_LOWEST = 3 << 14
"""Tokens of the lowest ids that "auto" takes: merges come in the order of their frequency. In Qwen2.5-Coder 1.5B's
answers 3 % of the tokens lie beyond, 6 % beyond 32k and 11 % beyond 16k
(docs/notes/drafters.md#trimmed-output-heads)."""
_FREQUENT = 1 << 15
"""Tokens that are taken where answers say which ones are frequent."""
_LIMIT = 16 * MIB
"""Bytes of a file of answers that are read: some four million tokens, and as many seconds."""


def check_draft_vocab(wanted: DraftVocab) -> None:
    """Raise `InvalidOption` for a size that is not possible or a file that does not exist."""
    if not isinstance(wanted, int) and wanted != "auto" and not Path(wanted).is_file():
        raise InvalidOption(
            f"draft_vocab: there is no file {wanted}", "Give auto, a number, or a JSONL file of answers"
        )
    if isinstance(wanted, bool) or (isinstance(wanted, int) and wanted < 0):
        raise InvalidOption(f"draft_vocab must be 0 or more tokens, got {wanted!r}", "Use auto, or 0 for all")


def head_tokens(wanted: DraftVocab, target: Loaded, tokenizer: Tokenizer, size: int) -> Tensor | None:
    """Return the tokens, int64 ascending, to which a drafter's head over `size` tokens is cut; None: all of them.

    A drafter with another vocabulary than the target's keeps its head. Special tokens that end a text are always kept.
    Raises `InvalidOption`, `InvalidData` for a file without answers.
    """
    size = min(size, target.target.vocab_size)
    if vocabulary_of(tokenizer) != vocabulary_of(target.tokenizer):
        return None
    counts, kept = torch.zeros(size, dtype=torch.int64), _LOWEST if size > _LARGE else 0
    if isinstance(wanted, int):
        kept = wanted
    elif wanted != "auto":
        counts, kept = count(_answers(Path(wanted), tokenizer, size), size), _FREQUENT
    always = [token for token in target.eos if token < size]
    return choose(counts, max(kept, len(always)), always) if 0 < kept < size else None


def _answers(path: Path, tokenizer: Tokenizer, size: int) -> Iterator[list[int]]:
    """Yield the token ids of each answer within the first `_LIMIT` bytes of a file, without those beyond `size`.

    Rows are those of `paceline train`'s answers: {"answer": text, "token_ids"?: [...]}. Raises `InvalidData`.
    """
    found = False
    with open_regular(path) as file:
        number = 0
        while (left := _LIMIT - file.tell()) > 0 and (line := file.readline(left)):
            number += 1
            if line.strip() and (line.endswith(b"\n") or file.tell() < _LIMIT):
                found = True
                yield [token for token in _token_ids(path, number, line, tokenizer) if token < size]
    if not found:
        raise InvalidData(f"{path} holds no answers", 'Give a JSONL file of rows with an "answer"')


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
