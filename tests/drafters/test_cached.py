"""Hidden states that wait until a draft needs them."""

from __future__ import annotations

import random

import torch

from paceline.drafters.cached import PendingStates

TAPS = (2, 5, 9)


@torch.inference_mode()
def test_states_come_out_in_order_whatever_rounds_kept() -> None:
    """Rounds that kept row 0 alone are joined later than the others, and must not be overtaken."""
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
