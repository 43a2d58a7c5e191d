"""P-EAGLE: guesses for a chain from one pass, compared with the plain head with mask rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.head_write import write_head
from paceline.drafters.growth import TreeGrowth
from paceline.drafters.parallel import ParallelEagle
from paceline.engine.engine import Engine
from paceline.errors import CorruptModel, InvalidOption
from paceline.models.heads import EagleConfig
from paceline.sampling.parameters import Sampling
from paceline.testing import check_drafter, run, run_together, tiny_target
from paceline.types import DraftBudget
from tests.support.eagle_reference import Reference
from tests.support.random_heads import EAGLE3, folder_of, head_of, speculators
from tests.support.tiny_heads import eagle_config, eagle_tensors

TOY = tiny_target()
PROMPT = [1, 5, 9, 5, 9, 5, 2, 1, 5, 9]
CONFIGS = {
    "plain": eagle_config(mask_token=36),
    "normed": eagle_config(mask_token=0, fc_norm=True, norm_output=True, norm_before_residual=True),
}


def tensors_of(config: EagleConfig) -> dict[str, Tensor]:
    wide = len(config.taps) * config.target_hidden
    return eagle_tensors(config) | {"mask_hidden": torch.randn(1, 1, wide, generator=torch.Generator().manual_seed(4))}


class Spy(ParallelEagle):
    """Records the logits [depth, V] of its guesses, and the texts."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[tuple[list[int], Tensor]] = []

    def _guess(self, growths: Sequence[TreeGrowth]) -> list[Tensor]:
        guesses = super()._guess(growths)
        subset = self._net.subset
        assert subset
        for growth, rows in zip(growths, guesses, strict=True):
            self.seen.append((list(growth.ask.token_ids), torch.stack([subset.widen(row) for row in rows])))
        return guesses


@pytest.mark.parametrize("name", CONFIGS)
def test_every_guess_is_the_plain_heads(name: str) -> None:
    """Check a ragged batch, over rounds that replace guessed states with true states."""
    config = CONFIGS[name]
    tensors = tensors_of(config)
    spy, plain = Spy(config, tensors, TOY), Reference(config, tensors, TOY)
    samplings = [Sampling(max_new_tokens=8, temperature=t, seed=2) for t in (0.0, 1.0, 3.0)]
    run_together(Engine(TOY, spy, DraftBudget(8, 4, 2)), [PROMPT, [3, 4], PROMPT * 3], samplings)
    assert {len(rows) for _, rows in spy.seen} >= {4}
    mask = plain.fuse(tensors["mask_hidden"][0].double())
    for text, rows in spy.seen[::3]:
        known = plain.fuse(plain.features(text[:-1]))
        for ahead, row in enumerate(rows):
            hidden = torch.cat([known, mask.expand(ahead, -1)])
            _, states = plain.layer([*text[1:], *[config.mask_token] * ahead], hidden)  # type: ignore[list-item]
            torch.testing.assert_close(row, plain.logits(states[-1]), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_it_keeps_the_contract() -> None:
    check_drafter(lambda: ParallelEagle(CONFIGS["plain"], tensors_of(CONFIGS["plain"]), TOY))


@pytest.mark.parametrize("shape", [DraftBudget.chain(5), DraftBudget(12, 4, 3)], ids=["chain", "tree"])
def test_the_text_does_not_depend_on_the_drafter(shape: DraftBudget) -> None:
    drafter = ParallelEagle(CONFIGS["normed"], tensors_of(CONFIGS["normed"]), TOY)
    samplings = [Sampling(max_new_tokens=12, temperature=t, seed=2) for t in (0.0, 1.0)]
    replies = run_together(Engine(TOY, drafter, shape), [PROMPT] * 2, samplings)
    assert [reply[0] for reply in replies] == [run(TOY, PROMPT, sampling)[0] for sampling in samplings]
    assert all(stats.drafted for _, _, stats in replies)


def test_speculators_layout(tmp_path: Path) -> None:
    made = replace(EAGLE3, mask_token=63)
    config = speculators("peagle", mask_token_id=63, draft_vocab_size=16, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    config |= {"norm_output": True, "fc_norm": True}
    tensors = dict(head_of(made).tensors) | {"embed_tokens.weight": torch.ones(64, 32)}
    read = open_head(folder_of(tmp_path / "a", config, tensors))
    assert (read.layout, read.config) == ("speculators", made)
    with pytest.raises(CorruptModel, match="lacks mask_hidden"):
        open_head(folder_of(tmp_path / "b", config, dict(head_of(EAGLE3).tensors)))
    with pytest.raises(CorruptModel, match="lacks mask_token_id"):
        open_head(folder_of(tmp_path / "c", config | {"mask_token_id": None}, tensors))
    with pytest.raises(InvalidOption, match="P-EAGLE"):
        write_head(tmp_path / "d", head_of(made))
    beyond = replace(CONFIGS["plain"], mask_token=37)
    with pytest.raises(CorruptModel, match="mask token 37 is outside its vocabulary of 37"):
        ParallelEagle(beyond, tensors_of(beyond), TOY)
