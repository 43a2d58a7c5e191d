"""Candidate trees as padded tensors, and the inputs of the forward pass that verifies them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from paceline.cache.layout import NONE, ancestors
from paceline.errors import InvalidOption
from paceline.types import Draft, DraftBudget
from paceline.verify.tree import check, depths, paths_of


@dataclass(frozen=True, slots=True)
class TreeConfig:
    """Size of each request's tree.

    branch: children per expanded node, and nodes that `grow` expands per level (>= 1). depth: levels (>= 1).
    max_nodes: the most nodes of a tree (1 to 512). confidence: expand only nodes whose path has at least this
    probability in the draft (0 to 1), one number or a tensor [B]. Raises `InvalidOption`.
    """

    branch: int
    depth: int
    max_nodes: int
    confidence: float | Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("branch", "depth", "max_nodes"):
            value = getattr(self, name)
            require(type(value) is int and value >= 1, f"{name} must be >= 1, got {value!r}", "Give a whole number")
        require(self.max_nodes <= 512, f"max_nodes must be <= 512, got {self.max_nodes}", "Draft smaller trees")
        self.floors(len(self.confidence) if isinstance(self.confidence, Tensor) and self.confidence.ndim else 1)

    @property
    def budget(self) -> DraftBudget:
        return DraftBudget(self.max_nodes, self.depth, self.branch)

    def floors(self, batch: int) -> list[float]:
        """Return each request's least log-probability of a path that grows on: finite, to leave out the impossible."""
        confidence = 0.0 if self.confidence is None else self.confidence
        values = per_request("confidence", confidence, batch, lambda c: 0.0 <= c <= 1.0, "0 to 1")
        return [math.log(c) if c else -sys.float_info.max for c in values]


class TopK(NamedTuple):
    """The k best of each row, best first. `nan`: bool [...], whether the row held NaN."""

    values: Tensor
    indices: Tensor
    nan: Tensor


@dataclass(frozen=True, slots=True)
class CandidateTree:
    """One tree of candidates per request. Parents come before their children and siblings differ.

    drafts: each request's tree on the host, for verification.
    tokens: int64 [B, N]. parents: int64 [B, N], the row that a node continues (0: the pending token).
    depths: int64 [B, N], 1 for a child of the pending token, 0 for padding.
    log_probs: float [B, N], the draft's log-probability of each node given its path. scores: their sums along the
    path. Both are -inf for padding. counts: int64 [B], the nodes of each request.
    broken: bool [B], whether the draft's logits held NaN or +inf where this tree grew.
    max_depth, max_branch: bounds on any node's depth and number of children.
    """

    drafts: tuple[Draft, ...]
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
        """Return trees with the given `tokens` and `parents`, int64 [B, N].

        Siblings count as drawn in their order. `log_probs` [B, N] are 0 (certain) unless given. Raises
        `InvalidOption` where this is no tree.
        """
        expect("tokens", tokens, "int64", "B", "N")
        expect("parents", parents, "int64", *tokens.shape)
        steps = torch.zeros(tokens.shape, device=tokens.device) if log_probs is None else widen(log_probs)
        expect("log_probs", steps, "float", *tokens.shape)
        counts = (tokens >= 0).sum(1)
        leading = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
        fits = bool(((tokens >= 0) == leading).all() & ((parents >= 0) == leading).all())
        require(fits, "padding stands before a node or in half of one", "Pad tokens and parents alike, at the end")
        lines = zip(tokens.tolist(), parents.tolist(), counts.tolist(), strict=True)
        drafts = [Draft(tuple(ids[:n]), tuple(above[:n])) for ids, above, n in lines]
        for draft in drafts:
            check(draft)
        given = [line[: len(draft.tokens)] for line, draft in zip(steps.tolist(), drafts, strict=True)]
        depth = max((max(depths(draft.parents)) for draft in drafts), default=0)
        branch = max((draft.parents.count(parent) for draft in drafts for parent in draft.parents), default=0)
        return pack_trees(drafts, given, tokens.shape[1], steps, [False] * len(drafts), depth, branch)


def pack_trees(
    drafts: Sequence[Draft],
    log_probs: Sequence[Sequence[float]],
    width: int,
    like: Tensor,
    broken: Sequence[bool],
    max_depth: int,
    max_branch: int,
) -> CandidateTree:
    """Return the trees of a batch, padded to `width` nodes, on the device of `like` and with scores in its dtype."""
    scores = []
    for draft, steps in zip(drafts, log_probs, strict=True):
        sums = [0.0]
        for parent, step in zip(draft.parents, steps, strict=True):
            sums.append(sums[parent] + step)
        scores.append(sums[1:])
    return CandidateTree(
        drafts=tuple(drafts),
        tokens=padded([draft.tokens for draft in drafts], width, like.device),
        parents=padded([draft.parents for draft in drafts], width, like.device),
        depths=padded([depths(draft.parents)[1:] for draft in drafts], width, like.device, 0),
        log_probs=padded(log_probs, width, like.device, -math.inf, like.dtype),
        scores=padded(scores, width, like.device, -math.inf, like.dtype),
        counts=torch.tensor([len(draft.tokens) for draft in drafts], dtype=torch.int64, device=like.device),
        broken=torch.tensor(broken, dtype=torch.bool, device=like.device),
        max_depth=max_depth,
        max_branch=max_branch,
    )


