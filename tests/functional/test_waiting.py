"""On a GPU every number that Python reads stalls the queue. Here such a read is an error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.functional import (
    TreeConfig,
    append,
    attention_bias,
    from_choices,
    from_heads,
    gather_kv_,
    grow,
    inputs,
    sample,
    verify_greedy,
    verify_rejection,
    verify_sampling,
)

AWAITED = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")


class NoWaiting(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        assert func.__name__.split(".")[0] not in AWAITED, f"{func} waits for the device"
        return func(*args, **kwargs or {})


def test_a_round_never_waits_but_where_it_says_so() -> None:
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(0))
    root, lengths = table[:3], torch.tensor([4, 2, 7])
    config = TreeConfig(3, 3, 8, 0.01)
    cache = torch.zeros(3, 2, 20, 4)
    with NoWaiting():
        from_heads(table.view(3, 3, 9), config)
        from_choices(table.view(3, 3, 9), [(0, 1, 0), (2,)])
        tree = grow(lambda level: table[level.tokens], root, config)
        drawn, q = sample(lambda level: table[level.tokens], root, config)
        attention_bias(tree, lengths, 20)
        logits = table[inputs(tree, lengths)]
        verify_sampling(tree, logits, temperature=0.7)
        verify_rejection(drawn, logits, q)
        accepted = verify_greedy(tree, logits).cut(lengths)
        gather_kv_(cache, lengths, accepted)
        with pytest.raises(AssertionError, match="waits"):
            append(torch.zeros(3, 9, dtype=torch.int64), lengths, accepted)
