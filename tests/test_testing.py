"""The contract's check notices each target and cache that breaks a clause of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from paceline.protocols import KVCache
from paceline.testing import ListCache, ToyTarget, check_target, targets
from paceline.testing.toy import Entry, ListPass, SavedList
from paceline.types import DraftBudget, Forward, Rows, Want
from tests.support.cover import some


class CommitsInOrder(ListCache):
    """Does not move the rows of a path."""

    def commit(self, rows: Rows, paths: Sequence[Sequence[int] | None]) -> None:
        super().commit(rows, [path and range(1, len(path) + 1) for path in paths])


class CommitsTwice(ListCache):
    def commit(self, rows: Rows, paths: Sequence[Sequence[int] | None]) -> None:
        super().commit(rows, [None if path is None else (0, *path) for path in paths])


class OneSlot(ListCache):
    def acquire(self) -> int:
        return super().acquire() if not self._kept else 0


class GivesTwice(ListCache):
    """Accepts the release of a slot that was already released."""

    def release(self, slot: int) -> None:
        self._kept[slot] = []
        self._free.append(slot)


class KeepsTooMuch(ListCache):
    def truncate(self, slot: int, length: int) -> None:
        super().truncate(slot, length + 1)


class KeepsTheEnd(ListCache):
    def truncate(self, slot: int, length: int) -> None:
        self._kept[slot] = self._kept[slot][len(self._kept[slot]) - length :]


class SharesForks(ListCache):
    def fork(self, slot: int) -> int:
        new = super().fork(slot)
        self._kept[new] = self._kept[slot]
        return new


class ForksRows(ListCache):
    """A fork begins with rows that were not committed."""

    def fork(self, slot: int) -> int:
        new = super().fork(slot)
        self._kept[new] += self._fed[slot][:1]
        return new


class SavesFromNowOn(ListCache):
    """Saved state changes with the slot."""

    def save(self, slot: int) -> SavedList:
        return replace(super().save(slot), entries=self._kept[slot])  # type: ignore[arg-type]

    def release(self, slot: int) -> None:
        if slot not in self._free:
            self._kept[slot].clear()
            self._free.append(slot)


class LoadsTheEnd(ListCache):
    def load(self, slot: int, saved: SavedList, length: int) -> int:
        return super().load(slot, replace(saved, entries=saved.entries[-length:]), length)


class LoadsAll(ListCache):
    def load(self, slot: int, saved: SavedList, length: int) -> int:
        return super().load(slot, saved, saved.length)


class LoadsNothing(ListCache):
    def load(self, slot: int, saved: SavedList, length: int) -> int:
        return 0


class NeverEmpty(ListCache):
    def release(self, slot: int) -> None:
        if slot not in self._free:
            self._free.append(slot)


class ReleasesNeighbours(ListCache):
    """Moves its last slot to the place of a released slot without reporting it."""

    def release(self, slot: int) -> None:
        super().release(slot)
        self._kept[slot], self._kept[-1] = self._kept[-1], self._kept[slot]


class SharedByAll(ListCache):
    """All caches are one, but each counts its own slots."""

    pool: ClassVar[list[list[Entry]]] = []

    def __init__(self) -> None:
        super().__init__()
        self._own = 0
        self._kept = self.pool

    def acquire(self) -> int:
        self._own += 1
        if self._own > len(self._kept):
            self._kept.append([])
        return self._own - 1


class Ghosts(ListCache):
    """Rows of earlier passes that were not committed are still seen."""

    def begin(self, rows: Rows) -> ListPass:
        before = [self._fed.get(slot, []) for slot in rows.slots]
        now = super().begin(rows)
        now._kept = [kept + old for kept, old in zip(now._kept, before, strict=True)]
        return now


class NeverGrows(ListCache):
    """Sees no rows of earlier passes of the same tree."""

    def begin(self, rows: Rows) -> ListPass:
        lines = zip(rows.starts, rows.parents, strict=True)
        parents = tuple(tuple(max(p - start, -1) for p in line[start:]) for start, line in lines)
        return super().begin(replace(rows, parents=parents, starts=(0,) * len(parents)))


class FirstOfBatch(ListCache):
    """Every slot of a pass sees the first one's text."""

    def begin(self, rows: Rows) -> ListPass:
        now = super().begin(rows)
        now._kept = [now._kept[0]] * len(now._kept)
        return now


class Generous(ListCache):
    def fit(self, slot: int, budget: DraftBudget) -> DraftBudget:
        return DraftBudget(budget.nodes + 1, budget.depth + 1, budget.branch)


class Stingy(ListCache):
    def fit(self, slot: int, budget: DraftBudget) -> DraftBudget:
        return budget.within(0)


class SiblingsSee(ListCache):
    """A row sees the rows before it, ancestors or not."""

    def begin(self, rows: Rows) -> ListPass:
        class Leaky(ListPass):
            def seen(self, b: int, row: int) -> list[Entry]:
                return self._kept[b] + self._fed[b][: row + 1]

        now = super().begin(rows)
        return Leaky(now._rows, now._kept, now._fed)


class CommitsAnyPass(ListCache):
    def commit(self, rows: Rows, paths: Sequence[Sequence[int] | None]) -> None:
        self._begun.update(dict.fromkeys(rows.slots, rows.number))
        super().commit(rows, paths)


class KeepsPasses(ListCache):
    """Forgets that a pass was committed, and that its slot was released."""

    def commit(self, rows: Rows, paths: Sequence[Sequence[int] | None]) -> None:
        fed = {slot: list(entries) for slot, entries in self._fed.items()}
        super().commit(rows, paths)
        self._begun.update(dict.fromkeys(rows.slots, rows.number))
        self._fed.update(fed)


