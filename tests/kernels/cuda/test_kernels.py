"""The Triton kernels compared with plain formulas, in Triton's interpreter, or compiled if there is a GPU.

torch's CPU builds have no Triton. Its interpreter does not support bfloat16 products, so it runs float16 instead.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.cache.attention import LayerAttention
from paceline.engine.self_check import guarantee
from paceline.kernels.cuda.cache import DeviceCache, reference
from paceline.kernels.cuda.table import SPLIT, RowTable
from paceline.kernels.linear import FixedTile
from paceline.models.cuda_decoder import DeviceDecoder
from paceline.testing import TINY, random_tensors
from paceline.types import Draft
from paceline.verify.tree import pack

GPU = torch.cuda.is_available()
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")
if not GPU and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
    pytest.skip("Triton's interpreter makes scalars as NumPy before 2.4 did", allow_module_level=True)
kernels = pytest.importorskip("paceline.kernels.cuda.kernels")

DEVICE = torch.device("cuda" if GPU else "cpu")
HEADS, KV, D, PLACES = 6, 2, 16, 3
TREE = Draft((1, 2, 3, 4, 5, 6), (0, 0, 1, 1, 2, 5))
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
HALF = torch.bfloat16 if GPU else torch.float16


def table_of(drafts: list[Draft], lengths: list[int], places: list[int]) -> RowTable:
    rows = pack([1] * len(drafts), drafts, list(range(len(drafts))), lengths, DEVICE)
    table = RowTable(*rows.tokens.shape, rows.tokens.shape[1], DEVICE)
    table.fill(rows, places)
    return table


def slab(capacity: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, PLACES, KV, capacity, D, generator=generator).to(DEVICE, dtype)
    return keys, values


def queries(table: RowTable, dtype: torch.dtype) -> torch.Tensor:
    """Return queries as a view, as in the decoder: there are keys between the heads of two rows."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(table.slots, table.rows, HEADS + KV, D, generator=generator)
    return wide.to(DEVICE, dtype)[:, :, :HEADS]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    "how",
    [LayerAttention(0.3), LayerAttention(0.3, window=290), LayerAttention(0.3, window=20, softcap=3.0)],
    ids=["all", "window", "window and softcap"],
)
def test_rows_see_what_the_plain_formula_sees(how: LayerAttention, dtype: torch.dtype) -> None:
    table = table_of([TREE, Draft.chain((1, 2, 3))], [SPLIT - 2, 2 * SPLIT + 1], [2, 0])
    q, (keys, values) = queries(table, dtype), slab(1024, dtype)
    ours = kernels.tree_attention(q, keys, values, table, how)
    torch.testing.assert_close(ours, reference(q, keys, values, table, how), rtol=0, atol=TOLERANCE[dtype])


def test_a_ring_that_has_wrapped_is_read_in_the_order_of_positions() -> None:
    table = table_of([TREE], [1022], [1])
    q, (keys, values) = queries(table, torch.float32), slab(768, torch.float32)
    how = LayerAttention(0.3, window=200)
    ours = kernels.tree_attention(q, keys, values, table, how)
    torch.testing.assert_close(ours, reference(q, keys, values, table, how), rtol=0, atol=1e-5)


def test_unseen_rows_may_be_anything() -> None:
    """There is garbage after the rows, and in the rows of other branches."""
    table = table_of([TREE], [SPLIT - 3], [1])
    q, (keys, values) = queries(table, torch.float32), slab(512, torch.float32)
    before = kernels.tree_attention(q, keys, values, table, LayerAttention(0.3))
    for x in (keys, values):
        x[1, :, SPLIT - 3 + 7 :] = torch.nan
        x[1, :, SPLIT - 3 + 2] = torch.nan
        x[0], x[2] = torch.nan, torch.nan
    after = kernels.tree_attention(q, keys, values, table, LayerAttention(0.3))
    unrelated = [0, 1, 3, 4]
    assert torch.equal(after[0, unrelated], before[0, unrelated])
    assert after[0, [2, 5, 6]].isnan().all()


def test_a_rows_bits_depend_only_on_its_path() -> None:
    """Feed a path token by token, as a chain, as a branch of a tree, and together with another slot."""
    length, path = SPLIT - 2, [0, 1, 2, 3]
    keys, values = slab(768, HALF)
    chain = table_of([Draft.chain((1, 2, 3))], [length], [1])
    q = queries(chain, HALF)
    how = LayerAttention(0.3)
    whole = kernels.tree_attention(q, keys, values, chain, how)
    for row in path:
        plain = table_of([Draft()], [length + row], [1])
        alone = kernels.tree_attention(q[:, [row] * 4], keys, values, plain, how)
        assert torch.equal(alone[0, 0], whole[0, row]), "plain decoding"
    # The same keys, with rows 1 to 3 moved to rows 2, 4 and 6 of a tree, and everything moved to another slot.
    tree = table_of([Draft((5, 9), (0, 0)), Draft((9, 1, 9, 2, 9, 3), (0, 0, 2, 2, 4, 4))], [400, length], [1, 2])
    places = [length + 2 * row for row in path]
    for x in (keys, values):
        x[2] = x[1]
        x[2][:, places] = x[1][:, length : length + 4]
    beside = queries(tree, HALF).clone()
    beside[1, [0, 2, 4, 6]] = q[0, path]
    assert torch.equal(kernels.tree_attention(beside, keys, values, tree, how)[1, [0, 2, 4, 6]], whole[0, path])


SIZES = (2, 40, 200), (70, 200), (70,), (2, 40, 70)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_fixed_product_is_the_product(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, residual = (torch.randn(size, generator=generator).to(DEVICE, dtype) for size in SIZES)
    product = FixedTile(weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    scale = TOLERANCE[dtype] * 20
    torch.testing.assert_close(product(x).double(), exact, rtol=TOLERANCE[dtype], atol=scale)
    torch.testing.assert_close(product.onto(x, residual), residual + product(x), rtol=0, atol=0)
    torch.testing.assert_close(
        FixedTile(weight, None)(x).double(), exact - bias.double(), rtol=TOLERANCE[dtype], atol=scale
    )
    assert product.weight() is weight


def test_a_rows_product_is_the_same_among_any_number_of_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 160, generator=generator).to(DEVICE, HALF) for n in (150, 48))
    product = FixedTile(weight, None)
    whole = product(x)
    for count in (1, 2, 7, 16, 63, 64, 65):
        assert torch.equal(product(x[:count]), whole[:count])
        assert torch.equal(product(x[-count:]), whole[-count:])


def test_the_exact_decoder_passes_the_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains, trees and other requests in the batch all give the logits of plain decoding bit for bit."""
    monkeypatch.setattr("paceline.kernels.cuda.cache.attend", kernels.tree_attention)
    monkeypatch.setattr(DeviceCache, "initial_capacity", 64)
    config = replace(TINY, layers=1)
    target = DeviceDecoder(config, random_tensors(config), HALF, DEVICE, exact=True, capture=None)
    assert guarantee(target) == "bits"
