"""The values that the parts exchange. Read this first.

Shape legend, used in every docstring:

    B  slots (requests) in a pass          V  vocabulary
    N  drafted nodes of one request        H  hidden size
    T  rows of a pass, N + 1               L  committed length of a slot, in tokens
    D  depth of a draft                    K  D + 1

A *row* is one token fed to the target. Row 0 carries the pending token: the last token of the text, chosen
but not yet in the cache. Node i of a draft is row i + 1. Parents are row numbers, so a chain's are 0, 1, 2...
Siblings share a position (what rotary embeddings see) but never a cache entry: the cache decides where a row is
written (`cache/layout.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from torch import Tensor

from paceline.errors import InvalidOption

Tap = int | Literal["final"]
"""A hidden state of the target: i is the residual stream *entering* layer i, "final" the normed output."""

FinishReason = Literal["eos", "stop", "length", "cancelled", "error"]

Message = Mapping[str, Any]
"""One chat message: {"role": ..., "content": ...}."""

Prompt = str | Sequence[int] | Sequence[Message]
"""Text (put through the chat template unless raw), token ids, or chat messages."""

Guarantee = Literal["bits", "rounding", "distribution", "lossy"]
"""What a text keeps of plain decoding's: the same bit for bit, or up to rounding; the distribution alone (the rules
rejection and block); nothing certain (typical)."""


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """Budget for one round of drafting: at most `nodes` tokens, `depth` levels and `branch` children per node.

    `DraftBudget.chain(n)` is the classic draft of n tokens in a row.
    """

    nodes: int
    depth: int
    branch: int = 1

    def __post_init__(self) -> None:
        if self.nodes < 0 or self.depth < 0 or self.branch < 1 or self.nodes > 512:
            raise InvalidOption(
                f"a draft of {self.nodes} nodes, depth {self.depth}, branch {self.branch} is not possible",
                "Use 0 to 512 nodes, a depth of at least 0 and a branch of at least 1",
            )

    @staticmethod
    def chain(length: int) -> DraftBudget:
        return DraftBudget(nodes=length, depth=length, branch=1)

    def __str__(self) -> str:
        """The budget as command lines take it: LENGTH, or NODESxDEPTHxBRANCH."""
        chain = self == DraftBudget.chain(self.nodes)
        return str(self.nodes) if chain else f"{self.nodes}x{self.depth}x{self.branch}"

    def within(self, depth: int, nodes: int = 512) -> DraftBudget:
        """Return this budget cut to `depth` levels and `nodes` nodes."""
        if depth >= self.depth and nodes >= self.nodes:
            return self
        nodes = max(0, min(self.nodes, nodes))
        depth = max(0, min(self.depth, depth, nodes))
        return DraftBudget(min(nodes, depth) if self.branch == 1 or not depth else nodes, depth, self.branch)

    def limited(self, most: DraftBudget) -> DraftBudget:
        """Return this budget with no more nodes, levels and children than `most`."""
        nodes, depth = min(self.nodes, most.nodes), min(self.depth, most.depth)
        return DraftBudget(nodes, depth, min(self.branch, most.branch))


@dataclass(frozen=True, slots=True)
class Carried:
    """Work that drafting did in the target itself (early exit): the first rows of a draft, up to `layer`.

    `streams` [m, H]: the input of that layer for each of m rows, row 0 first. The cache holds what the layers before it
    wrote.
    """

    layer: int
    streams: Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """N proposed tokens as a tree: `parents[i]` is the row (0 = the pending token) that node i continues.

    A parent comes before its children, and siblings differ in their token.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: Mapping[int, Tensor] = field(default_factory=dict, compare=False)
    """Row -> the distribution [V] from which its children were drawn in their order, without replacement, for the rules
    rejection and block. Children of a row without an entry are a point-mass set: chosen, not drawn."""
    carried: Carried | None = field(default=None, compare=False)
    """Work that verification need not repeat."""
    lengthened: int = field(default=0, compare=False)
    """Tokens at the end of a chain that lookups added (`Drafter.extend`)."""
    part: int = field(default=0, compare=False)
    """The part of a cascade (`Drafter.parts`) that was asked last, with a draft or without."""

    @property
    def own(self) -> int:
        """Tokens that its drafter proposed itself."""
        return len(self.tokens) - self.lengthened

    @staticmethod
    def chain(tokens: tuple[int, ...] | list[int]) -> Draft:
        return Draft(tuple(tokens), tuple(range(len(tokens))))