class Altered(ToyTarget):
    """Changes what goes in, or what comes out."""

    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        out = super().forward(self.into(rows), cache, want)
        return self.out_of(out, rows, cache, want)

    def into(self, rows: Rows) -> Rows:
        return rows

    def out_of(self, out: Forward, rows: Rows, cache: KVCache, want: Want) -> Forward:
        return out


class CountsRows(Altered):
    """Takes a row's number for its depth."""

    def into(self, rows: Rows) -> Rows:
        steps = torch.arange(rows.tokens.shape[1]) + torch.tensor(rows.starts)[:, None]
        return replace(rows, positions=torch.tensor(rows.lengths)[:, None] + steps)


class ShiftsPrefill(Altered):
    def into(self, rows: Rows) -> Rows:
        return replace(rows, positions=rows.positions + 1) if rows.prefill else rows


class FirstForLast(Altered):
    def out_of(self, out: Forward, rows: Rows, cache: KVCache, want: Want) -> Forward:
        return super().forward(rows, cache, Want()) if want.logits == "last" else out  # type: ignore[return-value]


class Halves(Altered):
    def out_of(self, out: Forward, rows: Rows, cache: KVCache, want: Want) -> Forward:
        return Forward(out.logits.bfloat16(), out.taps)


class Deaf(Altered):
    def out_of(self, out: Forward, rows: Rows, cache: KVCache, want: Want) -> Forward:
        return Forward(out.logits)


class Eager(Altered):
    """Commits without being asked."""

    def out_of(self, out: Forward, rows: Rows, cache: KVCache, want: Want) -> Forward:
        cache.commit(rows, [()] * len(rows.slots))
        return out


class Crowded(Altered):
    """A row's logits depend on the number of rows in the pass."""

    def out_of(self, out: Forward, rows: Rows, cache: KVCache, want: Want) -> Forward:
        return Forward(out.logits + 1e-6 * rows.tokens.shape[1] * torch.arange(self.vocab_size), out.taps)


class ShortSighted(ToyTarget):
    """Has no place for the last token of its context."""

    def __init__(self) -> None:
        super().__init__()
        self._places = self._places[:-1]


class Moody(Altered):
    """Gives slightly different results each time."""

    calls = 0

    def out_of(self, out: Forward, rows: Rows, cache: KVCache, want: Want) -> Forward:
        self.calls += 1
        return Forward(out.logits * (1 + 1e-5 * (self.calls % 3)), out.taps)


BROKEN: dict[type[ListCache] | type[ToyTarget], tuple[str, str]] = {
    CommitsInOrder: ("_commits", "after commit of the path"),
    CommitsTwice: ("_wanted", "commit of 1 rows: 0 became 2"),
    OneSlot: ("_drafts", "a new slot holds 5 tokens"),
    GivesTwice: ("_lives", "a slot was acquired twice"),
    KeepsTooMuch: ("_truncation", "truncation of 14 tokens to 12 kept 13"),
    KeepsTheEnd: ("_truncation", "after truncation to 12"),
    SharesForks: ("_forks", "a fork that continued"),
    ForksRows: ("_forks", "a fork of 8 tokens has 9"),
    SavesFromNowOn: ("_saves", "after 10 tokens were loaded"),
    LoadsTheEnd: ("_saves", "after 9 tokens were loaded"),
    LoadsAll: ("_saves", r"most\(9\) is 9, but load returned 10 tokens"),
    LoadsNothing: ("_saves", r"most\(10\) is 10, but load returned 0 tokens"),
    NeverEmpty: ("_lives", "a new slot holds 11 tokens"),
    ReleasesNeighbours: ("_forks", "a fork whose origin was released"),
    SharedByAll: ("_caches", "a new slot holds 8 tokens"),
    Ghosts: ("_wanted", r"Want\('all'\) changes the logits"),
    NeverGrows: ("_growing", "level 2 of a growing tree"),
    FirstOfBatch: ("_ragged", "line 1 of a batch"),
    Generous: ("_wanted", "fit returned more"),
    Stingy: ("_fits", "fit never allows"),
    SiblingsSee: ("_drafts", "a tree of 8"),
    CountsRows: ("_drafts", "a tree of 8"),
    ShiftsPrefill: ("_chunks", "a prefill chunk"),
    FirstForLast: ("_wanted", r"Want\('last'\)"),
    Halves: ("_wanted", "not float32"),
    Deaf: ("_wanted", "no tap"),
    Eager: ("_wanted", "only commit may"),
    Crowded: ("_drafts", "a chain of 6"),
    ShortSighted: ("_ends", "context can be used up to its last token. It raised"),
    Moody: ("_wanted", "changes the logits"),
    CommitsAnyPass: ("_passes", "the older of two passes was committed"),
    KeepsPasses: ("_passes", "the same pass for the second time was committed"),
}
"""Broken part -> the clause that notices it, and its message."""


def check(broken: Any, said: str) -> None:
    SharedByAll.pool.clear()

    def make() -> ToyTarget:
        if issubclass(broken, ToyTarget):
            return broken()
        target = ToyTarget()
        target.new_cache = broken  # type: ignore[method-assign]
        return target

    with pytest.raises(AssertionError, match=said):
        check_target(make, tolerance=1e-9, taps=(0, "final"))


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_clause_notices_targets_that_break_it(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clause, said = BROKEN[broken]
    assert getattr(targets, clause) in targets.CLAUSES
    monkeypatch.setattr(targets, "CLAUSES", (getattr(targets, clause),))
    check(broken, said)


@some("broken", {broken.__name__: broken for broken in BROKEN}, fast=["NeverGrows"])
def test_the_check_notices_targets_that_do_not(broken: Any) -> None:
    check(broken, BROKEN[broken][1])
