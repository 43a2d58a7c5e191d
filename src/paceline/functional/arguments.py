"""Checks of what callers pass in."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.errors import InvalidOption


def require(valid: bool, cause: str, fix: str) -> None:
    """Raise `InvalidOption` unless `valid`."""
    if not valid:
        raise InvalidOption(cause, fix)


def per_request(name: str, value: float | Tensor, batch: int, valid: Callable[[float], bool], fix: str) -> list[float]:
    """Return an option that is one number or a tensor [B] as `batch` numbers. Raises `InvalidOption`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    right = number or isinstance(value, Tensor) and value.shape == (batch,)
    values = value.tolist() if isinstance(value, Tensor) and right else [value] * batch
    require(
        right and all(map(valid, values)),
        f"{name} must be {fix}, got {value!r} for a batch of {batch}",
        f"Give one number, or a tensor [{batch}]",
    )
    return values


def temperatures(temperature: float | Tensor, batch: int) -> list[float]:
    """Return the temperature of each request; 0 is greedy. Raises `InvalidOption`."""
    return per_request("temperature", temperature, batch, lambda t: t == 0 or 1e-3 <= t <= 1e3, "0 or 0.001 to 1000")


def widen(logits: Tensor) -> Tensor:
    """Return `logits` in at least float32: half precisions tie too often and round sums away."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
