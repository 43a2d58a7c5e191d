"""Chance for whole batches: temperatures, Gumbel noise, and draws from given probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.functional.candidates import is_number, require, within


def temperatures(temperature: float | Tensor, logits: Tensor) -> Tensor:
    """`temperature` as [B], one per request of `logits` [B, ...], in their dtype. Raises `InvalidOption`."""
    require(
        is_number(temperature) and within(temperature, 0.0, 1000.0) and not _between(temperature, 0.0, 1e-3),
        f"temperature={temperature!r} is out of range",
        "Give 0 for greedy or 0.001 to 1000, as one number or a tensor [B]",
    )
    batch = logits.shape[:1]
    if not isinstance(temperature, Tensor):
        return logits.new_full(batch, temperature)
    require(
        temperature.shape == batch,
        f"temperature has shape {[*temperature.shape]} for a batch of {batch[0]}",
        "Give one number, or a tensor [B]",
    )
    return temperature.to(logits)


def log_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """Log-probabilities of `logits` [B, ..., V] at `temperature` [B]; at 0 all is on the first highest."""
    heat = temperature.view(-1, *[1] * (logits.ndim - 1))
    greedy = heat == 0
    first = torch.full_like(logits, -torch.inf).scatter_(-1, logits.max(-1, keepdim=True).indices, 0.0)
    return torch.where(greedy, first, (logits / heat.masked_fill(greedy, 1.0)).log_softmax(-1))


def gumbel_like(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard Gumbel noise in the shape, dtype and place of `x`."""
    waits = torch.empty_like(x).exponential_(generator=generator)
    return -waits.clamp_min_(torch.finfo(x.dtype).tiny).log_()


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """int64 [B]: for each row of `probs` [B, V], which need not sum to 1, the token at `uniform` [B] of their sum."""
    edges = probs.cumsum(-1)
    token = torch.searchsorted(edges, uniform[:, None] * edges[:, -1:], right=True)[:, 0]
    # A uniform so near 1 that the product rounds to the sum itself.
    return torch.where(token < probs.shape[-1], token, probs.max(-1).indices)


def _between(value: float | Tensor, low: float, high: float) -> bool:
    inside = (value > low) & (value < high)
    return bool(inside.any() if isinstance(inside, Tensor) else inside)
