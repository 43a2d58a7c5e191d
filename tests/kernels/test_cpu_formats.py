"""GGUF's types in their native formats: packed, unpacked and multiplied."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import CorruptModel
from paceline.files.reading import map_file
from paceline.kernels.cpu.build import library
from paceline.kernels.cpu.matrix import INT8, IQ4_NL, NativeGated, NativeLinear, fewest_bits
from paceline.kernels.quantize import quantize, round_activations
from paceline.kernels.stored import FLOATS, Format, Stored
from tests.support.gguf_blocks import HALVES, number, random_blocks, stored

pytestmark = [
    pytest.mark.skipif(library() is None, reason="there is no C++ compiler"),
    pytest.mark.usefixtures("kernels"),
]


def near(y: Tensor, weight: Tensor, x: Tensor) -> bool:
    rows = round_activations(x).values(x.shape[-1]).double()
    size = weight.double().abs() + 2 * weight.double().abs().amax(1, keepdim=True)
    return bool(((y.double() - rows @ weight.double().T).abs() <= 2e-6 * (rows.abs() @ size.T)).all())


@pytest.mark.parametrize("kind", HALVES)
def test_weights_are_ggufs_own_to_the_bit(kind: str) -> None:
    for out, width in ((1, 256), (37, 512)):
        matrix, weight = stored(kind, out, width)
        ours = NativeLinear(matrix, None).matrix
        assert torch.equal(ours.weight(), weight)
        some = torch.tensor([[out - 1, 0], [out // 2, 0]])
        assert torch.equal(ours.rows(some), weight[some])


@pytest.mark.parametrize("kind", HALVES)
def test_a_weight_costs_hardly_more_bits_than_in_the_file(kind: str) -> None:
    size, count = gguf.GGML_QUANT_SIZES[number(kind)]
    limit = {"Q4_1": 5.0}.get(kind, 8 * count / size + 0.15)
    matrix = NativeLinear(stored(kind, 64, 1024)[0], None).matrix
    assert 8 * matrix.nbytes / (64 * 1024) <= limit


@pytest.mark.parametrize("kind", HALVES)
def test_products_equal_float64_with_the_same_bits_anywhere(kind: str) -> None:
    matrix, weight = stored(kind, 37, 512)
    ours = NativeLinear(matrix, None)
    for count in (1, 2, 3, 5, 8, 19):
        x = torch.randn(count, 512, generator=torch.Generator().manual_seed(3))
        y = ours.precise(x)
        assert near(y, weight, x), count
        alone = torch.cat([ours.precise(row[None]) for row in x])
        assert torch.equal(y, alone), count


@pytest.mark.parametrize("kind", HALVES)
def test_extreme_codes_do_not_saturate(kind: str) -> None:
    """All bits of the weights are set, and all values of the rows are 127 or -127."""
    data = random_blocks(kind, 16, 256)
    count = gguf.GGML_QUANT_SIZES[number(kind)][1]
    for fill in (0, 255):
        blocks = torch.full_like(data, fill).view(-1, count)
        for at in HALVES[kind]:
            blocks[:, at : at + 2] = torch.tensor([0, 0x2C], dtype=torch.uint8)
        if kind == "MXFP4":
            blocks[:, 0] = 120
        rows = blocks.view(16, -1)
        weight = torch.from_numpy(gguf.dequantize(rows.numpy(), number(kind)))
        ours = NativeLinear(Stored.of(rows, int(number(kind)), 256), None)
        for height in range(1, 9):
            for x in (torch.ones(height, 256), -torch.ones(height, 256)):
                assert near(ours.precise(x), weight, x), height


def test_stacked_types_keep_their_own_bits() -> None:
    parts = [stored("Q4_K", 48, 256, 1), stored("Q6_K", 16, 256, 2), stored("Q4_K", 24, 256, 3)]
    weight, x = torch.cat([w for _, w in parts]), torch.randn(5, 256)
    bias = torch.randn(88)
    ours = NativeLinear(Stored.stack([part for part, _ in parts]), bias)
    assert len(ours.matrix.kinds) == 3
    assert torch.equal(ours.weight(), weight)
    assert torch.equal(ours.precise(x), torch.cat([NativeLinear(p, None).precise(x) for p, _ in parts], 1) + bias)


def test_types_that_meet_within_a_block_become_8_bits() -> None:
    parts = [stored("Q4_K", 24, 256, 1), stored("Q6_K", 24, 256, 2)]
    ours = NativeLinear(Stored.stack([part for part, _ in parts]), None)
    assert ours.matrix.kinds == (INT8,)
    weight = torch.cat([w for _, w in parts])
    assert (ours.weight() - weight).abs().max() < weight.abs().max() / 120


def test_floats_next_to_codes_of_the_kind_that_they_become() -> None:
    matrix, weight = stored("Q4_1", 32, 256)
    floats = Stored.floats(weight.half(), 4)
    ours = NativeLinear(Stored.stack([matrix, floats]), None).weight()
    assert torch.equal(ours[:32], weight)
    assert (ours[32:] - weight).abs().max() < weight.abs().max() / 15


def test_the_first_outputs_equal_the_outputs_of_the_whole() -> None:
    parts = [stored("Q4_K", 48, 256, 1)[0], stored("Q6_K", 16, 256, 2)[0]]
    whole, x = NativeLinear(Stored.stack(parts), torch.randn(64)), torch.randn(5, 256)
    for count, expected in ((32, 32), (64, 48)):  # rows of another type have their own kernels
        part = whole.first(count).precise(x)
        assert torch.equal(part, whole.precise(x)[:, :expected])


@pytest.mark.parametrize("kind", ["Q4_K", "F16"])
def test_pieces_are_packed_as_the_whole_and_their_pages_given_back(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = random_blocks("Q4_K", 1000, 2560) if kind == "Q4_K" else torch.randn(1000, 1000).half().view(torch.uint8)
    width = 2560 if kind == "Q4_K" else 1000
    whole = NativeLinear(replace(Stored.of(raw, int(number(kind)), width), target=torch.float16), None)
    (tmp_path / "rows").write_bytes(raw.numpy().tobytes())
    data = map_file(tmp_path / "rows").bytes(0, raw.numel()).view(raw.shape)
    order = torch.randperm(1000)
    matrix = replace(Stored.of(data, int(number(kind)), width, mapped=True), target=torch.float16)
    assert int(data.sum()) > 0
    before = resident(tmp_path / "rows")
    monkeypatch.setattr("paceline.kernels.cpu.matrix._PIECE", 1 << 16)
    ours = NativeLinear(matrix[order], None)
    assert torch.equal(ours.weight(), whole.weight()[order])
    if before is not None:
        assert before > raw.numel() * 0.9
        assert (resident(tmp_path / "rows") or 0) < 3 * mmap.PAGESIZE
    assert torch.equal(data, raw), "pages that were given back are read again"


def resident(path: Path) -> int | None:
    """Return the resident bytes of a mapped file, or None if the system does not report them."""
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        return None
    _, _, rest = maps.read_text().partition(str(path))
    return int(rest.partition("Rss:")[2].split()[0]) * 1024


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
@pytest.mark.parametrize("bits", [None, 8])
def test_floats_stacked_with_codes_become_8_bit_codes(kind: str, bits: int | None) -> None:
    """An adapter that changes one of several stacked projections leaves such matrices."""
    codes, weight = stored(kind, 48, 256, 1)
    other = torch.randn(32, 256, generator=torch.Generator().manual_seed(1)) / 16
    floats, x = Stored.floats(other, bits or torch.bfloat16), torch.randn(5, 256)
    for parts, weights in (([codes, floats], [weight, other]), ([floats, codes], [other, weight])):
        ours = NativeLinear(Stored.stack(parts), None)
        assert near(ours.precise(x), ours.weight(), x)
        for own, given in zip(ours.weight().split([len(w) for w in weights]), weights, strict=True):
            assert torch.equal(own, given if given is weight else quantize(given, 8).dequantised())


def test_gate_and_up_are_reordered_as_pointers() -> None:
    matrix, _ = stored("Q5_K", 64, 256)
    x = torch.randn(3, 256)
    whole = NativeLinear(matrix, None).precise(x)
    gate, up = whole.chunk(2, -1)
    torch.testing.assert_close(NativeGated(matrix, None, "silu")(x), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize(("kind", "width"), [("Q4_K", 288), ("Q4_0", 48)])
def test_widths_that_a_type_cannot_have_are_refused(kind: str, width: int) -> None:
    data = torch.zeros(16, 400, dtype=torch.uint8)
    with pytest.raises(CorruptModel, match=f"16 x {width}"):
        NativeLinear(Stored.of(data, int(number(kind)), width), None)
    with pytest.raises(CorruptModel, match="ggml type 99"):
        NativeLinear(Stored.of(data, 99, 256), None)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", HALVES)
def test_codes_are_requantised_to_fewer_bits_on_request(kind: str, bits: int) -> None:
    """The result is the same as for float values. Types with as few bits stay unchanged."""
    matrix, weight = stored(kind, 37, 512)
    fewer, own = NativeLinear(replace(matrix, target=bits, requantises=True), None), NativeLinear(matrix, None)
    if gguf.GGML_QUANT_SIZES[number(kind)][1] * 8 <= (bits + 1) * gguf.GGML_QUANT_SIZES[number(kind)][0]:
        assert fewer.matrix.kinds == own.matrix.kinds
        assert torch.equal(fewer.weight(), weight)
    else:
        assert fewer.matrix.nbytes < own.matrix.nbytes
        floats = replace(Stored.floats(weight, bits), requantises=True)
        assert torch.equal(fewer.weight(), NativeLinear(floats, None).weight())


def test_draft_models_have_the_nearest_of_values_that_are_not_evenly_spaced() -> None:
    if fewest_bits() != IQ4_NL:
        pytest.skip("these kernels have no byte dot products")
    weight = torch.randn(37, 208, generator=torch.Generator().manual_seed(0)) / 9
    weight[0, :40] = 0
    ours = NativeLinear(replace(Stored.floats(weight, 4), requantises=True), None)
    assert ours.matrix.kinds == (IQ4_NL,)
    error, fours = ((x - weight).square().mean() for x in (ours.weight(), quantize(weight, 4).dequantised()))
    assert error < 1.25 * fours
    packed = ours.matrix._parts[0][2]
    scales = packed.view(3, 7, 18 * 16)[..., 16 * 16 :].contiguous().view(torch.float16)  # [blocks, groups, lanes]
    scale = scales.float().transpose(1, 2).flatten(0, 1)[:37, :, None]
    table = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
    groups = F.pad(weight, (0, 16)).unflatten(1, (-1, 32))
    nearest = (groups[..., None] - scale[..., None] * table).abs().amin(-1).flatten(1)[:, :208]
    torch.testing.assert_close((weight - ours.weight()).abs(), nearest)


def test_stacked_types_become_one_where_fewer_bits_are_asked() -> None:
    parts = [stored("Q5_0", 24, 256, 1)[0], stored("Q8_0", 24, 256, 2)[0]]
    ours = NativeLinear(Stored.stack([replace(part, target=4, requantises=True) for part in parts]), None)
    assert ours.matrix.kinds == (fewest_bits(),)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", [*FLOATS, 8, 4])
def test_floats_are_packed_as_torch_would(dtype: torch.dtype, form: Format) -> None:
    for out, width in ((16, 32), (130, 208), (5, 48), (17, 37)):
        weight = (torch.randn(out, width, generator=torch.Generator().manual_seed(out)) / 9).to(dtype)
        weight[0, :20] = 0
        ours = NativeLinear(Stored.floats(weight, form), None).weight()
        if isinstance(form, torch.dtype):
            assert ours.dtype == form
            assert torch.equal(ours, weight.to(form))
        else:  # a fit may end elsewhere where sums round otherwise
            codes = quantize(weight, form).dequantised()
            assert (ours == codes).float().mean() > 0.98
            error, least = ((x - weight.float()).square().mean() for x in (ours, codes))
            assert error <= 1.001 * least
