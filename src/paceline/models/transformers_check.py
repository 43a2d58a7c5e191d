"""Check that a model verifies drafts as it would write them, on a few tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paceline.protocols import TargetWithHead
from paceline.types import Draft, Want
from paceline.verify.tree import beside, pack, pack_prefix

_FINE, _COARSE = 1e-2, 0.1
"""Relative error of a row's logits that rounding explains: in a model of 32 bits (with TF32 products), and of 16."""

_PREFIX, _DEPTH = 23, 4

Plain = Callable[[list[int]], Tensor]
"""From a whole text to its logits [T, V], by the model alone."""


def verification_error(target: TargetWithHead, trees: bool, plain: Plain) -> str | None:
    """Why the target's passes are not the model's own; None if they are.

    Two slots of unequal length are fed in chunks, verify a draft together (`trees`: a tree whose accepted path has a
    wrong sibling at every level; else a chain), commit it and go on. Every row must have the logits of its path fed
    plainly, up to an error much smaller than what ignoring the mask would cause.
    """
    try:
        return _verification_error(target, trees, plain)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        # Anything that breaks inside a model whose code expects something else.
        return (str(error).splitlines() or [type(error).__name__])[0]


def _verification_error(target: TargetWithHead, trees: bool, plain: Plain) -> str | None:
    ids = [(i * 7919 + 11) % min(target.vocab_size, 30000) for i in range(2 * _PREFIX)]
    texts = [ids[: _PREFIX - 6], ids[_PREFIX:]]
    path = ids[3 : 3 + _DEPTH]
    # A draft, and the rows of its accepted path.
    draft, path_rows = beside(path, ids[-1]) if trees else (Draft.chain(path), list(range(1, _DEPTH + 1)))
    cache = target.new_cache()
    slots = []
    for text in texts:
        slots.append(cache.acquire())
        for chunk in (text[:9], text[9:-1]):
            rows = pack_prefix(chunk, slots[-1], cache.lengths[slots[-1]], target.device)
            target.forward(rows, cache, Want("none"))
            cache.commit(rows, [range(1, len(chunk))])
    last, lengths = [text[-1] for text in texts], [len(text) - 1 for text in texts]
    rows = pack(last, [draft] * 2, slots, lengths, target.device)
    logits = target.forward(rows, cache, Want()).logits
    cache.commit(rows, [path_rows[:-1]] * 2)
    texts = [text + path for text in texts]
    rows = pack(path[-1:] * 2, [Draft()] * 2, slots, [len(text) - 1 for text in texts], target.device)
    after = target.forward(rows, cache, Want()).logits
    allowed = _COARSE if target.dtype.itemsize < 4 else _FINE
    for i, text in enumerate(texts):
        right = plain(text)[-len(path) - 1 :]
        misled = plain([*text[: -len(path)], *draft.tokens])[[-len(draft.tokens) - 1 + row for row in (0, *path_rows)]]
        if reason := _differ(logits[i, [0, *path_rows]], right, allowed, misled if trees else None):
            return reason
        if reason := _differ(after[i, :1], right[-1:], allowed, None):
            return f"after a commit, {reason}"
    return None


def _differ(ours: Tensor, right: Tensor, allowed: float, misled: Tensor | None) -> str | None:
    """Why logits [R, V] are not the right ones. `misled`: those of a model where siblings see each other."""
    error = _error(ours, right)
    if not error < allowed:
        return f"its logits differ from its plain forward's by {error:.1g}"
    if misled is not None and error > 0 and not error < _error(misled, right) / 2:
        return "its attention does not follow the mask of a tree"
    return None


def _error(rows: Tensor, right: Tensor) -> float:
    """Median relative error over rows: a mixture of experts may route one row differently by rounding alone."""
    rows, right = rows.double(), right.double()
    return float(((rows - right).norm(dim=-1) / right.norm(dim=-1)).median())