@dataclass(frozen=True, slots=True)
class Rows:
    """Input of one pass: T rows for each of B slots. Where a slot has fewer, padding fills the rectangle.

    `tokens`, `positions`: int64 [B, T] on the target's device.
    `slots`: the B cache slots. `lengths`: the committed length of each slot, where its row 0 is written.
    `parents`: for each slot the parent of every row, a row number or -1 where a row continues the prefix directly.
    A row attends to its slot's whole committed prefix, its ancestors and itself.
    `starts`: for each slot the uncommitted rows of this tree that earlier passes wrote (trees grow level by level). Row
    numbers continue from there: `parents` then covers all start + T rows.
    `counts`: real rows of each slot, at least one. Results of the others are ignored and need not be computed. Empty:
    all are real.
    `prefill`: a chunk of a prompt, which does not depend on drafts: its bits may depend on its shape.
    `resume`: set where rows do not begin at the first layer.
    `number`: identifies the pass (`KVCache.commit`). Copies by `replace` keep it.
    """

    tokens: Tensor
    positions: Tensor
    slots: tuple[int, ...]
    lengths: tuple[int, ...]
    parents: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...] = ()
    prefill: bool = False
    resume: Resume | None = None
    number: int = field(default_factory=count().__next__, compare=False)

    def __post_init__(self) -> None:
        if not self.counts:
            object.__setattr__(self, "counts", (self.tokens.shape[1],) * len(self.slots))

    @property
    def lines(self) -> list[int]:
        """Indices of the real rows among all B * T, slot by slot."""
        of = self.tokens.shape[1]
        return [row for slot, n in enumerate(self.counts) for row in range(slot * of, slot * of + n)]

    @property
    def end(self) -> int:
        """An upper bound of all positions."""
        return max(n + start for n, start in zip(self.lengths, self.starts, strict=True)) + self.tokens.shape[1]


@dataclass(frozen=True, slots=True)
class Resume:
    """A pass that begins at `layer`, over rows that drafting has brought there: `streams`, for each slot [m, H], of its
    first m rows. `rest`: rows of some slots that have yet to pass the layers before; None if all have.
    """

    layer: int
    streams: tuple[Tensor, ...]
    rest: Rows | None


@dataclass(frozen=True, slots=True)
class Want:
    """The outputs wanted of a pass: logits of `all` rows, of the `last` one or of `none`, and taps.

    `layers`: run only this many of the first layers, then norm and head (early exit; the native decoder alone can).
    """

    logits: Literal["all", "last", "none"] = "all"
    taps: tuple[Tap, ...] = ()
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class Forward:
    """Output of a pass: `logits` float32 (float64 for a float64 model) [B, T | 1 | 0, V], `taps` each [B, T, H].

    Padding rows (`Rows.counts`) hold anything; logits of all rows may end with the last real row of any slot. Later
    passes leave these tensors as they are.
    """

    logits: Tensor
    taps: dict[Tap, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tokens that one round commits for one slot.

    `path`: the accepted rows from the root down (row 0 itself is always kept, and not listed).
    `tokens`: the accepted draft tokens, then the one token that the target adds itself (the correction after a
    rejection, the bonus after a full acceptance), so `len(tokens) == len(path) + 1`. The last one is the next
    pending token. `finish`: the stop reason, or None; a text may end inside the path, or with no token at all.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: FinishReason | None = None

    def cut(self, count: int, finish: FinishReason) -> Verdict:
        """Return the first `count` (>= 1) tokens of this verdict, with the stop reason."""
        return Verdict(self.path[:count], self.tokens[:count], finish)
