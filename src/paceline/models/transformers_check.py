"""Check that a model verifies drafts as it would write them, on a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.protocols import TargetWithHead
from paceline.types import Draft, Want
from paceline.verify.tree import pack, with_siblings

_FINE, _COARSE = 1e-2, 0.1
"""Relative error of a row's logits that rounding explains: in a model of 32 bits (with TF32 products), and of 16."""

_LENGTHS, _DEPTH = (8, 13), 4
"""Tokens of the two texts, and of the path that a draft adds to each. A pass over few rows takes as long as reading the
weights, so there are few passes, not few rows."""

Plain = Callable[[Tensor], Tensor]
"""Whole texts [B, T] -> their logits [B, T, V], from the model itself."""


def verification_error(target: TargetWithHead, trees: bool, plain: Plain) -> str | None:
    """Return the reason why the target's passes differ from the model's own, or None if they do not.

    Two slots of unequal length are fed together, verify a draft (`trees`: a tree whose accepted path has a wrong
    sibling at every level; else a chain), commit it and go on: three passes, compared with a plain one. Every row must
    have the logits of its path fed plainly, up to an error much smaller than what ignoring the mask would cause.
    """
    try:
        return _verification_error(target, trees, plain)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        # Anything that breaks inside a model whose code expects something else.
        return (str(error).splitlines() or [type(error).__name__])[0]


def _verification_error(target: TargetWithHead, trees: bool, plain: Plain) -> str | None:
    ids = [(i * 7919 + 11) % min(target.vocab_size, 30000) for i in range(sum(_LENGTHS))]
    texts = [ids[: _LENGTHS[0]], ids[_LENGTHS[0] :]]
    path = ids[3 : 3 + _DEPTH]
    # A draft, and the rows of its accepted path.
    draft, path_rows = with_siblings(path, ids[-1]) if trees else (Draft.chain(path), list(range(1, _DEPTH + 1)))
    cache = target.new_cache()
    slots = [cache.acquire() for _ in texts]

    def fed(last: Sequence[int], drafts: Sequence[Draft], paths: Sequence[Sequence[int]], want: Want) -> Tensor:
        rows = pack(last, drafts, slots, [cache.lengths[slot] for slot in slots], target.device)
        logits = target.forward(rows, cache, want).logits
        cache.commit(rows, paths)
        return logits

    prompts = [text[:-1] for text in texts]
    chains = [Draft.chain(prompt[1:]) for prompt in prompts]
    fed([prompt[0] for prompt in prompts], chains, [range(1, len(prompt)) for prompt in prompts], Want("none"))
    logits = fed([text[-1] for text in texts], [draft] * 2, [path_rows[:-1]] * 2, Want())
    after = fed(path[-1:] * 2, [Draft()] * 2, [()] * 2, Want())
    # Rows that see siblings, or in a chain the other text, have these logits.
    wrong = [(text, draft.tokens) for text in texts] if trees else [(_swapped(texts, i), path) for i in range(2)]
    plain_logits = _plain_logits(plain, [*((text, path) for text in texts), *wrong], target.device)
    numbers = [0, *path_rows]
    allowed = _COARSE if target.dtype.itemsize < 4 else _FINE
    for i in range(2):
        right, misled = plain_logits[i], plain_logits[2 + i][numbers]
        if reason := _differ(logits[i, numbers], right, allowed, misled):
            return reason
        if reason := _differ(after[i, :1], right[-1:], allowed, misled[-1:]):
            return f"after a commit, {reason}"
    return None


def _swapped(texts: Sequence[Sequence[int]], i: int) -> list[int]:
    """Return text `i` with the other of two texts before its last token."""
    return [*texts[1 - i][:-1], texts[i][-1]]


def _plain_logits(
    plain: Plain, continued: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device
) -> list[Tensor]:
    """Return for each (text, tokens after it) the logits of the text's last token and those after it."""
    wholes = [[*text, *more] for text, more in continued]
    longest = max(map(len, wholes))
    # Later tokens change no row of a causal model.
    padded = [whole + whole[-1:] * (longest - len(whole)) for whole in wholes]
    logits = plain(torch.tensor(padded, device=device))
    return [one[len(text) - 1 : len(whole)] for one, (text, _), whole in zip(logits, continued, wholes, strict=True)]


def _differ(ours: Tensor, right: Tensor, allowed: float, misled: Tensor) -> str | None:
    """Return the reason why logits [R, V] are wrong, or None. `misled`: logits of rows that see the wrong tokens."""
    error = _error(ours, right)
    if not error < allowed:
        return f"its logits differ from its plain forward's by {error:.1g}"
    if error > 0 and not error < _error(misled, right) / 2:
        return "its attention does not follow the mask of a pass"
    return None


def _error(rows: Tensor, right: Tensor) -> float:
    """Median relative error over rows: a mixture of experts may route one row differently by rounding alone."""
    rows, right = rows.double(), right.double()
    return float(((rows - right).norm(dim=-1) / right.norm(dim=-1)).median())
