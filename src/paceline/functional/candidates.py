"""Candidate trees as padded tensors: what they hold, and what a forward pass needs to know of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import InvalidOption

NONE = -1


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """How much to draft for each request.

    branch: children per expanded node, and nodes expanded per level (>= 1). depth: levels (>= 1).
    max_nodes: the most nodes of a tree (>= 1). confidence: grow on only where the draft gives a node's whole path at
    least this probability (0 to 1), one number for all or a tensor [B]. Raises `InvalidOption`.
    """

    branch: int
    depth: int
    max_nodes: int
    confidence: float | Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("branch", "depth", "max_nodes"):
            value = getattr(self, name)
            require(type(value) is int and value >= 1, f"{name}={value!r} is not possible", "Give a whole number >= 1")
        if self.confidence is not None:
            require(
                is_number(self.confidence) and within(self.confidence, 0.0, 1.0),
                f"confidence={self.confidence!r} is out of range",
                "Give a probability from 0 to 1, or a tensor [B] of them",
            )

    def floor(self, logits: Tensor) -> Tensor:
        """The least cumulative log-probability that grows on: [B, 1], in the dtype and place of `logits` [B, V]."""
        batch = logits.shape[0]
        if not isinstance(self.confidence, Tensor):
            return logits.new_full((batch, 1), self.confidence or 0.0).log()
        require(
            self.confidence.shape == (batch,),
            f"confidence has shape {[*self.confidence.shape]} for a batch of {batch}",
            "Give one number, or a tensor [B]",
        )
        return self.confidence.to(logits).log()[:, None]


class TopK(NamedTuple):
    """The k best of each row, best first. `nan`: bool [...], whether the row held NaN."""

    values: Tensor
    indices: Tensor
    nan: Tensor


@dataclass(frozen=True, slots=True)
class CandidateTree:
    """One tree of candidates per request. Parents come before their children and siblings differ.

    tokens: int64 [B, N]. parents: int64 [B, N], the row that a node continues (0: the pending token).
    depths: int64 [B, N], 1 for a child of the pending token, 0 for padding.
    log_probs: float [B, N], the draft's log-probability of each node given its path. scores: their sums along the
    path. Both are -inf for padding. counts: int64 [B], the nodes of each request.
    broken: bool [B], whether the draft's logits held NaN or +inf where this tree grew.
    max_depth, max_branch: bounds on any node's depth and number of children.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_probs: Tensor
    scores: Tensor
    counts: Tensor
    broken: Tensor
    max_depth: int
    max_branch: int

    @staticmethod
    def of(tokens: Tensor, parents: Tensor, log_probs: Tensor | None = None) -> CandidateTree:
        """Trees of your own making from `tokens` and `parents`, int64 [B, N]. They are checked, which waits.

        Siblings count as drawn in their order. `log_probs` [B, N] are 0 (certain) unless given. Raises
        `InvalidOption` where this is no tree.
        """
        _check_nodes(tokens, parents)
        steps = torch.zeros(tokens.shape, device=tokens.device) if log_probs is None else widen(log_probs)
        require(steps.shape == tokens.shape, "log_probs differ in shape from the tokens", "Give one per token")
        steps = steps.masked_fill(tokens < 0, -torch.inf)
        above = _ancestors(parents)
        path_scores = torch.cat([steps.new_zeros(len(steps), 1), steps], 1).gather(1, above.flatten(1))
        children = torch.zeros_like(above[:, :, 0]).scatter_add_(1, parents.clamp(min=0), (tokens >= 0).long())
        return CandidateTree(
            tokens=tokens,
            parents=parents,
            depths=(above[:, 1:] > 0).sum(2),
            log_probs=steps,
            scores=path_scores.unflatten(1, above.shape[1:])[:, 1:].sum(2).where(tokens >= 0, -torch.inf),
            counts=(tokens >= 0).sum(1),
            broken=torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device),
            max_depth=above.shape[2] - 1,
            max_branch=int(children.max()) if children.numel() else 0,
        )


def topk(logits: Tensor, k: int) -> TopK:
    """The `k` highest of each row of `logits` [..., V], as `torch.topk`, but NaN ranks last, after -inf.

    `values` keep the dtype of `logits`. Raises `InvalidOption` unless 1 <= k <= V.
    """
    require(logits.is_floating_point(), f"logits are {logits.dtype}", "Give floats")
    width = logits.shape[-1] if logits.ndim else 0
    require(type(k) is int and 1 <= k <= width, f"the {k!r} best of {width} tokens do not exist", "Give 1 <= k <= V")
    nan = logits.isnan()
    indices = _order(logits, nan).topk(k, -1).indices
    return TopK(logits.gather(-1, indices), indices, nan.any(-1))


def positions(tree: CandidateTree, lengths: Tensor) -> Tensor:
    """Where every row stands in the text, int64 [B, T]. A padding row stands where the pending token does."""
    _check_lengths(tree, lengths)
    return torch.cat([lengths[:, None], lengths[:, None] + tree.depths], 1)


def inputs(tree: CandidateTree, pending: Tensor) -> Tensor:
    """What to feed the target, int64 [B, T]: `pending` [B], then the nodes. A padding row repeats the pending token."""
    _check_lengths(tree, pending)
    return torch.cat([pending[:, None], torch.where(tree.tokens < 0, pending[:, None], tree.tokens)], 1)


