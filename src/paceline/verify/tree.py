"""Draft trees: depths and paths, fixed tree shapes, and the packing of drafts into the rows of one pass."""

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
"""Number of prompt tokens per prefill pass. More tokens would take more memory. Fewer tokens would make matrix
multiplications less efficient."""

MIN_ROWS = 4
"""Minimum number of rows in a pass of the target. A matrix multiplication with a single row may use another kernel,
which gives different bits. Packed bfloat16 multiplications are faster with four rows than with two
(docs/notes/kernels.md#packed-weights)."""


Place = tuple[int, ...]
"""The place of a node in a fixed tree: the rank, among its siblings, of each node on the path to it. (0, 1) is the
second child of the first node, and () is the root."""


def depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of every row, given the parents of rows 1 to N. Row 0 has depth 0."""
    return layout.depths((NONE, *parents))


def own_depth(draft: Draft) -> int:
    """Return the depth of a draft without the tokens that lookups added."""
    return max(depths(draft.parents[: len(draft.parents) - draft.lengthened]))


def check(draft: Draft) -> None:
    """Raise `InvalidOption` unless a draft is a tree whose siblings have different tokens."""
    if len(draft.tokens) != len(draft.parents):
        raise InvalidOption(
            f"a draft has {len(draft.tokens)} tokens but {len(draft.parents)} parents",
            "Give one parent for each token",
        )
    seen = set()
    for node, edge in enumerate(zip(draft.parents, draft.tokens, strict=True)):
        if not 0 <= edge[0] <= node:
            raise InvalidOption(
                f"the parent of a draft's node {node} must be a row from 0 to {node}, got {edge[0]}",
                "Row 0 is the pending token, node i is row i + 1, and parents come before their children",
            )
        if edge in seen:
            raise InvalidOption(f"token {edge[1]} is drafted twice below row {edge[0]}", "Siblings must differ")
        seen.add(edge)


def paths_of(draft: Draft) -> dict[int, list[int]]:
    """Return, for each row, the path to it: the rows after row 0 that lead to it, including the row itself."""
    paths: dict[int, list[int]] = {0: []}
    for row, parent in enumerate(draft.parents, 1):
        paths[row] = [*paths[parent], row]
    return paths


def from_paths(paths: Iterable[Sequence[int]]) -> Draft:
    """Build a tree from paths of token ids, as Medusa describes trees. Paths with a common prefix share its nodes."""
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


def with_siblings(path: Sequence[int], other: int) -> tuple[Draft, list[int]]:
    """Build a tree for self-checks. Another row separates the rows of the path, so no two of them are adjacent.

    Args:
        path: Tokens of the path.
        other: Token of the sibling that is added before each token of the path.

    Returns:
        The tree, and the rows of the path.
    """
    tokens = tuple(t for token in path for t in (other, token))
    rows = list(range(2, 2 * len(path) + 1, 2))
    return Draft(tokens, tuple(parent for parent in (0, *rows[:-1]) for _ in range(2))), rows


@lru_cache(maxsize=64)
def shape(budget: DraftBudget) -> Mapping[Place, int]:
    """Return a fixed tree as a map from each place to its number of children. Places without children are omitted."""
    return Counter(place[:-1] for place in places(budget))


@lru_cache(maxsize=64)
def places(budget: DraftBudget, order: tuple[Place, ...] = ()) -> tuple[Place, ...]:
    """Return the places of a fixed tree that fits into a budget. Parents come before their children.

    Args:
        budget: The limits on nodes, depth and branch.
        order: Places in order of usefulness, the most useful first (see `independent.best_tree`). The default order is
            by probability of acceptance, where a first child has probability 0.7 and each further child has a quarter
            of the probability of the child before it.
    """
    kept: dict[Place, None] = {}
    for place in order or _default_order(budget):
        if len(place) <= budget.depth and max(place) < budget.branch:
            # Add missing ancestors first, as far as the budget allows.
            above = [place[:end] for end in range(1, len(place) + 1) if place[:end] not in kept]
            kept.update(dict.fromkeys(above[: budget.nodes - len(kept)]))
    return tuple(kept)


def renumber_siblings(places: Iterable[Place]) -> tuple[Place, ...]:
    """Renumber the ranks of siblings from 0, without gaps."""
    names: dict[Place, Place] = {(): ()}
    children: Counter[Place] = Counter()
    for place in places:
        above = place[:-1]
        names[place] = (*names[above], children[above])
        children[above] += 1
    return tuple(names.values())[1:]


def _default_order(budget: DraftBudget) -> Iterator[Place]:
    """Yield the places of a budget in order of cost. A step to the next sibling costs as much as four steps down,
    because 0.7 ** 4 is about a quarter (see `places`)."""
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
    """Pack drafts into the rows of one pass: for each slot the pending token, its draft, and padding.

    All slots are padded to the same number of rows: the rows of the longest slot, or more if the pass would otherwise
    have fewer than `MIN_ROWS` rows. A padding row is an additional root: it repeats the pending token, attends to the
    prefix and itself, and its results are never read.

    Args:
        last: Pending token of each slot.
        drafts: Draft of each slot.
        slots: Slots of the pass.
        lengths: Number of committed tokens of each slot.
        device: Device of the rows.
        starts: For each slot, the number of rows of the draft that earlier passes have fed. This pass omits them. By
            default, the pass has all rows, and resumes at the layer where drafting stopped (`Draft.carried`).
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
    """Return the layer at which a pass resumes and its inputs, or None if no draft has `Draft.carried`. If drafts were
    carried to different layers, the pass resumes at the highest of them, and the other drafts start at layer 0."""
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
    """Return the end of the prompt chunk that begins after the first `done` tokens.

    A chunk has at most `limit` tokens and never crosses a multiple of `PREFILL_ROWS`. States are kept at these
    multiples (`cache/state.py`), so they are the same wherever feeding began.
    """
    return min(done + limit, done - done % PREFILL_ROWS + PREFILL_ROWS)


def pack_prefix(tokens: Sequence[int], slot: int, length: int, device: torch.device) -> Rows:
    """Return the rows of a prefill chunk. `tokens` follow the `length` tokens that the slot has committed."""
    return replace(pack([tokens[0]], [Draft.chain(tuple(tokens[1:]))], [slot], [length], device), prefill=True)
