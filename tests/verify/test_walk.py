from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import NonFiniteLogits
from paceline.sampling.noise import Noise
from paceline.sampling.sampler import Prefix, Sampler
from paceline.types import Draft, Verdict
from paceline.verify.rules import match, walk
from tests.support.trees import drafts, path_to


def trees(nodes: int, vocab: int) -> Iterator[Draft]:
    """Yield every valid draft with this number of nodes."""
    for parents in itertools.product(*(range(n + 1) for n in range(nodes))):
        for tokens in itertools.product(range(vocab), repeat=nodes):
            if len({*zip(parents, tokens, strict=True)}) == nodes:
                yield Draft(tokens, parents)


def expected(draft: Draft, choices: tuple[int, ...]) -> Verdict:
    """Walk by definition: follow the choices as long as a path of the tree contains them."""
    spelled = {
        tuple(draft.tokens[r - 1] for r in reversed(path_to(draft, row)[:-1])): row
        for row in range(len(draft.tokens) + 1)
    }
    kept = next(n for n in range(len(choices), -1, -1) if all(choices[:m] in spelled for m in range(n + 1)))
    path = tuple(spelled[choices[:m]] for m in range(1, kept + 1))
    return Verdict(path, choices[: kept + 1])


@pytest.mark.parametrize("nodes", [0, 1, 2, 3])
def test_the_walk_by_exact_enumeration(nodes: int) -> None:
    vocab = 3
    for draft in trees(nodes, vocab):
        for choices in itertools.product(range(vocab), repeat=nodes + 1):
            verdict = walk(draft, lambda row, path, c=choices: c[len(path)])  # type: ignore[misc]
            assert verdict == expected(draft, choices)


@given(drafts(vocab=4), st.integers(0, 1000), st.sampled_from([0.0, 0.7]))
def test_match_keeps_the_draws_of_the_target(draft: Draft, seed: int, temperature: float) -> None:
    rows = len(draft.tokens) + 1
    logits = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)).double()
    sampler = Sampler(temperature, noise=Noise(seed))
    prefix = Prefix([0] * 20)
    verdict = match(draft, logits, sampler, prefix)
    visited = (0, *verdict.path)
    alone = tuple(sampler.choose(prefix.after([0] * depth), logits[row]) for depth, row in enumerate(visited))
    assert verdict.tokens == alone
    assert [draft.tokens[row - 1] for row in verdict.path] == list(verdict.tokens[:-1])
    assert [draft.parents[row - 1] for row in verdict.path] == list(visited[:-1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_visited_rows_must_be_finite(temperature: float) -> None:
    sampler = Sampler(temperature)
    logits = torch.zeros(3, 4)
    logits[0, 2] = logits[1, 3] = 100.0
    logits[2] = torch.nan
    assert match(Draft((2, 1), (0, 0)), logits, sampler, Prefix()).tokens == (2, 3)
    ended = match(Draft((1, 2), (0, 0)), logits, sampler, Prefix())
    assert ended == Verdict((), (2,)), "the next round begins with the broken row, as plain decoding does"
    with pytest.raises(NonFiniteLogits, match="position 1"):
        match(Draft(), logits[2:], sampler, Prefix([2]))


def test_cutting_a_verdict_keeps_path_and_tokens_in_step() -> None:
    verdict = Verdict((2, 5, 6), (7, 8, 9, 10))
    assert verdict.cut(2, "eos") == Verdict((2, 5), (7, 8), "eos")
    assert verdict.cut(1, "length") == Verdict((2,), (7,), "length")
    assert verdict.cut(4, "length").path == verdict.path
