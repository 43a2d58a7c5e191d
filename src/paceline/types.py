"""What travels between the parts. Read this first.

Shape legend, used in every docstring:

    B  slots (requests) in a pass          V  vocabulary
    N  drafted nodes of one request        H  hidden size
    T  rows of a pass, N + 1               L  committed length of a slot, in tokens
    D  depth of a draft                    K  D + 1

A *row* is one token fed to the target. Row 0 carries the pending token: the last token of the text, chosen
but not yet in the cache. Node i of a draft is row i + 1. Parents are row numbers, so a chain's are 0, 1, 2...
Siblings share a position (what rotary embeddings see) but never a cache entry: where a row is written is the
cache's own business (`layout.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from paceline.errors import InvalidOption

Tap = int | Literal["final"]
"""Where to listen: i is the residual stream *entering* layer i, "final" the normed output."""

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
    """How much to draft: at most `nodes` tokens, `depth` deep, `branch` children per node.

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

    def within(self, depth: int, nodes: int = 512) -> DraftBudget:
        """The same draft, cut to `depth` more tokens and `nodes` nodes."""
        if depth >= self.depth and nodes >= self.nodes:
            return self
        nodes = max(0, min(self.nodes, nodes))
        depth = max(0, min(self.depth, depth, nodes))
        return DraftBudget(min(nodes, depth) if self.branch == 1 or not depth else nodes, depth, self.branch)


@dataclass(frozen=True, slots=True)
class Carried:
    """How far drafting has taken the first rows of a draft (row 0 first) in the target itself: up to `layer`.

    `streams` [m, H]: what enters that layer in each of m rows. What the layers before it wrote of them is in the cache.
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
    """How siblings were made, for the rules that ask: row -> the distribution [V] from which its children were drawn in
    their order, without replacement. Without an entry they are a point-mass set: chosen, not drawn."""
    carried: Carried | None = field(default=None, compare=False)
    """Work on the draft that its verification need not do again."""

    @staticmethod
    def chain(tokens: tuple[int, ...] | list[int]) -> Draft:
        return Draft(tuple(tokens), tuple(range(len(tokens))))


@dataclass(frozen=True, slots=True)
class Rows:
    """One pass worth of input: T rows for each of B slots, or fewer: then the last ones only fill up the rectangle.

    `tokens`, `positions`: int64 [B, T] on the target's device.
    `slots`: the B cache slots. `lengths`: the committed length of each slot, where its row 0 is written.
    `parents`: for each slot the parent of every row, a row number or -1 where a row continues the prefix directly.
    A row attends to its slot's whole committed prefix, its ancestors and itself.
    `starts`: for each slot the rows of this same tree that earlier passes wrote and nothing has committed (trees grow
    level by level). Row numbers go on from there: `parents` then covers all start + T rows.
    `counts`: how many of each slot's rows are real, at least one. Nobody looks at what the others give: it may be
    anything and need not be computed. Empty: all are.
    `prefill`: a chunk of a prompt, which is the same whatever is drafted: its bits may depend on its shape.
    `resume`: where rows do not begin at the first layer.
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

    def __post_init__(self) -> None:
        if not self.counts:
            object.__setattr__(self, "counts", (self.tokens.shape[1],) * len(self.slots))

    @property
    def lines(self) -> list[int]:
        """The real rows, slot by slot, as they are numbered among all B * T."""
        of = self.tokens.shape[1]
        return [
            row
            for first, n in zip(range(0, of * len(self.counts), of), self.counts, strict=True)
            for row in range(first, first + n)
        ]

    @property
    def end(self) -> int:
        """More than any row's position."""
        return max(n + start for n, start in zip(self.lengths, self.starts, strict=True)) + self.tokens.shape[1]


@dataclass(frozen=True, slots=True)
class Resume:
    """A pass that begins at `layer`, over rows that drafting has taken there: `streams`, for each slot [m, H], of its
    first m rows. `rest`: the rows that have yet to pass the layers before (of some of the slots), None where all have.
    """

    layer: int
    streams: tuple[Tensor, ...]
    rest: Rows | None


@dataclass(frozen=True, slots=True)
class Want:
    """What a pass must return: logits of `all` rows, of the `last` one or of `none`, and which taps.

    `layers`: only so many of the first layers are run, and their stream goes on to norm and head (early exit). It is
    for those who know that the target can: the native decoder does.
    """

    logits: Literal["all", "last", "none"] = "all"
    taps: tuple[Tap, ...] = ()
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class Forward:
    """What a pass gives: `logits` float32 (float64 for a float64 model) [B, T | 1 | 0, V], `taps` each [B, T, H].

    Of rows that only fill up (`Rows.counts`) anything; logits of all rows may end with the last real one of any slot.
    """

    logits: Tensor
    taps: dict[Tap, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one round commits for one slot.

    `path`: the accepted rows from the root down (row 0 itself is always kept, and not listed).
    `tokens`: the accepted draft tokens, then the one token that the target adds itself (the correction after a
    rejection, the bonus after a full acceptance), so `len(tokens) == len(path) + 1`. The last one is the next
    pending token. `finish`: why the text ends here, or None; a text may end inside the path, and with none at all.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: FinishReason | None = None

    def cut(self, count: int, finish: FinishReason) -> Verdict:
        """The first `count` (>= 1) tokens of this verdict, and the reason to end there."""
        return Verdict(self.path[:count], self.tokens[:count], finish)
