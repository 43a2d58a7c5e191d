"""Commit of a round: accepted tokens are appended, and their keys and values moved behind the committed ones."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.cache.layout import NONE
from paceline.functional.arguments import require
from paceline.functional.verification import Accepted


def append(tokens: Tensor, lengths: Tensor, accepted: Accepted) -> tuple[Tensor, Tensor]:
    """Return the token cache and the lengths after a round.

    tokens: int64 [B, L], the text of request b in `tokens[b, : lengths[b] + 1]`, the pending token last; the rest is
    overwritten. lengths: int64 [B].
    Returns new tokens [B, L'], padded with -1, and new lengths [B]. L' is L, or more if the longest text needs it,
    which takes a wait for the device.
    """
    _check(lengths, accepted)
    valid = tokens.ndim == 2 and len(tokens) == len(lengths) and tokens.dtype == torch.int64
    require(valid, f"the token cache is {tokens.dtype} {[*tokens.shape]}", "Give int64 [B, L]")
    after = lengths + accepted.counts
    width = int(after.max()) + 1 if len(after) else 0
    text = torch.nn.functional.pad(tokens, (0, max(0, width - tokens.shape[1])), value=NONE)
    column = torch.arange(text.shape[1], device=text.device)
    new = column - lengths[:, None] - 1
    written = accepted.tokens.gather(1, new.clamp(0, accepted.tokens.shape[1] - 1))
    text = torch.where((new >= 0) & (new < accepted.counts[:, None]), written, text)
    return text.where(column <= after[:, None], NONE), after


def gather_kv_(cache: Tensor, lengths: Tensor, accepted: Accepted) -> Tensor:
    """Move the accepted rows' keys or values of one layer next to the committed text, in place, and return the cache.

    cache: [B, heads, L, D], where row r of request b was written to column `lengths[b] + r` (row 0 is in place
    already). lengths: int64 [B], those before `append`. Only the columns of the deepest path are copied; columns
    behind the new length are left, and overwritten by the next round.
    """
    _check(lengths, accepted)
    valid = cache.ndim == 4 and len(cache) == len(lengths)
    require(valid, f"the cache has shape {[*cache.shape]}", "Give keys or values [B, heads, L, D]")
    kept = accepted.path > 0
    place = torch.arange(1, kept.shape[1] + 1, device=kept.device)
    shape = (-1, cache.shape[1], -1, cache.shape[3])
    # A padded step copies row 0 onto itself.
    old, new = (
        (lengths[:, None] + rows.where(kept, 0))[:, None, :, None].expand(shape)
        for rows in (accepted.path, place.expand_as(kept))
    )
    return cache.scatter_(2, new, cache.gather(2, old))


def _check(lengths: Tensor, accepted: Accepted) -> None:
    valid = lengths.dtype == torch.int64 and lengths.shape == accepted.counts.shape
    require(valid, f"lengths are {lengths.dtype} {[*lengths.shape]}", "Give int64 [B], as many as were verified")
