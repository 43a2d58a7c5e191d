"""Draft trees: from parents to depths, positions and ancestor masks, and from drafts to the rows of one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heappop, heappush

import torch

from paceline.cache import layout
from paceline.cache.layout import NONE
from paceline.errors import InvalidOption
from paceline.types import Draft, DraftBudget, Resume, Rows

PREFILL_ROWS = 256
"""Prompt tokens per prefill pass: enough for efficient products, few enough to bound memory."""

MIN_ROWS = 4
"""No pass of a target has fewer rows: a matrix product with one row may take another kernel, whose bits differ, and
packed bfloat16 products are faster with four rows than with two (docs/notes/kernels.md#packed-weights)."""


Place = tuple[int, ...]
"""Place of a node in a fixed tree: the ranks on its path. (0, 1) is the second child of the first, () the root."""


def depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of every row (row 0 is 0), from the parents of nodes 1..N."""
    return layout.depths((NONE, *parents))


def check(draft: Draft) -> None:
    """Check that a draft is a tree. Raises `InvalidOption`."""
    if len(draft.tokens) != len(draft.parents):
        raise InvalidOption(
            f"a draft has {len(draft.tokens)} tokens but {len(draft.parents)} parents",
            "Give one parent per token",
        )
    seen = set()
    for node, edge in enumerate(zip(draft.parents, draft.tokens, strict=True)):
        if not 0 <= edge[0] <= node:
            raise InvalidOption(
                f"node {node} of a draft names row {edge[0]} as its parent",
                "Parents are row numbers (0 is the pending token, node i is row i + 1) and come before their children",
            )
        if edge in seen:
            raise InvalidOption(f"token {edge[1]} is drafted twice below row {edge[0]}", "Siblings must differ")
        seen.add(edge)


def paths_of(draft: Draft) -> dict[int, list[int]]:
    """Return, for each row, the rows that lead to it from row 0, without row 0 and with the row itself."""
    paths: dict[int, list[int]] = {0: []}
    for row, parent in enumerate(draft.parents, 1):
        paths[row] = [*paths[parent], row]
    return paths


def from_paths(paths: Iterable[Sequence[int]]) -> Draft:
    """Return the tree of these paths of token ids, shared prefixes once (as Medusa's trees are written)."""
    rows: dict[tuple[int, ...], int] = {(): 0}
    tokens: list[int] = []
    parents: list[int] = []
    for path in paths:
        for end in range(1, len(path) + 1):
            prefix = tuple(path[:end])
            if prefix not in rows:
                tokens.append(prefix[-1])
                parents.append(rows[prefix[:-1]])
                rows[prefix] = len(tokens)
    return Draft(tuple(tokens), tuple(parents))


def beside(path: Sequence[int], other: int) -> tuple[Draft, list[int]]:
    """Return a tree that holds `path`, each token after a sibling `other`, and the path's rows. For self-checks: such a
    path has gaps everywhere."""
    tokens = tuple(t for token in path for t in (other, token))
    rows = list(range(2, 2 * len(path) + 1, 2))
    return Draft(tokens, tuple(parent for parent in (0, *rows[:-1]) for _ in range(2))), rows


@lru_cache(maxsize=64)
def shape(budget: DraftBudget) -> Mapping[Place, int]:
    """Return the number of children of each place in a fixed tree, for drawn siblings; places without any are left
    out."""
    return Counter(place[:-1] for place in places(budget))


@lru_cache(maxsize=64)
def places(budget: DraftBudget, order: tuple[Place, ...] = ()) -> tuple[Place, ...]:
    """Return the places of a fixed tree: as many of `order` as the budget allows, each after the places above it.

    `order`: the most useful first (`independent.best` finds it). Without one, the most probable places if a first
    child is accepted with .7 and each further one with a quarter of the one before it.
    """
    kept: dict[Place, None] = {}
    for place in order or _usual(budget):
        if len(place) <= budget.depth and max(place) < budget.branch:
            # Missing ancestors come with it, budget permitting.
            above = [place[:end] for end in range(1, len(place) + 1) if place[:end] not in kept]
            kept.update(dict.fromkeys(above[: budget.nodes - len(kept)]))
    return tuple(kept)


def close(places: Iterable[Place]) -> tuple[Place, ...]:
    """Return the same tree with siblings numbered from 0 without gaps."""
    names: dict[Place, Place] = {(): ()}
    children: Counter[Place] = Counter()
    for place in places:
        above = place[:-1]
        names[place] = (*names[above], children[above])
        children[above] += 1
    return tuple(names.values())[1:]


def _usual(budget: DraftBudget) -> Iterator[Place]:
    """Yield places by cost: a step to the next sibling costs as much as four steps down."""
    heap: list[tuple[int, Place]] = [(1, (0,))] if budget.depth else []
    count = 0
    while heap and count < budget.nodes:
        cost, place = heappop(heap)
        yield place
        count += 1
        if len(place) < budget.depth:
            heappush(heap, (cost + 1, (*place, 0)))
        if place[-1] + 1 < budget.branch:
            heappush(heap, (cost + 4, (*place[:-1], place[-1] + 1)))


def pack(
    last: Sequence[int],
    drafts: Sequence[Draft],
    slots: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
    starts: Sequence[int] | None = None,
) -> Rows:
    """Return the rows of one pass: per slot the pending token and its draft, padded to the longest (and to `MIN_ROWS`).

    `starts`: for each slot the rows that earlier passes have fed, which are left out. Without it a pass resumes where
    drafting stopped (`Draft.carried`). A padding row is one more root: it repeats the pending token, sees the prefix
    and itself, and is never read.
    """
    begins = starts or [0] * len(drafts)
    counts = tuple(1 + len(d.tokens) - start for d, start in zip(drafts, begins, strict=True))
    count = max(-(-MIN_ROWS // len(drafts)), *counts)
    tokens, positions, parents = [], [], []
    for token, draft, length, start, real in zip(last, drafts, lengths, begins, counts, strict=True):
        fresh = [token, *draft.tokens][start:]
        padding = count - real
        tokens.append(fresh + [token] * padding)
        positions.append([length + d for d in depths(draft.parents)[start:]] + [length] * padding)
        parents.append((NONE, *draft.parents, *[NONE] * padding))
    return Rows(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        slots=tuple(slots),
        lengths=tuple(lengths),
        parents=tuple(parents),
        starts=tuple(begins),
        counts=counts,
        resume=None if starts else _resume(last, drafts, slots, lengths, device),
    )


def _resume(
    last: Sequence[int], drafts: Sequence[Draft], slots: Sequence[int], lengths: Sequence[int], device: torch.device
) -> Resume | None:
    """Return the latest layer at which a pass can begin; drafts carried to another layer start over."""
    layer = max((draft.carried.layer for draft in drafts if draft.carried), default=0)
    if not layer:
        return None
    held = [draft.carried.streams if draft.carried and draft.carried.layer == layer else None for draft in drafts]
    nothing = next(streams for streams in held if streams is not None)[:0]
    streams = tuple(nothing if s is None else s for s in held)
    lines = [i for i, draft in enumerate(drafts) if len(streams[i]) < 1 + len(draft.tokens)]
    if not lines:
        return Resume(layer, streams, None)
    tokens, at, before = ([x[i] for i in lines] for x in (last, slots, lengths))
    rest = pack(tokens, [drafts[i] for i in lines], at, before, device, [len(streams[i]) for i in lines])
    return Resume(layer, streams, rest)


def chunk_end(done: int, limit: int = PREFILL_ROWS) -> int:
    """Return where the chunk that follows the first `done` tokens of a prompt ends: after `limit` tokens, and no later
    than the next multiple of `PREFILL_ROWS`. So where a prompt is cut does not depend on where feeding began, and its
    states are kept at the cuts (`cache/state.py`)."""
    return min(done + limit, done - done % PREFILL_ROWS + PREFILL_ROWS)


def pack_prefix(tokens: Sequence[int], slot: int, length: int, device: torch.device) -> Rows:
    """Return the rows of a prefill chunk: `tokens` continue the slot's committed text."""
    return replace(pack([tokens[0]], [Draft.chain(tuple(tokens[1:]))], [slot], [length], device), prefill=True)
