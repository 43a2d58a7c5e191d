"""The data types that the packages exchange. Read this file first.

Symbols for shapes, used in all docstrings:

    B  slots (requests) in a pass          V  vocabulary
    N  drafted nodes of one request        H  hidden size
    T  rows of a pass, N + 1               L  committed length of a slot, in tokens
    D  depth of a draft                    K  D + 1

A *slot* holds the cached keys and values (and other state) of one request. A *pass* is one forward pass of the target,
over rows of one or more slots. In a *round*, drafters propose tokens for the running requests, one pass verifies all of
them, and the accepted tokens are *committed*: they join the text, and their keys and values stay in the cache.

A *row* is one token that is fed to the target, which means that it goes through the model in a pass. Row 0 is the
pending token: the last token of the text, which has been chosen but is not in the cache yet. Node i of a draft is row
i + 1. A parent is given as the index of its row, so the parents of a chain are 0, 1, 2, ... Siblings share a position
(for rotary embeddings), but never a cache entry. The cache decides where a row is stored (`cache/layout.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

from torch import Tensor

from paceline.errors import InvalidOption

Tap = int | Literal["final"]
"""A hidden state of the target: i is the residual stream *entering* layer i, and "final" is the output after the final
norm."""

FinishReason = Literal["eos", "stop", "length", "cancelled", "error"]

Message = Mapping[str, Any]
"""A chat message: {"role": ..., "content": ...}."""

Prompt = str | Sequence[int] | Sequence[Message]
"""A text (rendered with the chat template unless `raw` is True), a list of token ids, or a list of chat messages."""

Guarantee = Literal["bits", "rounding", "distribution", "lossy"]
"""The guarantee for a text, compared with plain decoding. "bits": the same text, from logits that are equal bit for
bit. "rounding": the same text, unless two candidates are so close that a rounding difference in the logits decides
between them. "distribution": another text, drawn from the same distribution (the rules rejection and block). "lossy": a
text from another distribution (the rule typical)."""


Mutual = Literal["none", "windows", "all"]
"""The layers that let the rows of an image see each other: none, the layers with a sliding window (Gemma 4), or all."""


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """The maximum size of a draft. `DraftBudget.chain(n)` is the classic draft of n consecutive tokens.

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
        """Return the budget in the form that --draft accepts: LENGTH, or NODESxDEPTHxBRANCH."""
        chain = self == DraftBudget.chain(self.nodes)
        return str(self.nodes) if chain else f"{self.nodes}x{self.depth}x{self.branch}"

    def within(self, depth: int, nodes: int = 512) -> DraftBudget:
        """Return a copy of this budget, limited to `depth` levels and `nodes` nodes."""
        if depth >= self.depth and nodes >= self.nodes:
            return self
        nodes = max(0, min(self.nodes, nodes))
        depth = max(0, min(self.depth, depth, nodes))
        return DraftBudget(min(nodes, depth) if self.branch == 1 or not depth else nodes, depth, self.branch)

    def as_chain(self) -> DraftBudget:
        """Return the longest chain within this budget."""
        return DraftBudget.chain(min(self.nodes, self.depth))

    def limited(self, most: DraftBudget) -> DraftBudget:
        """Return a copy of this budget, with each limit at most the limit in `most`."""
        nodes, depth = min(self.nodes, most.nodes), min(self.depth, most.depth)
        return DraftBudget(nodes, depth, min(self.branch, most.branch))


