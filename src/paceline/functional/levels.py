"""How a tree grows: level by level, the drafter being asked once per level for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.functional.candidates import CandidateTree, TreeConfig, require, widen
from paceline.functional.nodes import NodeBatch


@dataclass(frozen=True, slots=True)
class Level:
    """The W nodes per request that a drafter is to continue. All stand at `lengths + depth`.

    tokens: int64 [B, W]. live: bool [B, W]; what is not live is token 0, and what is said of it is ignored.
    parents: int64 [B, W], where among the last call's nodes each node's parent was (0 in the first call).
    visible: bool [B, W, F], which of the F nodes of all calls so far (this one's last) each node sees: its ancestors
    and itself, for a drafter that attends to what it was fed, besides the text and the pending token.
    states: [B, W, H], the hidden state of each node's parent; None where the drafter gives logits.
    """

    tokens: Tensor
    live: Tensor
    depth: int
    parents: Tensor
    visible: Tensor
    states: Tensor | None


Step = Callable[[Level], Tensor]
"""The drafter: logits [B, W, V] of what follows each node; or, with a head, each node's own hidden state [B, W, H]."""

Head = Callable[[Tensor], Tensor]
"""Hidden states [B, W, H] to logits [B, W, V]."""

Propose = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Logits [B, W, V] to children: tokens and log-probabilities, each [B, W, branch], -inf for none."""


@dataclass(frozen=True, slots=True)
class Front:
    """The W rows that get children next, each [B, W, ...]. `states`: their hidden states, where a head reads them."""

    rows: Tensor
    scores: Tensor
    live: Tensor
    visible: Tensor
    states: Tensor | None

    @staticmethod
    def root(states: Tensor | None, scores: Tensor) -> Front:
        """The pending token: `states` [B, 1, H], `scores` zeros [B, 1]."""
        rows = torch.zeros_like(scores, dtype=torch.int64)
        return Front(rows, scores, rows == 0, rows.new_zeros(*rows.shape, 0, dtype=torch.bool), states)

    def children(self, tokens: Tensor, log_probs: Tensor, depth: int, room: int) -> NodeBatch:
        """The first `room` of the children [B, W, branch], as one block. Nothing grows where nothing lives."""
        scores = (self.scores[..., None] + log_probs).masked_fill(~self.live[..., None], -torch.inf)
        parents = self.rows[..., None].expand_as(tokens)
        flat = [x.flatten(1)[:, :room] for x in (tokens, parents, torch.full_like(tokens, depth), log_probs, scores)]
        return NodeBatch(*flat)


@dataclass(slots=True)
class LevelGrowth:
    """What has grown: a block of children for each front. `floor`: log-probability [B, 1] below which nothing grows."""

    config: TreeConfig
    floor: Tensor
    broken: Tensor
    blocks: list[NodeBatch] = field(default_factory=list)
    fronts: list[Front] = field(default_factory=list)

    @property
    def scores(self) -> Tensor:
        return torch.cat([block.scores for block in self.blocks], 1)

    @property
    def size(self) -> int:
        return sum(block.tokens.shape[1] for block in self.blocks)

    def add(self, front: Front, block: NodeBatch) -> None:
        self.fronts.append(front)
        self.blocks.append(block)

    def choose(self, count: int, depth: int) -> tuple[Level, Callable[[Tensor | None], Front]]:
        """The `count` best nodes of the last block, as the drafter sees them, and the front that its answer makes."""
        front, block = self.fronts[-1], self.blocks[-1]
        best = block.scores.topk(count, 1)
        live = (best.values > -torch.inf) & (best.values >= self.floor)
        above = best.indices // self.config.branch
        own = torch.eye(count, dtype=torch.bool, device=above.device).expand(len(above), -1, -1)
        visible = torch.cat([_at(front.visible, above), own], 2)
        tokens = block.tokens.gather(1, best.indices).masked_fill(~live, 0)
        rows = self.size - block.tokens.shape[1] + best.indices + 1
        states = None if front.states is None else _at(front.states, above)
        level = Level(tokens, live, depth, above, visible, states)
        return level, lambda own_states: Front(rows, best.values, live, visible, own_states)

    def tree(self, wanted: Tensor) -> tuple[CandidateTree, Tensor]:
        """`NodeBatch.keep` of all that has grown."""
        config = self.config
        return NodeBatch.join(self.blocks).keep(wanted, config.max_nodes, config.branch, config.depth, self.broken)

    def by_row(self, values: Sequence[Tensor], row_of: Tensor, count: int) -> Tensor:
        """`values`, [B, W, V] of each front, at the rows that it has in the tree: [B, count, V], 0 elsewhere."""
        rows = torch.cat([row_of.gather(1, f.rows).where(f.live, count) for f in self.fronts], 1)
        given = torch.cat(list(values), 1)
        out = given.new_zeros(given.shape[0], count + 1, given.shape[2])
        return out.scatter_(1, rows[..., None].expand_as(given), given)[:, :count]


def grow_levels(
    step: Step, root: Tensor, head: Head | None, config: TreeConfig, propose: Propose, limit: int
) -> LevelGrowth:
    """Ask, choose and ask again until the tree is `config.depth` deep or `limit` nodes have grown."""
    fine = root.ndim == 2 and root.is_floating_point()
    require(fine, f"root is {root.dtype} {[*root.shape]}", "Give float logits [B, V], or with a head states [B, H]")
    batch = len(root)
    floor = config.floor(widen(root))
    growth = LevelGrowth(config, floor, torch.zeros_like(floor[:, 0], dtype=torch.bool))
    logits = read(root[:, None], head, batch, 1)
    front = Front.root(root[:, None] if head else None, logits.new_zeros(batch, 1))
    for depth in range(1, config.depth + 1):
        growth.broken = growth.broken | (logits.isnan().any(-1) & front.live).any(1)
        growth.add(front, front.children(*propose(logits), depth, limit - growth.size))
        room = -(-(limit - growth.size) // config.branch)
        width = min(config.branch, growth.blocks[-1].tokens.shape[1], room)
        if width == 0 or depth == config.depth:
            break
        level, then = growth.choose(width, depth)
        out = step(level)
        front = then(out if head else None)
        logits = read(out, head, batch, width)
    return growth


def read(out: Tensor, head: Head | None, batch: int, width: int) -> Tensor:
    """A drafter's answer as `clean` logits [B, W, V]. Raises `InvalidOption` where it has another shape."""
    logits = head(out) if head else out
    fine = logits.ndim == 3 and logits.shape[:2] == (batch, width) and logits.is_floating_point()
    require(
        fine,
        f"the drafter gave {logits.dtype} {[*logits.shape]} for {width} nodes of {batch} requests",
        "It must give float logits [B, W, V], or states [B, W, H] that the head turns into them",
    )
    return clean(logits)


def clean(logits: Tensor) -> Tensor:
    """Float32 at least, and +inf as NaN: nothing can be ranked above it or be given a probability beside it."""
    wide = widen(logits)
    return wide.masked_fill(wide == torch.inf, torch.nan)


def _at(values: Tensor, columns: Tensor) -> Tensor:
    """`values` [B, W, X] at `columns` [B, U]: [B, U, X]."""
    return values.gather(1, columns[..., None].expand(-1, -1, values.shape[2]))
