"""On a GPU, every number that Python reads stalls the queue. Tensors on the device "meta" have no numbers to read."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from paceline.functional import (
    Accepted,
    CandidateTree,
    TreeConfig,
    append,
    attention_bias,
    gather_kv_,
    grow,
    inputs,
    paths,
    positions,
    verify_greedy,
)

T = TypeVar("T", Accepted, CandidateTree)


def unreadable(batch: T) -> T:
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)}
    return replace(batch, **{name: tensor.to("meta") for name, tensor in tensors.items()})


def test_only_growth_verification_and_append_wait_for_the_device() -> None:
    table = torch.randn(9, 9, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([4, 2, 7])
    tree = grow(lambda level: table[level.tokens], table[:3], TreeConfig(3, 3, 8, 0.01))
    accepted = unreadable(verify_greedy(tree, table[inputs(tree, lengths)]))
    tree, lengths = unreadable(tree), lengths.to("meta")
    positions(tree, lengths)
    inputs(tree, lengths)
    paths(tree)
    attention_bias(tree, lengths, 20)
    gather_kv_(torch.zeros(3, 2, 20, 4, device="meta"), lengths, accepted.cut(lengths))
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        append(torch.zeros(3, 9, dtype=torch.int64, device="meta"), lengths, accepted)
