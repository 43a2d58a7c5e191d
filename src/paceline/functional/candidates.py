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
    """The size of each request's tree.

    Attributes:
        branch: Number of children of an expanded node, and number of nodes that `grow` expands per level, >= 1.
        depth: Number of levels, >= 1.
        max_nodes: Maximum number of nodes, 1 to 512.
        confidence: A node is expanded only if the drafter gives its path at least this probability. A number from 0 to
            1, or a tensor [B] of such numbers.

    Raises:
        InvalidOption: If a value is out of range.
    """

    branch: int
    depth: int
    max_nodes: int
    confidence: float | Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("branch", "depth", "max_nodes"):
            value = getattr(self, name)
            require(type(value) is int and value >= 1, f"{name} must be an int >= 1, got {value!r}", "Increase it")
        require(self.max_nodes <= 512, f"max_nodes must be <= 512, got {self.max_nodes}", "Draft smaller trees")
        self.floors(len(self.confidence) if isinstance(self.confidence, Tensor) and self.confidence.ndim else 1)

    @property
    def budget(self) -> DraftBudget:
        return DraftBudget(self.max_nodes, self.depth, self.branch)

    def floors(self, batch: int) -> list[float]:
        """Return, for each request, the minimum log-probability of the paths that are expanded.

        It is finite even if the confidence is 0, so that impossible paths are never expanded.
        """
        confidence = 0.0 if self.confidence is None else self.confidence
        values = per_request("confidence", confidence, batch, lambda c: 0.0 <= c <= 1.0, "0 to 1")
        return [math.log(c) if c else -sys.float_info.max for c in values]


class TopK(NamedTuple):
    """The k highest values of each row, highest first.

    Attributes:
        values: [..., k].
        indices: int64 [..., k].
        nan: True for each row that contains NaN, bool [...].
    """

    values: Tensor
    indices: Tensor
    nan: Tensor


