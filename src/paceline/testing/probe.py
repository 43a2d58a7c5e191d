"""A target under test, and the slots of its cache, compared with plain feeding (one token per pass)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paceline.protocols import KVCache, Target
from paceline.types import Draft, DraftBudget, Forward, Rows, Tap, Want
from paceline.verify.tree import pack, paths_of

SHAPES = (DraftBudget.chain(0), DraftBudget.chain(1), DraftBudget.chain(6), DraftBudget(8, 3, 2))
BUSHY, SMALL = SHAPES[-1], DraftBudget(3, 2, 2)


class Probe:
    """A target under test, one of its caches, and reference results from plain feeding."""

    def __init__(self, target: Target, tolerance: float, taps: tuple[Tap, ...]) -> None:
        self.target, self.tolerance, self.taps = target, tolerance, taps
        self.cache: KVCache = target.new_cache()
        self._plain: dict[tuple[int, ...], Forward] = {}

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        return [(i * i + 5 * i + 3 * seed + 1) % self.target.vocab_size for i in range(count)]

    def fill(self, budget: DraftBudget, seed: int = 0) -> Draft:
        """Return a tree that uses the whole budget. Siblings have different tokens."""
        firsts, vocab = range(seed + 2, seed + 2 + budget.branch), self.target.vocab_size
        return fill(budget, lambda row, depth: [(3 * row + depth + first) % vocab for first in firsts])

    def text(self, count: int, seed: int = 0, cache: KVCache | None = None) -> Text:
        """Return a slot with `count` tokens, fed one by one. The last token is pending."""
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

    def plain(self, tokens: Sequence[int]) -> Forward:
        """Return the pass for the last of these tokens, from plain feeding into a separate cache."""
        if tuple(tokens) not in self._plain:
            cache = self.target.new_cache()
            slot = cache.acquire()
            for i, token in enumerate(tokens):
                rows = pack([token], [Draft()], [slot], [i], self.target.device)
                self._plain[tuple(tokens[: i + 1])] = self.forward(rows, cache, Want(taps=self.taps))
                cache.commit(rows, [()])
        return self._plain[tuple(tokens)]

    def compare(self, said: str, tokens: Sequence[int], out: Forward, line: int, row: int) -> None:
        """Compare one row of a pass with plain feeding of these tokens."""
        plain = self.plain(tokens)
        self.close(f"{said}: the logits differ from plain feeding", out.logits[line, row], plain.logits[0, 0])
        for tap in self.taps:
            ours, theirs = out.taps[tap][line, row], plain.taps[tap][0, 0]
            self.close(f"{said}: tap {tap!r} differs from plain feeding", ours, theirs)

    def close(self, said: str, ours: Tensor, theirs: Tensor) -> None:
        off = float((ours.double() - theirs.double()).abs().max()) if theirs.numel() else 0.0
        assert off <= self.tolerance, f"{said} (off by {off:.2g})"


@dataclass
class Text:
    """A slot and its text. All tokens except the last are committed; the last one is pending."""

    probe: Probe
    cache: KVCache
    slot: int
    tokens: list[int] = field(default_factory=list)
    rows: Rows = field(init=False, repr=False)

    @property
    def length(self) -> int:
        return self.cache.lengths[self.slot]

    def add(self, *tokens: int) -> None:
        """Feed and commit the pending token and all but the last of `tokens`, one by one. The last token becomes
        pending."""
        for token in tokens:
            if self.tokens:
                self.verify(Draft())
                self.commit(Draft(), ())
            self.tokens.append(token)

    def verify(self, draft: Draft, want: Want | None = None) -> Forward:
        self.rows = pack([self.tokens[-1]], [draft], [self.slot], [self.length], self.probe.target.device)
        return self.probe.forward(self.rows, self.cache, want or Want(taps=self.probe.taps))

    def commit(self, draft: Draft, path: Sequence[int], rows: Rows | None = None) -> None:
        """Commit the pending token and a path of the draft. No token is pending afterwards.

        `rows` are the rows of the pass that verified the draft, by default the rows of the last `verify`.
        """
        length, rows = self.length, rows or self.rows
        self.cache.commit(rows, [path if slot == self.slot else None for slot in rows.slots])
        assert self.length == length + 1 + len(path), f"commit of {1 + len(path)} rows: {length} became {self.length}"
        self.tokens += [draft.tokens[row - 1] for row in path]

    def draft(self, shape: DraftBudget, seed: int = 0) -> Draft:
        """Return a draft that uses as much of the shape as the cache can verify."""
        budget = self.cache.fit(self.slot, shape)
        assert budget.nodes <= shape.nodes, "fit returned more nodes than the budget"
        assert budget.depth <= shape.depth, "fit returned more depth than the budget"
        assert budget.branch <= shape.branch, "fit returned more branches than the budget"
        return self.probe.fill(budget, seed)

    def expect(self, said: str, draft: Draft | None = None, out: Forward | None = None, line: int = 0) -> None:
        """Check that every row of the draft has the same results as plain feeding of its path."""
        draft = self.draft(SMALL) if draft is None else draft
        out = out or self.verify(draft)
        # The longest path comes first, because plain feeding of it also computes its prefixes.
        for row, path in sorted(paths_of(draft).items(), key=lambda item: -len(item[1])):
            tokens = [*self.tokens, *(draft.tokens[r - 1] for r in path)]
            self.probe.compare(said, tokens, out, line, row)


def fill(budget: DraftBudget, children: Callable[[int, int], Iterable[int]]) -> Draft:
    """Return a tree that uses this budget, filled level by level. The last row may lack children.

    Args:
        budget: The budget.
        children: Function from a row and its depth to the tokens of its children.
    """
    tokens: list[int] = []
    parents: list[int] = []
    level = range(1)
    for depth in range(budget.depth):
        edges = [(row, token) for row in level for token in children(row, depth)][: budget.nodes - len(tokens)]
        parents += [row for row, _ in edges]
        tokens += [token for _, token in edges]
        level = range(level.stop, len(tokens) + 1)
    return Draft(tuple(tokens), tuple(parents))


def depth_first(draft: Draft) -> Draft:
    """Return the same tree with its nodes numbered depth first."""
    nodes = [path[-1] for path in sorted(paths_of(draft).values()) if path]
    row = {node: i for i, node in enumerate((0, *nodes))}
    return Draft(tuple(draft.tokens[n - 1] for n in nodes), tuple(row[draft.parents[n - 1]] for n in nodes))
