"""Hidden states that are stored until a draft needs them."""

from __future__ import annotations

import random

import torch

from paceline.drafters.cached import PendingStates

TAPS = (2, 5, 9)


@torch.inference_mode()
def test_states_come_out_in_order_whatever_rounds_kept() -> None:
    """Rounds that keep only row 0 are merged later than others, but must stay in order."""
    dice, pending, expected = random.Random(0), PendingStates(), list[torch.Tensor]()
    for _ in range(300):
        count = dice.choice((2, 2, 2, 4, 20))
        out = {tap: torch.randn(count, 8) for tap in TAPS}
        path = dice.choice(((), (), (), (1,), (1, 3) if count > 3 else (), None))
        pending.add(TAPS, out, path)
        expected += [
            torch.cat([out[tap][row] for tap in TAPS]) for row in ([*range(count)] if path is None else [0, *path])
        ]
        assert len(pending) == len(expected)
        number = dice.randint(1, len(expected))
        if dice.random() < 0.05:
            assert torch.equal(torch.cat(pending.first(number).parts), torch.stack(expected[:number]))
        if dice.random() < 0.05:
            assert torch.equal(pending.take(number), torch.stack(expected[:number]))
            expected = expected[number:]


def test_only_a_few_small_passes_are_kept() -> None:
    """A view keeps the memory of its whole pass."""
    pending = PendingStates()
    for _ in range(100):
        pending.add(TAPS, {tap: torch.zeros(2, 8) for tap in TAPS}, ())
        assert len(pending._uncopied) < 16
    large = {tap: torch.zeros(64, 2, 4096)[0] for tap in TAPS}
    pending.add(TAPS, large, ())
    assert pending.parts[-1].untyped_storage().nbytes() == 3 * 4096 * 4
