"""The values that the packages exchange. Read this first.

Symbols for shapes, used in all docstrings:

    B  slots (requests) in a pass          V  vocabulary
    N  drafted nodes of one request        H  hidden size
    T  rows of a pass, N + 1               L  committed length of a slot, in tokens
    D  depth of a draft                    K  D + 1

A *row* is one token that is fed to the target. Row 0 is the pending token: the last token of the text, which is chosen
but not yet in the cache. Node i of a draft is row i + 1. Parents are row numbers, so the parents of a chain are 0, 1,
2, ... Siblings share a position (for rotary embeddings), but never a cache entry. The cache decides where a row is
stored (`cache/layout.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

from torch import Tensor

from paceline.errors import InvalidOption

Tap = int | Literal["final"]
"""A hidden state of the target: i means the residual stream *entering* layer i, "final" means the normed output."""

FinishReason = Literal["eos", "stop", "length", "cancelled", "error"]

Message = Mapping[str, Any]
"""A chat message: {"role": ..., "content": ...}."""

Prompt = str | Sequence[int] | Sequence[Message]
"""Text (rendered with the chat template unless raw), token ids, or chat messages."""

Guarantee = Literal["bits", "rounding", "distribution", "lossy"]
"""How a text compares with plain decoding. "bits": the same text, and logits are equal bit for bit. "rounding": the
same text, up to rounding of logits. "distribution": another text with the same distribution (the rules rejection and
block). "lossy": another distribution (the rule typical)."""


Mutual = Literal["none", "windows", "all"]
"""Layers in which the rows of an image see each other: none, the layers with a sliding window (Gemma 4), or all."""


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """Budget of a draft. `DraftBudget.chain(n)` is the classic draft of n consecutive tokens.

    Attributes:
        nodes: Maximum number of tokens, 0 to 512.
        depth: Maximum number of levels.
        branch: Maximum number of children of a node.

    Raises:
        InvalidOption: If a value is out of range.
    """

    nodes: int
    depth: int
    branch: int = 1

    def __post_init__(self) -> None:
        if self.nodes < 0 or self.depth < 0 or self.branch < 1 or self.nodes > 512:
            raise InvalidOption(
                f"a draft of {self.nodes} nodes, depth {self.depth}, branch {self.branch} is not possible",
                "Use 0 to 512 nodes, a depth >= 0 and a branch >= 1",
            )

    @staticmethod
    def chain(length: int) -> DraftBudget:
        return DraftBudget(nodes=length, depth=length, branch=1)

    def __str__(self) -> str:
        """Return the budget as for --draft: LENGTH, or NODESxDEPTHxBRANCH."""
        chain = self == DraftBudget.chain(self.nodes)
        return str(self.nodes) if chain else f"{self.nodes}x{self.depth}x{self.branch}"

    def within(self, depth: int, nodes: int = 512) -> DraftBudget:
        """Return this budget limited to `depth` levels and `nodes` nodes."""
        if depth >= self.depth and nodes >= self.nodes:
            return self
        nodes = max(0, min(self.nodes, nodes))
        depth = max(0, min(self.depth, depth, nodes))
        return DraftBudget(min(nodes, depth) if self.branch == 1 or not depth else nodes, depth, self.branch)

    def limited(self, most: DraftBudget) -> DraftBudget:
        """Return this budget limited to the nodes, levels and children of `most`."""
        nodes, depth = min(self.nodes, most.nodes), min(self.depth, most.depth)
        return DraftBudget(nodes, depth, min(self.branch, most.branch))


@dataclass(frozen=True, slots=True)
class Carried:
    """Work that drafting has already done in the target (early exit), which verification need not repeat.

    The first m rows of the draft have passed all layers before `layer`. Their keys and values in these layers are
    in the cache.

    Attributes:
        layer: The first layer that has not run.
        streams: Input of that layer for these rows, row 0 first, [m, H].
    """

    layer: int
    streams: Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """N proposed tokens as a tree. Parents come before their children, and siblings have different tokens.

    Attributes:
        tokens: Token of each node.
        parents: Row that each node continues. Row 0 is the pending token.
        q: For the rules rejection and block: row -> distribution [V] from which its children were drawn in order,
            without replacement. Children of a row without an entry were chosen, not drawn (a point-mass set).
        carried: Work that verification need not repeat.
        lengthened: Number of tokens that lookups added at the end of a chain (`Drafter.extend`).
        part: The part of a cascade (`Drafter.parts`) that was asked last, with a draft or without.
        unread: Number of tokens of the text that the drafter must still read before it drafts.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: Mapping[int, Tensor] = field(default_factory=dict, compare=False)
    carried: Carried | None = field(default=None, compare=False)
    lengthened: int = field(default=0, compare=False)
    part: int = field(default=0, compare=False)
    unread: int = field(default=0, compare=False)

    @property
    def own(self) -> int:
        """Number of tokens that the drafter itself proposed."""
        return len(self.tokens) - self.lengthened

    @staticmethod
    def chain(tokens: tuple[int, ...] | list[int]) -> Draft:
        return Draft(tuple(tokens), tuple(range(len(tokens))))


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Inputs of a prompt chunk that do not come from token ids: rows of images, and positions in them.

    Attributes:
        rows: Rows of the chunk that show an image, int64 [n].
        embeddings: Their inputs of layer 0, [n, H].
        deep: Added to these rows after layer 0, 1, ..., each [n, H] (Qwen3-VL's deepstack).
        positions: Rotary positions (time, height, width) of all rows, int64 [3, T]. None for the positions of the rows.
        mutual: Layers in which all rows of the chunk see each other, as the rows of an image do in Gemma 3.
    """

    rows: Tensor
    embeddings: Tensor
    deep: tuple[Tensor, ...] = ()
    positions: Tensor | None = None
    mutual: Mutual = "none"

    def is_mutual(self, window: int | None) -> bool:
        """Return True if all rows see each other in layers with this window, None for no window."""
        return self.mutual == "all" or (self.mutual == "windows" and window is not None)

    def place(self, x: Tensor, values: Tensor, add: bool = False) -> Tensor:
        """Return x [1, T, H] with `values` [n, H] in the rows of images, or added to them."""
        x, rows = x.clone(), self.rows.to(x.device)
        values = values.to(x)
        x[0, rows] = x[0, rows] + values if add else values
        return x


@dataclass(frozen=True, slots=True)
class Rows:
    """Input of a pass: T rows for each of B slots, padded where a slot has fewer rows.

    A row attends to the whole committed prefix of its slot, its ancestors and itself.

    Attributes:
        tokens: int64 [B, T], on the target's device.
        positions: int64 [B, T], on the target's device.
        slots: The B cache slots.
        lengths: Committed length of each slot. Row 0 is stored at this place.
        parents: For each slot, the parent of every row: a row number, or -1 for a row that continues the prefix
            directly. This includes the rows of earlier passes, so there are start + T parents.
        starts: For each slot, the number of uncommitted rows of this tree that earlier passes have written, since trees
            may grow level by level. Row numbers continue from there.
        counts: Number of real rows of each slot, at least 1. Results of other rows are ignored and need not be
            computed. Empty means that all rows are real.
        prefill: True for a chunk of a prompt. It does not depend on drafts, so its bits may depend on its shape.
        resume: Set if the rows do not begin at the first layer.
        given: Inputs of a prompt chunk that do not come from token ids.
        number: Identifies the pass (`KVCache.commit`). Copies by `replace` keep it.
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
    given: Given | None = field(default=None, compare=False)
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
        """Upper bound of all positions."""
        return max(n + start for n, start in zip(self.lengths, self.starts, strict=True)) + self.tokens.shape[1]

    def cut(self) -> Rows:
        """Return these rows without the last ones, as far as they are padding in every slot."""
        count = max(self.counts)
        return replace(self, tokens=self.tokens[:, :count], positions=self.positions[..., :count])


@dataclass(frozen=True, slots=True)
class Resume:
    """A pass that begins at a later layer, because drafting has already run the layers before it.

    Attributes:
        layer: The first layer to run.
        streams: For each slot, the input of that layer for its first m rows, [m, H].
        rest: Rows of some slots that still have to pass the earlier layers. None if there are none.
    """

    layer: int
    streams: tuple[Tensor, ...]
    rest: Rows | None


@dataclass(frozen=True, slots=True)
class Want:
    """The requested outputs of a pass.

    Attributes:
        logits: Rows with logits: "all", the "last" one, or "none".
        taps: Hidden states to return.
        layers: Run only this number of layers, then norm and head (early exit). Only the native decoder supports this.
    """

    logits: Literal["all", "last", "none"] = "all"
    taps: tuple[Tap, ...] = ()
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class Forward:
    """Output of a pass. Later passes do not change these tensors.

    Values of padding rows (`Rows.counts`) are undefined. With all logits, T may be cut after the last real row of any
    slot.

    Attributes:
        logits: float32, or float64 for a float64 model, [B, T | 1 | 0, V].
        taps: Tap -> [B, T, H].
    """

    logits: Tensor
    taps: dict[Tap, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tokens that a round commits for a slot.

    Attributes:
        path: Accepted rows from the root down. Row 0 is always accepted, and not listed.
        tokens: Accepted draft tokens, then the token that the target adds (the correction after a rejection, or the
            bonus after full acceptance), so `len(tokens) == len(path) + 1`. The last one is the next pending token. If
            the text ends, there may be fewer tokens, or none.
        finish: Stop reason, or None.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: FinishReason | None = None

    def cut(self, count: int, finish: FinishReason) -> Verdict:
        """Return the first `count` >= 1 tokens of this verdict, with a stop reason."""
        return Verdict(self.path[:count], self.tokens[:count], finish)
