"""DSpark: the correction of the Markov head, and the effect of the confidence head on the draft length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from paceline.drafters.base import Ask
from paceline.drafters.block import Block
from paceline.drafters.growth import TreeGrowth
from paceline.drafters.markov import BlockTrees
from paceline.engine.engine import Engine
from paceline.errors import CorruptModel
from paceline.models.heads import BlockConfig
from paceline.sampling.parameters import Sampling
from paceline.sampling.sampler import Ranked
from paceline.testing import check_drafter, run, run_together, tiny_target
from paceline.types import Draft, DraftBudget
from tests.support.dense_block import Dense, taps_of
from tests.support.tiny_heads import TINY_BLOCK, block_tensors
from tests.support.toys import ask_for

TOY = tiny_target()
PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]
MARKOV = replace(TINY_BLOCK, markov=6)
CONFIGS = {
    "after the anchor": MARKOV,
    "from the anchor": replace(MARKOV, from_anchor=True),
    "confident": replace(MARKOV, confidence=32 + 6),
    "confident by states alone": replace(MARKOV, from_anchor=True, confidence=32),
}


def tensors_of(config: BlockConfig) -> dict[str, Tensor]:
    return {name: x.double() for name, x in block_tensors(config).items()}


def truth(config: BlockConfig, tensors: Mapping[str, Tensor], text: Sequence[int], path: Sequence[int]) -> Tensor:
    """Return logits [V] after a text and drafted tokens, from the dense network and plain products."""
    base = Dense(config, tensors, TOY)(text, [len(text) - 1], taps_of(TOY, text, config.taps))[0]  # type: ignore[arg-type]
    first = 0 if config.from_anchor else 1
    before = [*text, *path][-1]
    row = tensors["markov_head.markov_w2.weight"] @ tensors["markov_head.markov_w1.weight"][before]
    return base[first + len(path)] + row


@pytest.mark.parametrize("name", CONFIGS)
def test_every_row_follows_its_own_parent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS[name]
    tensors = tensors_of(config)
    seen: list[tuple[list[int], list[int], Tensor]] = []

    def noted(
        self: BlockTrees, growth: TreeGrowth, logits: Tensor, paths: Sequence[Sequence[int]], count: int
    ) -> list[Ranked]:
        for path, row in zip(paths, logits, strict=True):
            seen.append((list(growth.ask.token_ids), list(path), row.clone()))
        return plain(self, growth, logits, paths, count)

    plain = BlockTrees._rank
    monkeypatch.setattr(BlockTrees, "_rank", noted)
    samplings = [Sampling(max_new_tokens=6, temperature=t, seed=2) for t in (0.0, 1.0, 3.0)]
    engine = Engine(TOY, Block(config, tensors, TOY), DraftBudget(8, 3, 2))
    run_together(engine, [PROMPT, [3, 4], PROMPT * 3], samplings)
    assert {len(path) for _, path, _ in seen} == {0, 1, 2}
    for text, path, row in seen[::5]:
        torch.testing.assert_close(row, truth(config, tensors, text, path), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
@pytest.mark.parametrize("shape", [DraftBudget.chain(4), DraftBudget(8, 4, 3)], ids=["chain", "tree"])
def test_the_text_does_not_depend_on_the_drafter(shape: DraftBudget, rule: str) -> None:
    config = CONFIGS["confident"]
    drafter = Block(config, tensors_of(config), TOY)
    samplings = [Sampling(max_new_tokens=12, temperature=t, seed=2, rule=rule) for t in (0.0, 1.0)]  # type: ignore[arg-type]
    replies = run_together(Engine(TOY, drafter, shape), [PROMPT] * 2, samplings)
    assert all(stats.drafted for _, _, stats in replies)
    if rule == "match":
        assert [reply[0] for reply in replies] == [run(TOY, PROMPT, sampling)[0] for sampling in samplings]


@pytest.mark.slow
def test_it_keeps_the_contract() -> None:
    check_drafter(lambda: Block(CONFIGS["confident"], tensors_of(CONFIGS["confident"]), TOY))


def test_a_correct_head_is_fully_accepted_and_a_wrong_row_breaks_it() -> None:
    """The Markov head is a table of successors that outweighs the block. W1 is the identity."""
    sampling = Sampling(max_new_tokens=9, temperature=0.9, seed=0)
    text = [PROMPT[-1], *run(TOY, PROMPT, sampling)[0]]
    pairs = set(pairwise(text))
    assert len({before for before, _ in pairs}) == len(pairs) > 2, "in this reply a token says what follows"
    table = torch.zeros(37, 37, dtype=torch.float64)
    for before, after in pairs:
        table[after, before] = 1e4
    config, rows = replace(MARKOV, markov=37), torch.eye(37, dtype=torch.float64)
    shares = []
    for first in (rows, rows.roll(1, 0)):
        heads = {"markov_head.markov_w1.weight": first, "markov_head.markov_w2.weight": table}
        drafter = Block(config, tensors_of(config) | heads, TOY)
        shares.append(run(TOY, PROMPT, sampling, drafter, DraftBudget.chain(4))[2].acceptance)
    assert shares[0] == 1.0
    assert shares[1] < 0.3


def test_a_head_without_confidence_ends_a_chain() -> None:
    config = CONFIGS["confident"]
    tensors = tensors_of(config) | {"confidence_head.proj.weight": torch.zeros(1, 38, dtype=torch.float64)}

    def draft(bias: float) -> Draft:
        sure = {"confidence_head.proj.bias": torch.tensor([bias], dtype=torch.float64)}
        drafter = Block(config, tensors | sure, TOY)
        drafter.admit(0, PROMPT)
        taps = taps_of(TOY, PROMPT[:-1], (0, 1)).chunk(2, -1)
        drafter.feed(0, PROMPT[:-1], dict(zip((0, 1), taps, strict=True)))
        ask: Ask = replace(ask_for(0, DraftBudget.chain(4), Sampling(temperature=0.0), PROMPT), price=0.2)
        return drafter.propose([ask])[0]

    assert [len(draft(bias).tokens) for bias in (9.0, 0.0, -9.0)] == [4, 2, 0], "1, a half, nothing at each token"


def test_heads_that_are_incomplete_are_refused() -> None:
    tensors = tensors_of(CONFIGS["confident"])
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"):
        with pytest.raises(CorruptModel, match="lacks " + name):
            Block(CONFIGS["confident"], {key: x for key, x in tensors.items() if key != name}, TOY)
