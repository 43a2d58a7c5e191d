"""The Muon optimizer, which orthogonalises the momentum of matrices, in blocks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 256
"""Rows that are orthogonalised together. For a matrix of 1536 rows, one block of all rows costs six times as much. On a
CPU, that is more than the gradients of a small batch cost."""

_STEP = (3.4445, -4.775, 2.0315)
"""Coefficients of a Newton-Schulz step (Jordan et al. 2024). Five steps raise singular values of 0.01 to about 1."""


def orthogonalise(matrix: Tensor) -> Tensor:
    """Approximate the nearest matrix [M, N], M <= N, with orthonormal rows, in bfloat16."""
    a, b, c = _STEP
    x: Tensor = (matrix / matrix.norm().clamp(min=1e-7)).bfloat16()
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) with Nesterov's momentum over blocks of rows (arXiv 2510.16981).

    Updates are scaled to the size of AdamW's updates (Moonlight, arXiv 2502.16982), so that both can use the same rate.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, matrix.grad, group["lr"], group["momentum"])

    def _update(self, matrix: Tensor, grad: Tensor, rate: float, momentum: float) -> None:
        mean = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
        mean.lerp_(grad, 1 - momentum)
        ahead = grad.lerp(mean, momentum)
        for part, block in zip(matrix.split(BLOCK), ahead.split(BLOCK), strict=True):
            wide = block.T if len(block) > block.shape[1] else block
            update = orthogonalise(wide)
            update = update.T if wide is not block else update
            part.add_(update.to(part), alpha=-0.2 * rate * max(part.shape) ** 0.5)
