"""Whether a model verifies drafts as it would write them: tried on a few tokens before anything is promised."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.types import Draft, Want
from paceline.verify.tree import beside, pack, pack_prefix

if TYPE_CHECKING:
    from paceline.models.transformers import CausalLM

_FINE, _COARSE = 1e-2, 0.1
"""Relative error of a row's logits that rounding explains in a model of 32 bits (TF32 products included), and of 16."""

_PREFIX, _DEPTH = 23, 4

Plain = Callable[[list[int]], Tensor]
"""A whole text -> its logits [T, V], by the model alone."""


def verifies(target: CausalLM, plain: Plain) -> str | None:
    """None, or why the target's passes are not the model's own.

    Two slots of unequal length are fed in chunks, verify a draft together (a tree whose accepted path has a wrong
    sibling at every level, or a chain), commit it and go on. Every row must have the logits of its path fed plainly, by
    much less than what a mask that is ignored would change.
    """
    try:
        return _verifies(target, plain)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        # Whatever breaks inside a model whose code expects something else.
        return (str(error).splitlines() or [type(error).__name__])[0]


def _verifies(target: CausalLM, plain: Plain) -> str | None:
    words = [(i * 7919 + 11) % min(target.vocab_size, 30000) for i in range(2 * _PREFIX)]
    texts = [words[: _PREFIX - 6], words[_PREFIX:]]
    draft, rows = _draft(target.trees, words)
    cache = target.new_cache()
    slots = []
    for text in texts:
        slots.append(cache.acquire())
        for chunk in (text[:9], text[9:-1]):
            done = cache.lengths[slots[-1]]
            target.forward(pack_prefix(chunk, slots[-1], done, target.device), cache, Want("none"))
            cache.commit(slots[-1], range(1, len(chunk)))
    last, lengths = [text[-1] for text in texts], [len(text) - 1 for text in texts]
    logits = target.forward(pack(last, [draft] * 2, slots, lengths, target.device), cache, Want()).logits
    path = [draft.tokens[row - 1] for row in rows]
    allowed = _COARSE if target.dtype.itemsize < 4 else _FINE
    for text, slot in zip(texts, slots, strict=True):
        cache.commit(slot, rows[:-1])
        text += path
    last, lengths = path[-1:] * 2, [len(text) - 1 for text in texts]
    after = target.forward(pack(last, [Draft()] * 2, slots, lengths, target.device), cache, Want()).logits
    for i, text in enumerate(texts):
        right = plain(text)[-len(rows) - 1 :]
        misled = plain([*text[: -len(rows)], *draft.tokens])[[-len(draft.tokens) - 1 + row for row in (0, *rows)]]
        if reason := _differ(logits[i, [0, *rows]], right, allowed, misled if target.trees else None):
            return reason
        if reason := _differ(after[i, :1], right[-1:], allowed, None):
            return f"after a commit, {reason}"
    return None


def _draft(trees: bool, words: list[int]) -> tuple[Draft, list[int]]:
    """A draft and the rows of the path in it."""
    path = words[3 : 3 + _DEPTH]
    if not trees:
        return Draft.chain(path), list(range(1, _DEPTH + 1))
    return beside(path, words[-1])


def _differ(ours: Tensor, right: Tensor, allowed: float, misled: Tensor | None) -> str | None:
    """Why rows of logits [R, V] are not the right ones. `misled`: what they would be if siblings saw each other."""
    error = _error(ours, right)
    if not error < allowed:
        return f"its logits differ from its plain forward's by {error:.1g}"
    if misled is not None and error > 0 and not error < _error(misled, right) / 2:
        return "its attention does not follow the mask of a tree"
    return None


def _error(rows: Tensor, right: Tensor) -> float:
    """Median over rows: a mixture of experts may route one row differently by rounding alone."""
    rows, right = rows.double(), right.double()
    return float(((rows - right).norm(dim=-1) / right.norm(dim=-1)).median())