@dataclass(frozen=True, slots=True)
class CandidateTree:
    """One tree of candidates for each request. Parents come before their children, and siblings differ.

    Attributes:
        drafts: The trees on the host, for verification. One per request.
        tokens: int64 [B, N].
        parents: Row that each node continues, int64 [B, N]. Row 0 is the pending token.
        depths: Depth of each node, int64 [B, N]. It is 1 for a child of the pending token, and 0 for padding.
        log_probs: The drafter's log-probability of each node given its path, float [B, N], -inf for padding.
        scores: Sums of `log_probs` along each path, float [B, N], -inf for padding.
        counts: Number of nodes of each request, int64 [B].
        broken: True if the tree was built from logits that contain NaN or +inf, bool [B].
        max_depth: Upper bound of all depths.
        max_branch: Upper bound of the number of children of a node.
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
        """Build trees from tensors.

        Args:
            tokens: int64 [B, N]. Siblings count as drawn in this order.
            parents: int64 [B, N].
            log_probs: float [B, N]. The default is 0, which means that every node is certain.

        Raises:
            InvalidOption: If these are not trees.
        """
        expect("tokens", tokens, "int64", "B", "N")
        expect("parents", parents, "int64", *tokens.shape)
        steps = torch.zeros(tokens.shape, device=tokens.device) if log_probs is None else widen(log_probs)
        expect("log_probs", steps, "float", *tokens.shape)
        counts = (tokens >= 0).sum(1)
        leading = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
        fits = bool(((tokens >= 0) == leading).all() & ((parents >= 0) == leading).all())
        require(fits, "padding must come after all nodes, in the same places of tokens and parents", "Pad both with -1")
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
    """Pack the trees of a batch, padded to `width` nodes, on the device of `like` and with scores in its dtype."""
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
    """Return ragged rows as a padded tensor [B, width]."""
    full = [[*row, *[padding] * (width - len(row))] for row in rows]
    return torch.tensor(full, dtype=dtype, device=device).view(len(rows), width)


def topk(logits: Tensor, k: int) -> TopK:
    """Return the k highest values of each row. NaN is the lowest value, below -inf, unlike in `torch.topk`.

    Args:
        logits: [..., V], any float dtype.
        k: 1 to V.

    Returns:
        Values, in the dtype of `logits`, and their indices.

    Raises:
        InvalidOption: If k is out of range.
    """
    expect("logits", logits, "float", *logits.shape)
    width = logits.shape[-1] if logits.ndim else 0
    require(type(k) is int and 1 <= k <= width, f"k must be 1 to {width} (the vocabulary), got {k!r}", "Lower k")
    nan = logits.isnan()
    # Read as signed integers, the bits of floats ascend for positive floats and descend for negative floats. An order
    # by bits distinguishes -inf from NaN, and from the lowest finite number, which is often used in masks.
    wide = widen(logits) + 0.0  # -0.0 becomes 0.0
    bits = wide.view(torch.int64 if wide.dtype == torch.float64 else torch.int32)
    limits = torch.iinfo(bits.dtype)
    order = torch.where(bits < 0, bits ^ limits.max, bits).masked_fill_(nan, limits.min)
    indices = order.topk(k, -1).indices
    return TopK(logits.gather(-1, indices), indices, nan.any(-1))


def positions(tree: CandidateTree, lengths: Tensor) -> Tensor:
    """Return the position in the text of every row, int64 [B, T]. Padding rows have the position of the pending
    token."""
    expect("lengths", lengths, "int64", len(tree.counts))
    return torch.cat([lengths[:, None], lengths[:, None] + tree.depths], 1)


def inputs(tree: CandidateTree, pending: Tensor) -> Tensor:
    """Return the target's input ids, int64 [B, T]: the pending token, then the nodes.

    Args:
        tree: Trees of N nodes.
        pending: Pending tokens, int64 [B]. Padding rows repeat them.
    """
    expect("pending", pending, "int64", len(tree.counts))
    return torch.cat([pending[:, None], torch.where(tree.tokens < 0, pending[:, None], tree.tokens)], 1)


def paths(tree: CandidateTree) -> Tensor:
    """Return the path to each row, int64 [B, T, D]: the rows after row 0 that lead to it, ending with the row itself.

    Paths are padded with -1. Row 0 and padding rows have only -1.
    """
    rows = tree.tokens.shape[1] + 1
    batch = []
    for draft in tree.drafts:
        found = paths_of(draft)
        batch += [*found.values(), *[[]] * (rows - len(found))]
    return padded(batch, tree.max_depth, tree.tokens.device).view(len(tree.drafts), rows, tree.max_depth)


def mask(tree: CandidateTree) -> Tensor:
    """Return the attention mask of the tree, bool [B, T, T].

    Each row sees row 0, its ancestors and itself. A padding row sees only itself.
    """
    width = tree.tokens.shape[1]
    rows = [(NONE, *d.parents, *[NONE] * (width - len(d.parents))) for d in tree.drafts]
    return torch.stack([ancestors(parents) for parents in rows]).to(tree.tokens.device)


def attention_bias(tree: CandidateTree, lengths: Tensor, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the bias to add to attention scores: 0 for visible columns, and -inf for hidden columns.

    The first `lengths[b]` columns of the cache must contain the committed text, and row r must be in column
    `lengths[b] + r`.

    Args:
        tree: Trees of N nodes.
        lengths: Number of committed tokens of each request, int64 [B].
        columns: Width of the cache, at least the largest length + T.
        dtype: Type of the result.

    Returns:
        [B, 1, T, columns].

    Raises:
        InvalidOption: If a shape is wrong, or `columns` is too small.
    """
    expect("lengths", lengths, "int64", len(tree.counts))
    tree_mask = mask(tree)
    rows = tree_mask.shape[1]
    require(columns >= rows, f"columns must be >= {rows} for this tree, got {columns}", "Give the width of the cache")
    row = torch.arange(columns, device=lengths.device) - lengths[:, None]
    inside = ((row >= 0) & (row < rows))[:, None]
    seen = tree_mask.gather(2, row.clamp(0, rows - 1)[:, None].expand(-1, rows, -1)) & inside | (row < 0)[:, None]
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[:, None]


def require(valid: bool, cause: str, fix: str) -> None:
    """Raise `InvalidOption` unless `valid`."""
    if not valid:
        raise InvalidOption(cause, fix)


def expect(name: str, x: Tensor, kind: Literal["float", "int64"] | None, *shape: int | str) -> None:
    """Raise `InvalidOption` unless `x` has this shape, and its numbers are of this kind. A letter in the shape stands
    for any size."""
    sizes = [size if isinstance(size, int) else got for size, got in zip(shape, x.shape, strict=False)]
    typed = {"float": x.is_floating_point(), "int64": x.dtype == torch.int64, None: True}[kind]
    wanted = f"{kind or ''} [{', '.join(map(str, shape))}]".strip()
    require(
        typed and len(shape) == x.ndim and sizes == [*x.shape],
        f"{name} must be {wanted}, got {x.dtype} {[*x.shape]}",
        "Pass a tensor of this type and shape",
    )


def per_request(name: str, value: float | Tensor, batch: int, valid: Callable[[float], bool], fix: str) -> list[float]:
    """Return an option as one number per request. The option is either a single number or a tensor [B].

    Raises:
        InvalidOption: If the shape is wrong, or a number is not `valid`. `fix` describes the valid numbers.
    """
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
    """Return the temperature of each request. 0 means greedy. Raise `InvalidOption` if a temperature is out of
    range."""
    return per_request("temperature", temperature, batch, lambda t: t == 0 or 1e-3 <= t <= 1e3, "0 or 0.001 to 1000")


def widen(logits: Tensor) -> Tensor:
    """Convert logits to float32, unless they are float64. In half precision, ties are too common, and sums are too
    inexact."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