def padded(
    rows: Sequence[Sequence[float]],
    width: int,
    device: torch.device,
    padding: float = NONE,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Return ragged rows as a tensor [B, width]."""
    full = [[*row, *[padding] * (width - len(row))] for row in rows]
    return torch.tensor(full, dtype=dtype, device=device).view(len(rows), width)


def topk(logits: Tensor, k: int) -> TopK:
    """Return the `k` highest of each row of `logits` [..., V], as `torch.topk`, but with NaN last, after -inf.

    `values` keep the dtype of `logits`. Raises `InvalidOption` unless 1 <= k <= V.
    """
    expect("logits", logits, "float", *logits.shape)
    width = logits.shape[-1] if logits.ndim else 0
    require(type(k) is int and 1 <= k <= width, f"k must be 1 to {width} (the vocabulary), got {k!r}", "Lower k")
    nan = logits.isnan()
    # A float's bits, read as a signed integer, order the positive floats upwards and the negative ones downwards. So
    # -inf stays apart from NaN and from the lowest finite number, which masks are often made of.
    wide = widen(logits) + 0.0  # -0.0 becomes 0.0
    bits = wide.view(torch.int64 if wide.dtype == torch.float64 else torch.int32)
    limits = torch.iinfo(bits.dtype)
    order = torch.where(bits < 0, bits ^ limits.max, bits).masked_fill_(nan, limits.min)
    indices = order.topk(k, -1).indices
    return TopK(logits.gather(-1, indices), indices, nan.any(-1))


def positions(tree: CandidateTree, lengths: Tensor) -> Tensor:
    """Return the position of every row in the text, int64 [B, T]. Padding rows share the pending token's."""
    expect("lengths", lengths, "int64", len(tree.counts))
    return torch.cat([lengths[:, None], lengths[:, None] + tree.depths], 1)


def inputs(tree: CandidateTree, pending: Tensor) -> Tensor:
    """Return the target's input ids, int64 [B, T]: `pending` [B], then the nodes. Padding rows repeat `pending`."""
    expect("pending", pending, "int64", len(tree.counts))
    return torch.cat([pending[:, None], torch.where(tree.tokens < 0, pending[:, None], tree.tokens)], 1)


def paths(tree: CandidateTree) -> Tensor:
    """Return the rows from the first node down to each row itself, then -1: int64 [B, T, D].

    All -1 for row 0 and padding.
    """
    rows = tree.tokens.shape[1] + 1
    batch = []
    for draft in tree.drafts:
        found = paths_of(draft)
        batch += [*found.values(), *[[]] * (rows - len(found))]
    return padded(batch, tree.max_depth, tree.tokens.device).view(len(tree.drafts), rows, tree.max_depth)


def mask(tree: CandidateTree) -> Tensor:
    """Return the tree's attention mask, bool [B, T, T]: each row sees row 0, its ancestors and itself; a padding row
    only itself."""
    width = tree.tokens.shape[1]
    rows = [(NONE, *d.parents, *[NONE] * (width - len(d.parents))) for d in tree.drafts]
    return torch.stack([ancestors(parents) for parents in rows]).to(tree.tokens.device)


def attention_bias(tree: CandidateTree, lengths: Tensor, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the bias to add to attention scores, [B, 1, T, columns]: 0 where a row may look, -inf elsewhere.

    For a cache whose first `lengths[b]` columns hold the committed text and where row r is written to column
    `lengths[b] + r`, so `columns` must be at least the longest length and T.
    """
    expect("lengths", lengths, "int64", len(tree.counts))
    tree_mask = mask(tree)
    rows = tree_mask.shape[1]
    require(columns >= rows, f"{columns} columns have no room for {rows} rows", "Give the width of the cache")
    row = torch.arange(columns, device=lengths.device) - lengths[:, None]
    inside = ((row >= 0) & (row < rows))[:, None]
    seen = tree_mask.gather(2, row.clamp(0, rows - 1)[:, None].expand(-1, rows, -1)) & inside | (row < 0)[:, None]
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None]


def require(valid: bool, cause: str, fix: str) -> None:
    """Raise `InvalidOption` unless `valid`."""
    if not valid:
        raise InvalidOption(cause, fix)


def expect(name: str, x: Tensor, kind: Literal["float", "int64"] | None, *shape: int | str) -> None:
    """Raise `InvalidOption` unless `x` has numbers of this kind and this shape. A letter stands for any size."""
    sizes = [size if isinstance(size, int) else got for size, got in zip(shape, x.shape, strict=False)]
    typed = {"float": x.is_floating_point(), "int64": x.dtype == torch.int64, None: True}[kind]
    wanted = f"{kind or ''} [{', '.join(map(str, shape))}]".strip()
    require(typed and len(shape) == x.ndim and sizes == [*x.shape], f"{name}: {x.dtype} {[*x.shape]}", f"Give {wanted}")


def per_request(name: str, value: float | Tensor, batch: int, valid: Callable[[float], bool], fix: str) -> list[float]:
    """Return an option that is one number or a tensor [B] as `batch` numbers. Raises `InvalidOption`."""
    values: list[float] = []
    if isinstance(value, Tensor):
        values = value.tolist() if value.shape == (batch,) else []
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        values = [value] * batch
    require(
        len(values) == batch and all(map(valid, values)),
        f"{name} must be {fix}, got {value!r} for a batch of {batch}",
        f"Give one number, or a tensor [{batch}]",
    )
    return values


def temperatures(temperature: float | Tensor, batch: int) -> list[float]:
    """Return the temperature of each request; 0 is greedy. Raises `InvalidOption`."""
    return per_request("temperature", temperature, batch, lambda t: t == 0 or 1e-3 <= t <= 1e3, "0 or 0.001 to 1000")


def widen(logits: Tensor) -> Tensor:
    """Return `logits` in at least float32: half precisions tie too often and round sums away."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