@dataclass(frozen=True, slots=True)
class Carried:
    """Work that drafting has already done in the target (early exit), so that verification need not repeat it.

    The first m rows of the draft have already gone through all layers before `layer`. The cache holds their keys and
    values for these layers.

    Attributes:
        layer: The first layer that has not run.
        streams: Input of that layer for these rows, row 0 first, [m, H].
    """

    layer: int
    streams: Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of N proposed tokens. Parents come before their children, and siblings have different tokens.

    Attributes:
        tokens: Token of each node.
        parents: For each node, the index of the row that it continues. Row 0 is the pending token.
        q: For the rules rejection and block. It maps a row to the distribution [V] that its children were drawn from,
            in order and without replacement. If a row has no entry, its children were chosen, not drawn: each counts as
            a point mass.
        carried: Work that verification need not repeat (early exit). None for other drafters.
        lengthened: Number of tokens that lookups added at the end of the deepest path (`Drafter.extend`). They are the
            last nodes.
        part: For a cascade of drafters, the index of the part (`Drafter.parts`) that was asked last, even if it drafted
            nothing.
        unread: Number of tokens that the drafter must still read before it can draft.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: Mapping[int, Tensor] = field(default_factory=dict, compare=False)
    carried: Carried | None = field(default=None, compare=False)
    lengthened: int = field(default=0, compare=False)
    part: int = field(default=0, compare=False)
    unread: int = field(default=0, compare=False)

    @staticmethod
    def chain(tokens: tuple[int, ...] | list[int]) -> Draft:
        return Draft(tuple(tokens), tuple(range(len(tokens))))


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Inputs of a prompt chunk that do not come from token ids: the embeddings of images, and rotary positions.

    Attributes:
        rows: Rows of the chunk that belong to images, int64 [n].
        embeddings: Inputs of layer 0 for these rows, [n, H].
        deep: Tensors to add to these rows after layer 0, 1, ..., each [n, H] (Qwen3-VL's deepstack).
        positions: Rotary positions (time, height, width) of all rows, int64 [3, T]. None to use `Rows.positions`.
        mutual: Layers that let all rows of the chunk see each other, as Gemma 3 does with the rows of an image.
    """

    rows: Tensor
    embeddings: Tensor
    deep: tuple[Tensor, ...] = ()
    positions: Tensor | None = None
    mutual: Mutual = "none"

    def is_mutual(self, window: int | None) -> bool:
        """Return True if all rows see each other in layers with this window. `window` is None for layers without a
        window."""
        return self.mutual == "all" or (self.mutual == "windows" and window is not None)

    def place(self, x: Tensor, values: Tensor, add: bool = False) -> Tensor:
        """Return x [1, T, H] with the image rows replaced by `values` [n, H], or with `values` added to them."""
        x, rows = x.clone(), self.rows.to(x.device)
        values = values.to(x)
        x[0, rows] = x[0, rows] + values if add else values
        return x


@dataclass(frozen=True, slots=True)
class Rows:
    """The input of a pass: T rows for each of B slots. Slots with fewer rows are padded.

    A row attends to the whole committed prefix of its slot, its ancestors and itself.

    Attributes:
        tokens: int64 [B, T], on the target's device.
        positions: int64 [B, T], on the target's device.
        slots: The B cache slots.
        lengths: Committed length of each slot. It is also the index of the cache entry that stores row 0.
        parents: For each slot, the parent of every row: the index of a row, or -1 for a row that continues the
            committed prefix directly. The rows of the tree that earlier passes have written come first, so there are
            start + T parents.
        starts: For each slot, the number of uncommitted rows of the same tree that earlier passes have written, because
            a tree may grow level by level. The rows of this pass are numbered from there.
        counts: Number of real rows of each slot, at least 1. The other rows are padding: their results are ignored and
            need not be computed. Empty if all rows are real.
        prefill: True for a chunk of a prompt. Chunks do not depend on drafts, so a faster kernel may be used, whose
            bits depend on the shape of the chunk.
        resume: Set if the rows do not begin at the first layer.
        given: Inputs of a prompt chunk that do not come from token ids.
        number: Identifies the pass (`KVCache.commit`). Copies made with `dataclasses.replace` keep it.
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
        """Indices of the real rows among all B * T rows, slot by slot."""
        of = self.tokens.shape[1]
        return [row for slot, n in enumerate(self.counts) for row in range(slot * of, slot * of + n)]

    @property
    def end(self) -> int:
        """Exclusive upper bound of all positions."""
        return max(n + start for n, start in zip(self.lengths, self.starts, strict=True)) + self.tokens.shape[1]

    def cut(self) -> Rows:
        """Return a copy without the trailing rows that are padding in every slot."""
        count = max(self.counts)
        return replace(self, tokens=self.tokens[:, :count], positions=self.positions[..., :count])


@dataclass(frozen=True, slots=True)
class Resume:
    """A pass that begins at a later layer, because drafting has already run the layers before it.

    Attributes:
        layer: The first layer to run.
        streams: For each slot, the input of that layer for its first m rows, [m, H].
        rest: The rows that must still pass the earlier layers, in the slots that have such rows. None if no slot has
            any.
    """

    layer: int
    streams: tuple[Tensor, ...]
    rest: Rows | None


@dataclass(frozen=True, slots=True)
class Want:
    """The outputs that a caller requests from a pass.

    Attributes:
        logits: The rows to compute logits for: "all", the "last" one, or "none".
        taps: Hidden states to return.
        layers: Number of layers to run before the final norm and the head (early exit). None runs all layers. Only the
            native decoder supports this.
    """

    logits: Literal["all", "last", "none"] = "all"
    taps: tuple[Tap, ...] = ()
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class Forward:
    """Output of a pass. Later passes do not change these tensors.

    Values of padding rows (`Rows.counts`) are undefined. If all logits were requested, the output may omit trailing
    rows that are padding in every slot, so its T may be smaller.

    Attributes:
        logits: [B, T | 1 | 0, V], in float32, or in float64 for a float64 model.
        taps: Tap -> [B, T, H].
    """

    logits: Tensor
    taps: dict[Tap, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The tokens that a round commits for a slot.

    Attributes:
        path: Accepted rows, from the root down. Row 0 is not listed, since it is always accepted.
        tokens: The accepted draft tokens, then the token that the target adds: the correction after a rejection, or the
            bonus token after full acceptance. So `len(tokens) == len(path) + 1`, and the last token is the next pending
            token. If the text ends, there may be fewer tokens, or none.
        finish: Why the text ends here. None if it goes on.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: FinishReason | None = None

    def cut(self, count: int, finish: FinishReason) -> Verdict:
        """Return a verdict with only the first `count` >= 1 tokens, and with a finish reason."""
        return Verdict(self.path[:count], self.tokens[:count], finish)
