"""Drafts with any shape, and paths in them."""

from __future__ import annotations

from hypothesis import strategies as st

from paceline.types import Draft


@st.composite
def drafts(draw: st.DrawFn, most: int = 12, vocab: int = 5) -> Draft:
    """Draw a valid draft: parents come before children, and siblings have different tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    for node in range(draw(st.integers(0, most))):
        parent = draw(st.integers(0, node))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        if len(taken) < vocab:
            parents.append(parent)
            tokens.append(draw(st.sampled_from(sorted(set(range(vocab)) - taken))))
        else:
            break
    return Draft(tuple(tokens), tuple(parents))


def path_to(draft: Draft, row: int) -> list[int]:
    """Return the rows from this row up to the root, row 0."""
    rows = [row]
    while rows[-1]:
        rows.append(draft.parents[rows[-1] - 1])
    return rows
