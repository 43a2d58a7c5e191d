"""Products with a separate matrix for each head (the up-projections of latent attention)."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import OutOfMemory
from paceline.kernels.cpu.build import library
from paceline.kernels.cpu.matrix import NativeHeadLinear
from paceline.kernels.linear import HeadLinear, head_linear

pytestmark = [
    pytest.mark.skipif(library() is None, reason="there is no C++ compiler"),
    pytest.mark.usefixtures("kernels"),
]
PRECISION = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("shape", [(20, 512, 192), (3, 16, 20), (5, 48, 512)])
def test_each_head_is_multiplied_by_its_own_matrix(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=draw).to(dtype)
    x = torch.randn(2, 19, shape[0], shape[2], generator=draw).to(dtype)
    y, exact = head_linear(weight)(x), HeadLinear(weight.double())(x.double())
    assert y.shape == (2, 19, *shape[:2])
    assert float((y - exact).norm() / exact.norm()) < PRECISION[dtype]


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    product, x = head_linear(torch.randn(4, 32, 48)), torch.randn(1, 13, 4, 48)
    assert isinstance(product, NativeHeadLinear)
    whole = product(x)
    for count in (1, 3, 8):
        for first in range(0, 13, count):
            assert torch.equal(product(x[:, first : first + count]), whole[:, first : first + count])


def test_heads_that_do_not_fill_whole_lanes_are_multiplied_by_torch() -> None:
    assert isinstance(head_linear(torch.randn(4, 20, 16)), HeadLinear)
    assert isinstance(head_linear(torch.randn(4, 32, 16, dtype=torch.float64)), HeadLinear)


def test_inputs_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="48 elements per row, got 47"):
        head_linear(torch.randn(4, 32, 48))(torch.randn(1, 1, 4, 47))
    with pytest.raises(ValueError, match="4 heads, got 3"):
        head_linear(torch.randn(4, 32, 48))(torch.randn(1, 1, 3, 48))


def test_a_product_that_does_not_fit_into_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    product = head_linear(torch.randn(4, 32, 48))
    monkeypatch.setattr(product, "_run", lambda *_: 1)
    with pytest.raises(OutOfMemory, match="no memory for a matrix multiplication of 1 rows"):
        product(torch.randn(1, 1, 4, 48))
