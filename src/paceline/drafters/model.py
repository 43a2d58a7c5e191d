"""A small model that drafts for a large one: chains and trees, over a cache of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.layout import NONE
from paceline.protocols import Ask, Drafter, Target
from paceline.sampler import Ranked
from paceline.tree import CHUNK, MIN_ROWS, pack_prefix, shape
from paceline.types import Draft, Rows, Tap, Tree, Verdict, Want


@dataclass(slots=True)
class _Slot:
    """`own`: the slot in the draft model's cache. `text`: all that is known, of which the cache holds a prefix."""

    own: int
    text: list[int]


@dataclass(slots=True)
class _Nodes(ABC):
    """A tree while it grows: token, parent node (-1: the pending token) and depth."""

    budget: Tree
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    @abstractmethod
    def grow(self, parent: int, best: Ranked) -> None:
        """Give a node its children, of `budget.branch` candidates at most."""

    @abstractmethod
    def level(self, first: int) -> list[int]:
        """Which of the nodes from `first` on get children, oldest first."""

    @abstractmethod
    def draft(self) -> Draft: ...

    def add(self, token: int, parent: int) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1 if parent >= 0 else 1)

    def path(self, node: int) -> list[int]:
        """The tokens from below the pending one down to the node."""
        path: list[int] = []
        while node >= 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]


@dataclass(slots=True)
class _Chosen(_Nodes):
    """The nodes with the best log-scores from the root are kept (EAGLE-2's rule, arXiv 2406.16858)."""

    scores: list[float] = field(default_factory=list)

    def grow(self, parent: int, best: Ranked) -> None:
        above = self.scores[parent] if parent >= 0 else 0.0
        for token, score in zip(best.tokens, torch.tensor(best.scores).log_softmax(-1).tolist(), strict=True):
            self.add(token, parent)
            self.scores.append(above + min(score, 0.0))

    def level(self, first: int) -> list[int]:
        return self._best(self.budget.branch, first)

    def draft(self) -> Draft:
        kept = self._best(self.budget.nodes)
        rows = {-1: 0} | {node: row for row, node in enumerate(kept, 1)}
        return Draft(tuple(self.tokens[n] for n in kept), tuple(rows[self.parents[n]] for n in kept))

    def _best(self, count: int, first: int = 0) -> list[int]:
        """The `count` highest scores among the nodes from `first` on, oldest first.

        Scores only fall from parent to child and ties go to the older node, so the best of all nodes are a tree.
        """
        nodes = sorted(range(first, len(self.tokens)), key=lambda n: (-self.scores[n], n))
        return sorted(nodes[:count])


@dataclass(slots=True)
class _Drawn(_Nodes):
    """Every candidate stands where `tree.shape` has a place for it, whatever was drawn."""

    ranks: list[tuple[int, ...]] = field(default_factory=list)
    q: dict[int, Tensor] = field(default_factory=dict)

    def grow(self, parent: int, best: Ranked) -> None:
        above = self.ranks[parent] if parent >= 0 else ()
        for rank, token in enumerate(best.tokens[: shape(self.budget)[above]]):
            self.add(token, parent)
            self.ranks.append((*above, rank))
        if best.q is not None:
            self.q[parent + 1] = best.q

    def level(self, first: int) -> list[int]:
        return [n for n in range(first, len(self.tokens)) if self.ranks[n] in shape(self.budget)]

    def draft(self) -> Draft:
        return Draft(tuple(self.tokens), tuple(parent + 1 for parent in self.parents), self.q)


