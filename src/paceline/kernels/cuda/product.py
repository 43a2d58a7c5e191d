"""A matrix product whose rows do not depend on each other, for the exact mode."""

from __future__ import annotations

import torch
from torch import Tensor


class FixedTile:
    """A `kernels.linear.Linear` on CUDA: one tile shape for any number of rows (`kernels.fixed_product`)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.contiguous(), bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._run(x, None, x.dtype)

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._run(x, residual, x.dtype)

    def precise(self, x: Tensor) -> Tensor:
        return self._run(x, None, torch.promote_types(x.dtype, torch.float32))

    def weight(self) -> Tensor:
        return self._weight

    def _run(self, x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        from paceline.kernels.cuda.kernels import fixed_product

        added = None if residual is None else residual.reshape(-1, residual.shape[-1])
        y = fixed_product(x.reshape(-1, x.shape[-1]), self._weight, self._bias, added, dtype)
        return y.view(*x.shape[:-1], -1)
