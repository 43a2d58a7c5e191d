"""A check, with a few tokens, that a model gives the same results when it verifies drafts as in its plain forward
pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.protocols import TargetWithHead
from paceline.types import Draft, Want
from paceline.verify.tree import pack, with_siblings

_FINE, _COARSE = 1e-2, 0.1
"""Maximum relative error of logits that rounding can explain, for 32-bit models (which may multiply in TF32) and for
16-bit models."""

_LENGTHS, _DEPTH = (8, 13), 4
"""Lengths of the two texts, in tokens, and depth of the draft that is added to each. A small pass takes as long as
reading the weights, so the check uses few passes rather than few rows."""

Plain = Callable[[Tensor], Tensor]
"""Maps whole texts [B, T] to their logits [B, T, V], by the model's plain forward pass."""


def verification_error(target: TargetWithHead, trees: bool, plain: Plain) -> str | None:
    """Return the reason why the target's passes differ from the model's plain forward pass, or None if they do not
    differ.

    Two slots of unequal length run in three passes. The first pass reads both texts, the second verifies a draft, which
    is then committed, and the third reads one more token. With `trees`, the draft is a tree whose accepted path has a
    wrong sibling at every level. Otherwise, it is a chain. The logits of every row must equal the plain logits of its
    path. The error must be much smaller than the error of a model that ignores the mask.

    Args:
        target: The model as a target.
        trees: True to verify a tree, False to verify a chain.
        plain: The model's plain forward pass.
    """
    try:
        return _verification_error(target, trees, plain)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        # The model's own code may raise any of these errors if it expects other inputs.
        return (str(error).splitlines() or [type(error).__name__])[0]


def _verification_error(target: TargetWithHead, trees: bool, plain: Plain) -> str | None:
    ids = [(i * 7919 + 11) % min(target.vocab_size, 30000) for i in range(sum(_LENGTHS))]
    texts = [ids[: _LENGTHS[0]], ids[_LENGTHS[0] :]]
    path = ids[3 : 3 + _DEPTH]
    # The draft, and the rows of its accepted path.
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
    # These are the logits of rows that attend to siblings of their path or, in a chain, to the other text.
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
    """Return text `i` with all tokens except the last replaced by tokens of the other text."""
    return [*texts[1 - i][:-1], texts[i][-1]]


def _plain_logits(
    plain: Plain, continued: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device
) -> list[Tensor]:
    """Return, for each pair (text, continuation), the logits of the text's last token and of the continuation's
    tokens."""
    wholes = [[*text, *more] for text, more in continued]
    longest = max(map(len, wholes))
    # In a causal model, padding at the end does not change earlier rows.
    padded = [whole + whole[-1:] * (longest - len(whole)) for whole in wholes]
    logits = plain(torch.tensor(padded, device=device))
    return [one[len(text) - 1 : len(whole)] for one, (text, _), whole in zip(logits, continued, wholes, strict=True)]


def _differ(ours: Tensor, right: Tensor, allowed: float, misled: Tensor) -> str | None:
    """Return the reason why logits [R, V] are wrong, or None if they are right. `misled`: Logits with a wrong
    context."""
    error = _error(ours, right)
    if not error < allowed:
        return f"its logits differ from its plain forward pass by {error:.1g}"
    if error > 0 and not error < _error(misled, right) / 2:
        return "its attention does not follow the mask of a pass"
    return None


def _error(rows: Tensor, right: Tensor) -> float:
    """Return the median relative error of the rows. The median tolerates a mixture of experts that routes a row
    differently because of rounding."""
    rows, right = rows.double(), right.double()
    return float(((rows - right).norm(dim=-1) / right.norm(dim=-1)).median())
