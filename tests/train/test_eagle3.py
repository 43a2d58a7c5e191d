import pytest
import torch

from paceline.drafters.eagle import Eagle
from paceline.engine.engine import Engine
from paceline.models.eagle import EagleNetwork
from paceline.sampling.parameters import Sampling
from paceline.testing import run
from paceline.train.eagle3 import default_taps
from paceline.train.loop import Trainer, TrainPlan
from paceline.train.states import States
from paceline.types import Draft, DraftBudget
from paceline.verify.tree import pack, pack_prefix
from tests.support.train_toys import TAPS, TARGET, documents, recipe, selection, trainer, written


@pytest.mark.parametrize("flags", [{}, {"norm_output": True}])
def test_training_equals_decoding(flags: dict[str, bool]) -> None:
    """Compare the head in training with the head in drafting, for every step at every position."""
    made = recipe(steps=4, **flags)
    for parameter in made.module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    (batch,) = States(TARGET, selection(documents(3)), TAPS).batches(0, 3, "")
    tensors = {n: p.detach().double() for n, p in made.module.named_parameters()} | {
        "d2t": torch.arange(37)[-30:] - torch.arange(30)
    }
    network = EagleNetwork(made.config, tensors, TARGET)
    pending = torch.stack([batch.prompts - 1, batch.prompts + 2], 1)
    with torch.no_grad():
        steps = made.module(TARGET.embed(batch.tokens).float(), made.module.fuse(batch), pending, 4)
    for b in range(3):
        text = batch.tokens[b].tolist()
        for p, at in enumerate(pending[b].tolist()):
            features = network.fuse(torch.cat([batch.states[tap][b] for tap in TAPS], -1))
            cache = network.new_cache()
            slot = cache.acquire()
            rows = pack_prefix(text[1 : at + 1], slot, 0, TARGET.device)
            hidden, out = network.step(rows, _padded(features[:at], rows.tokens.shape[1]), cache)
            last = at - 1
            for step in range(4):
                torch.testing.assert_close(steps[step][b, p].double(), out[0, last], atol=1e-4, rtol=1e-4)
                cache.commit(rows, [range(1, last + 1)])
                rows = pack([text[at + 1 + step]], [Draft()], [slot], [at + step], TARGET.device)
                hidden, out = network.step(rows, _padded(hidden[0, last : last + 1], rows.tokens.shape[1]), cache)
                last = 0


def _padded(hidden: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.cat([hidden, hidden[-1:].expand(rows - len(hidden), -1)])[None]


@pytest.mark.slow
def test_a_trained_head_drafts_as_well_as_training_said(tmp_path) -> None:
    made = recipe(steps=3, vocabulary=37)
    texts = written(16, seed=0)
    # Train on the same texts, because a random model's texts are otherwise unpredictable.
    states = States(TARGET, selection(texts), TAPS)
    plan = TrainPlan(epochs=40, batch=8, rate=1e-2, every=1e9, evaluate=1e9)
    said = Trainer(made, states, states, plan, tmp_path, "toy").run().acceptance
    assert said is not None
    assert said > 2  # chance would give 1.03
    drafter = Eagle(made.config, made.tensors(), TARGET)
    engine = Engine(TARGET, drafter, DraftBudget.chain(3))
    rounds = tokens = 0
    for document in texts:
        reply, _, stats = run(TARGET, document.prompt, Sampling(max_new_tokens=24), engine=engine)
        assert tuple(reply) == document.answer
        rounds, tokens = rounds + stats.rounds, tokens + stats.tokens
    assert tokens / rounds == pytest.approx(said, abs=0.15)


def test_a_trained_head_is_written_with_its_vocabulary(tmp_path) -> None:
    made = trainer(tmp_path)._recipe.tensors()
    assert torch.equal(made["d2t"] + torch.arange(30), torch.arange(7, 37))
    assert made["t2d"].nonzero()[:, 0].tolist() == list(range(7, 37))
    assert made["lm_head.weight"].dtype == torch.bfloat16


def test_taps_are_early_middle_and_late() -> None:
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(2) == (1, 1, 0)
