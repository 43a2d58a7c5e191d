"""Medusa: heads on the target's last hidden state that guess the tokens after the next, all in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from paceline.models.heads import MedusaConfig
from paceline.models.loader import Loaded
from paceline.models.medusa import MedusaHeads
from paceline.protocols import Ask, Drafter
from paceline.sampler import Ranked
from paceline.tree import Place, close, places
from paceline.types import Draft, Tap, Tree, Verdict

_WHOLE = Tree(512, 512, 1 << 20)
"""A budget that cuts nothing."""


class Medusa(Drafter):
    """Drafts with Medusa heads (arXiv 2401.10774): head i speaks for depth i + 1, whatever stands above.

    The tree has a fixed shape, `config.paths` (the most useful place first: the budget cuts from the end) or that of
    `tree.places`. Every place of a depth takes its token from one ranking, that of its head, made after the likeliest
    path: processors see that one. Other places may so hold a token that a processor forbids there, which costs nothing
    but the place.

    Under the rules rejection and block each head draws once for all parents of its depth. That is sound: a walk goes
    down one path and so sees the draws of a depth once; what it decided above depends on other draws; and a q that a
    processor bent by the tokens drawn above is still what the draws below it come from.
    """

    taps: tuple[Tap, ...] = ("final",)

    def __init__(self, config: MedusaConfig, tensors: Mapping[str, Tensor], target: Loaded) -> None:
        """`tensors`: see `models/heads.py`. Raises `CorruptModel` for those of another target too, and
        `UnsupportedModel` for a target without ends."""
        self._heads, self._depth, self._order = MedusaHeads(config, tensors, target.target), config.heads, config.paths
        self.draft = Tree(15, config.heads, 4)
        if kept := places(_WHOLE.within(config.heads), config.paths) if config.paths else ():
            self.draft = Tree(len(kept), max(map(len, kept)), max(map(max, kept)) + 1)
        self._states: dict[int, Tensor] = {}
        """The "final" state [H] behind each slot's pending token, where one was heard of."""

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        self._states.pop(slot, None)

    def fork(self, slot: int, source: int, prompt: Sequence[int]) -> None:
        self.admit(slot, prompt)
        if source in self._states:
            self._states[slot] = self._states[source]

    def feed(self, slot: int, tokens: Sequence[int], taps: Mapping[Tap, Tensor]) -> None:
        self._hear(slot, taps, -1)

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        self._hear(slot, out, verdict.path[-1] if verdict.path else 0)

    def release(self, slot: int) -> None:
        self._states.pop(slot, None)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        shapes = [self._shape(ask) for ask in asks]
        able = [i for i, shape in enumerate(shapes) if shape.widths]
        drafts = [Draft()] * len(asks)
        if not able:
            return drafts
        deepest = max(len(shapes[i].widths) for i in able)
        logits = self._logits([asks[i].slot for i in able], deepest)
        for line, i in enumerate(able):
            drafts[i] = shapes[i].draft(_rank(asks[i], logits[:, line], shapes[i].widths))
        return drafts

    @torch.inference_mode()
    def _logits(self, slots: Sequence[int], heads: int) -> Tensor:
        """[heads, R, V] on the host, from one pass for all slots."""
        states = torch.stack([self._states[slot] for slot in slots])
        return self._heads.logits(self._heads.states(states, heads)).cpu()

    def _hear(self, slot: int, taps: Mapping[Tap, Tensor], row: int) -> None:
        # A copy: a view would keep the states of the whole pass, or follow a buffer that is used again.
        self._states[slot] = taps["final"][row].clone()

    def _shape(self, ask: Ask) -> _Shape:
        """Without a state (a prompt of one token was not fed) there is nothing to say."""
        if ask.slot not in self._states:
            return _Shape((), ())
        return _shape(ask.budget.within(self._depth), self._order, ask.sampler.draws)


@dataclass(frozen=True, slots=True)
class _Shape:
    """A fixed tree. `nodes`: of each the parent's row, the head and the rank. `widths`: candidates of each head."""

    nodes: tuple[tuple[int, int, int], ...]
    widths: tuple[int, ...]

    def draft(self, ranked: Sequence[Ranked]) -> Draft:
        """The tree of these candidates, less the places for which there are none."""
        rows: list[int | None] = [0]
        tokens: list[int] = []
        parents: list[int] = []
        q: dict[int, Tensor] = {}
        for parent, head, rank in self.nodes:
            above, best = rows[parent], ranked[head]
            if above is None or rank >= len(best.tokens):
                rows.append(None)
                continue
            tokens.append(best.tokens[rank])
            parents.append(above)
            rows.append(len(tokens))
            if best.q is not None:
                q[above] = best.q
        return Draft(tuple(tokens), tuple(parents), q)


@lru_cache(maxsize=256)
def _shape(budget: Tree, order: tuple[Place, ...], drawn: bool) -> _Shape:
    """The tree that `budget` leaves. `drawn`: siblings take draws in their order and leave none out."""
    kept = places(budget, order)
    kept = close(kept) if drawn else kept
    rows: dict[Place, int] = {place: row for row, place in enumerate(((), *kept))}
    nodes = tuple((rows[place[:-1]], len(place) - 1, place[-1]) for place in kept)
    depth = max(map(len, kept), default=0)
    return _Shape(nodes, tuple(1 + max(rank for _, head, rank in nodes if head == at) for at in range(depth)))


def _rank(ask: Ask, logits: Tensor, widths: Sequence[int]) -> list[Ranked]:
    """The candidates of each head, from its logits [heads, V], after the best of the heads before it."""
    ranked: list[Ranked] = []
    path: list[int] = []
    for row, width in zip(logits, widths, strict=False):
        ranked += ask.sampler.rank(row[None], [path], width)
        # Where a head has no candidate, nothing stands below: any token will do for the path.
        path.append(ranked[-1].tokens[0] if ranked[-1].tokens else 0)
    return ranked
