"""From what a user writes to a drafter."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from paceline.drafters.cross import cross
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import Stack
from paceline.drafters.suffix import Suffix
from paceline.errors import InvalidOption
from paceline.models.loader import Loaded
from paceline.protocols import Drafter
from paceline.types import Tree

DraftModelLoader = Callable[[str], Loaded]

_PADDING = re.compile(r"\[PAD\d+\]")
_BARE: dict[str, Callable[[], Drafter]] = {
    "auto": Suffix,
    "suffix": Suffix,
    "suffix:remember": lambda: Suffix(remember=True),
    "ngram": NGram,
}


def make_drafter(spec: str | Drafter | None, target: Loaded, load: DraftModelLoader) -> Drafter | None:
    """`spec` as in `paceline.load`. Raises `InvalidOption` for an unknown one, `TokenizerMismatch`."""
    if spec is None or spec == "none":
        return None
    if isinstance(spec, Drafter):
        return spec
    parts = [_make(part, target, load) for part in _split(spec)]
    return parts[0] if len(parts) == 1 else Stack(parts)


def check_spec(spec: str | Drafter | None) -> None:
    """Raises `InvalidOption` for what means no drafter, before anything is loaded."""
    if not isinstance(spec, (str, Drafter, type(None))):
        raise InvalidOption(
            f"drafter={spec!r:.80} is a {type(spec).__name__}",
            "Give a name, a paceline.Drafter (an object, not its class) or None",
        )
    if isinstance(spec, str) and spec != "none":
        for part in _split(spec):
            _check_name(part)


def _check_name(part: str) -> None:
    if part not in _BARE and (not part.startswith("model:") or part == "model:"):
        known = ", ".join(["none", *_BARE, "model:REF"])
        raise InvalidOption(f"no drafter is called {part!r}", f"There are {known}, and several joined by '+'")


def _split(spec: str) -> list[str]:
    """At "+", but not inside the reference of a draft model, which may hold one: it comes last."""
    head, colon, reference = spec.partition("model:")
    parts = [part.strip() for part in head.split("+")]
    parts[-1] += colon + reference
    return parts


def _make(part: str, target: Loaded, load: DraftModelLoader) -> Drafter:
    _check_name(part)
    if part in _BARE:
        return _BARE[part]()
    loaded = load(part.removeprefix("model:"))
    if _words(target) != _words(loaded):
        return cross(target, loaded, part)
    return DraftModel(loaded.target, target.target.vocab_size)


def _words(model: Loaded) -> dict[str, int]:
    """Tokenizers are compared by their tokens, not by how many there are, and padded ones are the same: the names that
    GGUF converters give to padding rows are left out."""
    return {t: i for t, i in model.tokenizer.vocabulary.items() if not _PADDING.fullmatch(t)}


def to_tree(draft: int | Tree | Literal["auto"]) -> Tree | None:
    """A draft length, a tree, or None for "auto". Raises `InvalidOption`."""
    if isinstance(draft, Tree):
        return draft
    if draft == "auto":
        return None
    if isinstance(draft, bool) or not isinstance(draft, int):
        raise InvalidOption(f"draft={draft!r} is not possible", 'Give a length, a paceline.Tree or "auto"')
    return Tree.chain(draft)
