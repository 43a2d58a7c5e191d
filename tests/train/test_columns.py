"""A large draft vocabulary. A training batch scores only a part of it."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from paceline.train import recipe
from paceline.train.recipe import Columns, DraftPlaces, GuessTally, draft_loss

K, H, PLACES = 6000, 16, 40


@dataclass
class Fixed:
    """A teacher with given logits [PLACES, K]."""

    scores: torch.Tensor

    @property
    def vocabulary(self) -> torch.Tensor:
        return torch.arange(K)

    def score(self, *_: object, exact: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return self.scores[None], self.scores[None].argmax(-1)


def guess(x: torch.Tensor, head: torch.Tensor, scores: torch.Tensor, *, exact: bool) -> recipe.Guesses:
    real = torch.ones(1, 1, PLACES, dtype=torch.bool)
    places = DraftPlaces(torch.arange(PLACES)[None], real, torch.arange(PLACES))
    tally = GuessTally(Fixed(scores), None, places, 1.0, exact=exact)  # type: ignore[arg-type]
    tally.add(F.linear(x, tally.rows(head)))
    return tally.guesses()


def made() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return states, an output head, and the target's logits, which are similar but not equal."""
    generator = torch.Generator().manual_seed(0)
    x, head = torch.randn(PLACES, H, generator=generator), torch.randn(K, H, generator=generator)
    return x, head, x @ head.T * 0.5 + torch.randn(PLACES, K, generator=generator)


def test_a_part_of_the_vocabulary_gives_the_loss_and_the_gradient_of_all() -> None:
    x, head, scores = made()
    x.requires_grad_()
    whole = guess(x, head, scores, exact=True).loss
    (direction,) = torch.autograd.grad(whole, x)
    parts = []
    for seed in range(8):
        torch.manual_seed(seed)
        parts.append(guess(x, head, scores, exact=False).loss)
    mean = torch.stack(parts).mean()
    assert mean.item() == pytest.approx(whole.item(), rel=0.01)
    (found,) = torch.autograd.grad(mean, x)
    assert F.cosine_similarity(found.flatten(), direction.flatten(), dim=0) > 0.98


def test_the_loss_is_least_where_the_draft_is_the_targets_distribution() -> None:
    wanted = torch.tensor([[2.0, 1.0, -1.0], [0.0, 0.5, 3.0]])
    entropy = -(wanted.softmax(-1) * wanted.log_softmax(-1)).sum()
    assert draft_loss(wanted, wanted + 7).item() == pytest.approx(0.5 * entropy.item(), rel=1e-4)
    uniform = torch.zeros(2, 3)
    accepted = torch.minimum(wanted.softmax(-1), torch.tensor(1 / 3)).sum(-1)
    expected = 0.5 * 2 * torch.tensor(3.0).log() - accepted.log().sum()
    assert draft_loss(wanted, uniform).item() == pytest.approx(expected.item(), rel=1e-4)
    never = draft_loss(torch.tensor([[50.0, -50.0]]), torch.tensor([[-50.0, 50.0]], requires_grad=True))
    assert never.isfinite()


def test_the_targets_choices_are_always_among_the_columns_and_are_counted() -> None:
    _, _, scores = made()
    columns = Columns.of(scores)
    assert columns is not None
    assert len(columns.ids) == len(columns.ids.unique()) == len(columns.shift) < K // 2
    assert set(scores.topk(8).indices.flatten().tolist()) <= set(columns.ids[columns.shift == 0].tolist())
    stands_for = columns.shift.exp().sum().item()
    assert stands_for == pytest.approx(K)
    right = guess(scores, torch.eye(K), scores, exact=False)
    assert bool(right.right.all())


def test_a_small_vocabulary_is_scored_whole() -> None:
    assert Columns.of(torch.randn(4, 4000)) is None
    assert Columns.of(torch.randn(4000, 4096)) is None