class DraftModel(Drafter):
    """Drafts with any `Target` of the same vocabulary, which may live on another device in another dtype.

    Candidates are ranked by the sampler's own noise, so that at any temperature the draft aims at what the target is
    about to draw. A tree grows level by level: the best `branch` nodes of a level are expanded by `branch` each, and
    of all that grew the best `nodes` are kept. Under the rules rejection and block candidates are drawn instead, and
    the tree has a fixed shape: choosing what to keep by what was drawn would change the distribution.
    """

    draft = Tree.chain(5)

    def __init__(self, model: Target, vocab_size: int) -> None:
        """`vocab_size`: the target's; a padded draft vocabulary is cut to it."""
        self._model, self._vocab = model, vocab_size
        self._cache = model.new_cache()
        self._slots: dict[int, _Slot] = {}

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        self._slots[slot] = _Slot(self._cache.acquire(len(prompt)), list(prompt))

    def observe(self, slot: int, verdict: Verdict, out: Mapping[Tap, Tensor]) -> None:
        self._slots[slot].text += verdict.tokens

    def release(self, slot: int) -> None:
        state = self._slots.pop(slot, None)
        if state:
            self._cache.release(state.own)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._propose(ask, self._slots[ask.slot]) for ask in asks]

    def _propose(self, ask: Ask, state: _Slot) -> Draft:
        budget = ask.budget.within(self._model.context_length - len(state.text))
        if budget.nodes == 0:
            return Draft()
        nodes: _Nodes = _Drawn(budget) if ask.sampler.draws else _Chosen(budget)
        self._expand(nodes, [-1], self._catch_up(state), ask)
        fed: list[int] = []
        first = 0
        for _ in range(1, budget.depth):
            chosen = nodes.level(first)
            if not chosen:
                break
            first = len(nodes.tokens)
            logits = self._feed(nodes, chosen, fed, state)
            self._expand(nodes, chosen, logits, ask)
        return nodes.draft()

    def _catch_up(self, state: _Slot) -> Tensor:
        """Feed what is known and not yet cached, the pending token at least. Returns its logits [1, V]."""
        # Asked again before anything was observed, it feeds the pending token again.
        self._cache.truncate(state.own, min(self._cache.lengths[state.own], len(state.text) - 1))
        while True:
            done = self._cache.lengths[state.own]
            chunk = state.text[done : done + CHUNK]
            rows = pack_prefix(chunk, state.own, done, self._model.device)
            ends = done + len(chunk) == len(state.text)
            # The last row of a padded pass is padding.
            want = Want("none" if not ends else "all" if len(chunk) < MIN_ROWS else "last")
            out = self._model.forward(rows, self._cache, want)
            self._cache.commit(state.own, range(1, len(chunk)))
            if ends:
                last = min(len(chunk), out.logits.shape[1]) - 1
                return out.logits[0, last : last + 1]

    def _feed(self, nodes: _Nodes, chosen: Sequence[int], fed: list[int], state: _Slot) -> Tensor:
        """One pass over a level's chosen nodes, on top of the rows `fed` before. Returns their logits [T, V]."""
        start, length = len(fed), len(state.text)
        row_of = {NONE: NONE} | {node: row for row, node in enumerate([*fed, *chosen])}
        device = self._model.device
        rows = Rows(
            tokens=torch.tensor([[nodes.tokens[n] for n in chosen]], device=device),
            positions=torch.tensor([[length - 1 + nodes.depths[n] for n in chosen]], device=device),
            slots=(state.own,),
            lengths=(length,),
            parents=(tuple(row_of[nodes.parents[n]] for n in row_of if n != NONE),),
            starts=(start,),
        )
        fed += chosen
        return self._model.forward(rows, self._cache, Want()).logits[0]

    def _expand(self, nodes: _Nodes, parents: Sequence[int], logits: Tensor, ask: Ask) -> None:
        """Give each parent its children by its row of logits [T, V], cut or padded to the target's vocabulary."""
        paths = [nodes.path(parent) for parent in parents]
        logits = pad(logits, (0, self._vocab - logits.shape[-1]), value=-torch.inf)
        ranked = ask.sampler.rank(logits, paths, nodes.budget.branch)
        for parent, best in zip(parents, ranked, strict=True):
            nodes.grow(parent, best)