def paths(tree: CandidateTree) -> Tensor:
    """int64 [B, T, D]: the rows from the first node down to each row itself, then -1. All -1 for row 0 and padding."""
    parents, depths = (torch.nn.functional.pad(x, (1, 0)) for x in (tree.parents, tree.depths))
    at = torch.arange(depths.shape[1], device=depths.device).repeat(len(depths), 1)
    rows = []
    for depth in range(tree.max_depth, 0, -1):
        here = depths.gather(1, at) == depth
        rows.append(at.where(here, NONE))
        at = torch.where(here, parents.gather(1, at), at)
    return torch.stack(rows[::-1], 2) if rows else at.new_empty(*at.shape, 0)


def mask(tree: CandidateTree) -> Tensor:
    """bool [B, T, T]: each row sees row 0, its ancestors and itself; a padding row only itself."""
    rows = paths(tree)
    own = torch.arange(rows.shape[1], device=rows.device).expand(rows.shape[:2])[..., None]
    root = torch.nn.functional.pad(tree.depths > 0, (1, 0), value=True)[..., None]
    first = torch.where(root, 0, own)
    seen = torch.cat([own, first, torch.where(rows < 0, own, rows)], 2)
    return torch.zeros(*own.shape[:2], own.shape[1], dtype=torch.bool, device=rows.device).scatter_(2, seen, True)


def attention_bias(tree: CandidateTree, lengths: Tensor, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What to add to attention scores, [B, 1, T, columns]: 0 where a row may look, -inf elsewhere.

    For a cache whose first `lengths[b]` columns hold the committed text and where row r is written to column
    `lengths[b] + r`, so `columns` must be at least the longest length and T.
    """
    _check_lengths(tree, lengths)
    tree_mask = mask(tree)
    rows = tree_mask.shape[1]
    require(columns >= rows, f"{columns} columns have no room for {rows} rows", "Give the width of the cache")
    row = torch.arange(columns, device=lengths.device) - lengths[:, None]
    inside = ((row >= 0) & (row < rows))[:, None]
    seen = tree_mask.gather(2, row.clamp(0, rows - 1)[:, None].expand(-1, rows, -1)) & inside | (row < 0)[:, None]
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None]


def require(fine: bool, cause: str, fix: str) -> None:
    """Raises `InvalidOption` unless `fine`."""
    if not fine:
        raise InvalidOption(cause, fix)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)


def within(value: float | Tensor, low: float, high: float) -> bool:
    """Whether a number, or every element of a tensor, lies from `low` to `high`. NaN does not."""
    return bool(((value >= low) & (value <= high)).all() if isinstance(value, Tensor) else low <= value <= high)


def widen(logits: Tensor) -> Tensor:
    """At least float32: half precisions tie too often and round sums away."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _order(logits: Tensor, nan: Tensor) -> Tensor:
    """Integers in the order of the floats, NaN lowest.

    A float's bits, read as a signed integer, order the positive floats upwards and the negative ones downwards. So
    -inf stays apart from NaN and from the lowest finite number, which masks are often made of.
    """
    wide = widen(logits) + 0.0  # -0.0 becomes 0.0
    kind = torch.int64 if wide.dtype == torch.float64 else torch.int32
    bits = wide.view(kind)
    least, most = torch.iinfo(kind).min, torch.iinfo(kind).max
    return torch.where(bits < 0, bits ^ most, bits).masked_fill_(nan, least)


def _ancestors(parents: Tensor) -> Tensor:
    """int64 [B, T, D + 1]: each row and the rows above it, then 0. As deep as the deepest node."""
    up = torch.nn.functional.pad(parents.clamp(min=0), (1, 0))
    above = [torch.arange(up.shape[1], device=up.device).repeat(len(up), 1)]
    above[0][:, 1:].masked_fill_(parents < 0, 0)
    while bool((above[-1] > 0).any()):
        above.append(up.gather(1, above[-1]))
    return torch.stack(above, 2)


def _check_nodes(tokens: Tensor, parents: Tensor) -> None:
    shaped = tokens.ndim == 2 and tokens.shape == parents.shape
    require(shaped, f"tokens {[*tokens.shape]} and parents {[*parents.shape]} are no nodes", "Give two tensors [B, N]")
    whole = tokens.dtype == parents.dtype == torch.int64
    require(whole, f"tokens are {tokens.dtype} and parents {parents.dtype}", "Give int64")
    real = tokens >= 0
    padded = bool((real == (parents >= 0)).all()) and not bool((~real[:, :-1] & real[:, 1:]).any())
    require(padded, "a node lies behind padding or is half of one", "Pad tokens and parents alike with -1, at the end")
    node = torch.arange(tokens.shape[1], device=tokens.device)
    before = bool((parents <= node).all())
    require(before, "a node comes before its parent", "Parents are rows: 0 is the pending token, node i is row i + 1")
    twin = (tokens[:, :, None] == tokens[:, None]) & (parents[:, :, None] == parents[:, None]) & real[:, None]
    require(not bool(twin.triu(1).any()), "a token is drafted twice below one row", "Siblings must differ")


def _check_lengths(tree: CandidateTree, values: Tensor) -> None:
    fine = values.dtype == torch.int64 and values.shape == tree.counts.shape
    require(fine, f"got {values.dtype} {[*values.shape]} for {len(tree.counts)} trees", "Give int64 [B]")
