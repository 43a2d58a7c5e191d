"""All recipes except EAGLE-3's train exactly what their drafters compute."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from paceline.drafters.base import Drafter
from paceline.drafters.block import Block as BlockDrafter
from paceline.drafters.early_exit import EarlyExit as ExitDrafter
from paceline.drafters.medusa import Medusa as MedusaDrafter
from paceline.engine.engine import Engine
from paceline.models.config import NormConfig
from paceline.models.heads import BlockConfig, ExitConfig, MedusaConfig
from paceline.sampling.parameters import Sampling
from paceline.testing import run
from paceline.train.block import BlockRecipe, default_taps
from paceline.train.kinds import one_layer
from paceline.train.loop import Trainer, TrainPlan
from paceline.train.pointwise import Accuracy, EarlyExitRecipe, MedusaRecipe
from paceline.train.recipe import DraftPlaces, Recipe, Teacher
from paceline.train.states import States
from paceline.types import DraftBudget
from tests.support.dense_block import Dense
from tests.support.train_toys import TARGET, documents, selection, written

EVERY = torch.arange(37)
LAYER = replace(one_layer(TARGET.config, 48, 2), norms=NormConfig(heads="shared"))


def medusa() -> tuple[Recipe, type[Drafter]]:
    return MedusaRecipe(MedusaConfig(32, 37, 3, shared=True), TARGET, EVERY), MedusaDrafter


def early_exit() -> tuple[Recipe, type[Drafter]]:
    return EarlyExitRecipe(ExitConfig(32, 3, 16), TARGET, EVERY, 3, TARGET.config.norms.eps), ExitDrafter


def block() -> tuple[Recipe, type[Drafter]]:
    return BlockRecipe(BlockConfig(LAYER, (1, 2, 3), 4, mask_token=36), TARGET, EVERY), BlockDrafter


def block_with_markov_head() -> tuple[Recipe, type[Drafter]]:
    config = BlockConfig(LAYER, (1, 2, 3), 3, mask_token=36, from_anchor=True, draft_vocab=36, markov=8)
    return BlockRecipe(config, TARGET, EVERY[1:]), BlockDrafter


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "least"), [(medusa, 1.1), (early_exit, 1.3), (block, 2.0), (block_with_markov_head, 2.0)]
)
def test_a_trained_drafter_drafts_as_well_as_training_said(make, least: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    recipe, kind = make()
    texts = written(12, seed=0)
    states = States(TARGET, selection(texts), recipe.taps)
    plan = TrainPlan(epochs=60, batch=6, rate=1e-2, every=1e9, evaluate=1e9)
    said = Trainer(recipe, states, states, plan, tmp_path, "toy").run().acceptance
    assert said is not None
    assert said > least
    options = {"threshold": 0.0} if kind is ExitDrafter else {}
    engine = Engine(TARGET, kind(recipe.config, recipe.tensors(), TARGET, **options), DraftBudget.chain(3))
    rounds = tokens = 0
    for document in texts:
        reply, _, stats = run(TARGET, document.prompt, Sampling(max_new_tokens=24), engine=engine)
        assert tuple(reply) == document.answer
        rounds, tokens = rounds + stats.rounds, tokens + stats.tokens
    assert tokens / rounds == pytest.approx(said, abs=0.2)


def test_a_block_sees_in_training_what_it_sees_in_decoding() -> None:
    recipe, _ = block()
    for parameter in recipe.module.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
    (batch,) = States(TARGET, selection(documents(3)), recipe.taps).batches(0, 3, "")
    answered = DraftPlaces.of(batch, 3).every(4, 1)
    tensors = {n: p.detach().double() for n, p in recipe.module.named_parameters()}
    dense = Dense(recipe.config, tensors, TARGET)
    with torch.no_grad():
        states = recipe.module(batch, answered.pending, recipe._embedded(batch, answered.pending))
        logits = F.linear(states.double(), TARGET.head())
    for b in range(3):
        features = torch.cat([batch.states[tap][b] for tap in recipe.taps], -1)
        places = answered.pending[b][answered.real[0, b]].tolist()
        expected = dense(batch.tokens[b].tolist(), places, features)
        torch.testing.assert_close(logits[b, : len(places)], expected, atol=1e-3, rtol=1e-3)


def test_places_of_blocks_are_spread_and_keep_their_columns() -> None:
    (batch,) = States(TARGET, selection(documents(2)), ()).batches(0, 2, "")
    whole = DraftPlaces.of(batch, 3)
    some = whole.every(4, 2)
    assert torch.equal(some.pending, whole.pending[:, 2::4])
    assert some.columns.tolist() == list(range(2, whole.pending.shape[1], 4))


def test_a_teacher_that_knows_all_tokens_chooses_what_the_target_chooses() -> None:
    (batch,) = States(TARGET, selection(documents(2)), ("final",)).batches(0, 2, "")
    places = DraftPlaces.of(batch, 3)
    teacher = Teacher(TARGET, EVERY)
    exact, known = (teacher.score(batch, places, exact=exact)[1] for exact in (True, False))
    assert exact.shape == (2, places.pending.shape[1] + 2)
    assert torch.equal(known, exact)


def test_chances_of_a_place_are_smoothed_by_the_rate_of_its_depth_and_rank() -> None:
    accuracy = Accuracy()
    for _ in range(10):
        accuracy.add([0, 1], [2, 2])
    for _ in range(30):
        accuracy.add([1, 2], [2, 2])
    chance = accuracy.chances(doubt=20.0)
    assert chance((0,)) == pytest.approx(10 / 40)
    assert chance((0, 1)) == pytest.approx((10 + 20 * 10 / 40) / (10 + 20)), "of 40 tries at depth 2 and rank 1"
    assert chance((1, 1)) == pytest.approx((0 + 20 * 10 / 40) / (30 + 20))
    assert chance((2,)) == 0.0


def test_taps_of_blocks_leave_layers_spread_over_the_target() -> None:
    assert default_taps(30) == (2, 15, 28)
    assert default_taps(3) == (1, 2)
