"""A target under test and the slots of its cache, compared with plain feeding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paceline.protocols import KVCache, Target
from paceline.types import Draft, DraftBudget, Forward, Rows, Tap, Want
from paceline.verify.tree import pack, paths_of

SHAPES = (DraftBudget.chain(0), DraftBudget.chain(1), DraftBudget.chain(6), DraftBudget(8, 3, 2))
BUSHY, SMALL = SHAPES[-1], DraftBudget(3, 2, 2)


class Probe:
    """A target under test, one of its caches, and the results of plain feeding."""

    def __init__(self, target: Target, tolerance: float, taps: tuple[Tap, ...]) -> None:
        self.target, self.tolerance, self.taps = target, tolerance, taps
        self.cache: KVCache = target.new_cache()
        self._plain: dict[tuple[int, ...], tuple[Tensor, dict[Tap, Tensor]]] = {}

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        return [(i * i + 5 * i + 3 * seed + 1) % self.target.vocab_size for i in range(count)]

    def text(self, count: int, seed: int = 0, cache: KVCache | None = None) -> Text:
        """Return a slot with `count` tokens, the last one pending, fed one by one."""
        cache = cache or self.cache
        text = Text(self, cache, cache.acquire())
        assert text.length == 0, f"a new slot holds {text.length} tokens"
        text.add(*self.tokens(count, seed))
        return text

    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        before = [cache.lengths[slot] for slot in rows.slots]
        out = self.target.forward(rows, cache, want)
        assert [cache.lengths[slot] for slot in rows.slots] == before, "a pass advanced a slot; only commit may"
        return out

    def plain(self, tokens: Sequence[int]) -> tuple[Tensor, dict[Tap, Tensor]]:
        """Return logits [V] after the tokens, and taps {tap: [H]} of the last, from a cache used for nothing else."""
        if tuple(tokens) not in self._plain:
            cache = self.target.new_cache()
            slot = cache.acquire()
            for i, token in enumerate(tokens):
                rows = pack([token], [Draft()], [slot], [i], self.target.device)
                out = self.forward(rows, cache, Want(taps=self.taps))
                cache.commit(rows, [()])
                taps = {tap: x[0, 0] for tap, x in out.taps.items()}
                self._plain[tuple(tokens[: i + 1])] = out.logits[0, 0], taps
        return self._plain[tuple(tokens)]

    def compare(self, said: str, tokens: Sequence[int], logits: Tensor, taps: dict[Tap, Tensor]) -> None:
        """Compare one row [V] and its taps [H] with plain feeding."""
        plain, states = self.plain(tokens)
        self.close(f"{said}: not the logits of plain feeding", logits, plain)
        for tap in self.taps:
            self.close(f"{said}: not the tap {tap!r} of plain feeding", taps[tap], states[tap])

    def close(self, said: str, ours: Tensor, theirs: Tensor) -> None:
        off = float((ours.double() - theirs.double()).abs().max()) if theirs.numel() else 0.0
        assert off <= self.tolerance, f"{said} (off by {off:.2g})"


@dataclass
class Text:
    """A slot and its text: all tokens but the last are committed, and the last is pending."""

    probe: Probe
    cache: KVCache
    slot: int
    tokens: list[int] = field(default_factory=list)
    _rows: Rows = field(init=False, repr=False)

    @property
    def length(self) -> int:
        return self.cache.lengths[self.slot]

    def add(self, *tokens: int) -> None:
        """Feed and commit the pending token and these, one by one; the last becomes pending."""
        for token in tokens:
            if self.tokens:
                self.verify(Draft())
                self.commit(Draft(), ())
            self.tokens.append(token)

    def verify(self, draft: Draft, want: Want | None = None) -> Forward:
        self._rows = pack([self.tokens[-1]], [draft], [self.slot], [self.length], self.probe.target.device)
        return self.probe.forward(self._rows, self.cache, want or Want(taps=self.probe.taps))

    def commit(self, draft: Draft, path: Sequence[int], rows: Rows | None = None) -> None:
        """Keep the pending token and the path; its last token stays in the cache, and the text has no pending one.
        `rows`: those of the pass that verified the draft, if it was not `verify`."""
        length, rows = self.length, rows or self._rows
        self.cache.commit(rows, [path if slot == self.slot else None for slot in rows.slots])
        assert self.length == length + 1 + len(path), f"commit of {1 + len(path)} rows: {length} became {self.length}"
        self.tokens += [draft.tokens[row - 1] for row in path]

    def draft(self, shape: DraftBudget, seed: int = 0) -> Draft:
        """Return a draft with as much of the shape as the cache can verify, level by level."""
        budget = self.cache.fit(self.slot, shape)
        assert budget.nodes <= shape.nodes, "fit gave more nodes than the budget"
        assert budget.depth <= shape.depth, "fit gave more depth than the budget"
        assert budget.branch <= shape.branch, "fit gave more branches than the budget"
        return fill(budget, self.probe.target.vocab_size, seed)

    def expect(self, said: str, draft: Draft | None = None, out: Forward | None = None, line: int = 0) -> None:
        """Check that every row of the draft gives what plain feeding of its path gives."""
        draft = self.draft(SMALL) if draft is None else draft
        out = out or self.verify(draft)
        # The longest first: plain feeding then gives its prefixes too.
        for row, path in sorted(paths_of(draft).items(), key=lambda item: -len(item[1])):
            tokens = [*self.tokens, *(draft.tokens[r - 1] for r in path)]
            self.probe.compare(said, tokens, out.logits[line, row], {tap: x[line, row] for tap, x in out.taps.items()})


def fill(budget: DraftBudget, vocab: int, seed: int = 0) -> Draft:
    """Return a tree that uses this budget, level by level, with different siblings; the last row may lack children."""
    tokens: list[int] = []
    parents: list[int] = []
    level = [0]
    for depth in range(budget.depth):
        edges = [(row, branch) for row in level for branch in range(budget.branch)][: budget.nodes - len(tokens)]
        level = []
        for row, branch in edges:
            tokens.append((3 * row + depth + branch + seed + 2) % vocab)
            parents.append(row)
            level.append(len(tokens))
    return Draft(tuple(tokens), tuple(parents))


def depth_first(draft: Draft) -> Draft:
    """Return the same tree with its nodes numbered depth first."""
    paths = sorted(paths_of(draft).values())
    row = {path[-1] if path else 0: i for i, path in enumerate(paths)}
    nodes = [path[-1] for path in paths if path]
    return Draft(tuple(draft.tokens[n - 1] for n in nodes), tuple(row[draft.parents[n - 1]] for n in nodes))
