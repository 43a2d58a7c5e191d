"""GGML's tensor types against a scalar reading of their definition, on random bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from paceline.checkpoints import gguf_file
from paceline.checkpoints.gguf_codes import BITS
from paceline.checkpoints.gguf_file import read_gguf
from paceline.kernels.quantize import GROUP
from tests.support.gguf_writing import finish

Q = gguf.GGMLQuantizationType
ROWS, COLUMNS = 6, 512


def half(block: bytes, at: int) -> float:
    return float(np.frombuffer(block, np.float16, 1, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def nibbles(data: bytes) -> list[int]:
    """All low halves, then all high ones."""
    return [byte & 15 for byte in data] + [byte >> 4 for byte in data]


def five_bits(high: bytes, data: bytes) -> list[int]:
    bits = int.from_bytes(high, "little")
    return [low + 16 * (bits >> i & 1) for i, low in enumerate(nibbles(data))]


def q4_0(b: bytes) -> list[float]:
    return [half(b, 0) * (q - 8) for q in nibbles(b[2:])]


def q4_1(b: bytes) -> list[float]:
    return [half(b, 0) * q + half(b, 2) for q in nibbles(b[4:])]


def q5_0(b: bytes) -> list[float]:
    return [half(b, 0) * (q - 16) for q in five_bits(b[2:6], b[6:])]


def q5_1(b: bytes) -> list[float]:
    return [half(b, 0) * q + half(b, 2) for q in five_bits(b[4:8], b[8:])]


def q8_0(b: bytes) -> list[float]:
    return [half(b, 0) * signed(q) for q in b[2:]]


def scale_and_minimum(packed: bytes, j: int) -> tuple[int, int]:
    """Six bits each for eight parts, in twelve bytes."""
    if j < 4:
        return packed[j] & 63, packed[j + 4] & 63
    return packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4


def q4_k(b: bytes, fifth: Callable[[int, int], int] = lambda part, i: 0, quants: int = 16) -> list[float]:
    values = []
    for part in range(8):
        scale, minimum = scale_and_minimum(b[4:16], part)
        for i in range(32):
            q = b[quants + part // 2 * 32 + i] >> 4 * (part % 2) & 15 | fifth(part, i) << 4
            values.append(half(b, 0) * scale * q - half(b, 2) * minimum)
    return values


def q5_k(b: bytes) -> list[float]:
    return q4_k(b, lambda part, i: b[16 + i] >> part & 1, 48)


def q6_k(b: bytes) -> list[float]:
    low, high, scales = b[:128], b[128:192], b[192:208]
    values = []
    for at in range(256):
        side, quarter, i = at // 128, at % 128 // 32, at % 32
        four = low[64 * side + 32 * (quarter % 2) + i] >> 4 * (quarter // 2) & 15
        q = (four | (high[32 * side + i] >> 2 * quarter & 3) << 4) - 32
        values.append(half(b, 208) * signed(scales[at // 16]) * q)
    return values


# Type -> (reading of a block, where in it float16 scales stand).
BLOCKS = {
    Q.Q4_0: (q4_0, (0,)),
    Q.Q4_1: (q4_1, (0, 2)),
    Q.Q5_0: (q5_0, (0,)),
    Q.Q5_1: (q5_1, (0, 2)),
    Q.Q8_0: (q8_0, (0,)),
    Q.Q4_K: (q4_k, (0, 2)),
    Q.Q5_K: (q5_k, (0, 2)),
    Q.Q6_K: (q6_k, (208,)),
}


def store(path: Path, data: np.ndarray, kind: Q) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", data, raw_dtype=kind)
    finish(writer)


def random_blocks(kind: Q) -> np.ndarray:
    """Bytes [ROWS, bytes of a row], every bit random but the scales, which are finite."""
    size, width = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(int(kind))
    blocks = random.integers(0, 256, (ROWS * COLUMNS // size, width), dtype=np.uint8)
    for at in BLOCKS[kind][1]:
        scales = random.normal(size=(len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(ROWS, -1)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("piece", [1 << 18, 1024, 1], ids=["whole", "in pieces", "block by block"])
def test_blocks_mean_what_the_format_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Q, piece: int) -> None:
    raw = random_blocks(kind)
    store(tmp_path / "t.gguf", raw, kind)
    monkeypatch.setattr(gguf_file, "_CHUNK_ELEMENTS", max(piece, gguf.GGML_QUANT_SIZES[kind][0]))
    tensor = read_gguf(tmp_path / "t.gguf").tensors["t"]
    tensor.check()
    width = gguf.GGML_QUANT_SIZES[kind][1]
    expected = [value for block in raw.reshape(-1, width) for value in BLOCKS[kind][0](block.tobytes())]
    values = tensor.read()
    assert (tensor.kind, tensor.shape, values.dtype) == (kind.name, (ROWS, COLUMNS), torch.float32)
    assert np.allclose(values.flatten().numpy(), expected, rtol=1e-6, atol=2e-4 if kind in KS else 1e-6)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_codes_stand_for_the_values_of_the_gguf_library(tmp_path: Path, kind: Q) -> None:
    """To the bit where a group's scale and offset are float16 in the file, else up to their rounding."""
    store(tmp_path / "t.gguf", random_blocks(kind), kind)
    tensor = read_gguf(tmp_path / "t.gguf").tensors["t"]
    codes, values = tensor.codes(), torch.from_numpy(gguf.dequantize(random_blocks(kind), kind))
    assert codes is not None
    assert codes.shape == (ROWS, COLUMNS)
    assert codes.bits == (4 if kind in (Q.Q4_0, Q.Q4_1, Q.Q4_K) else 8)
    assert codes.bits == BITS.get(kind.name, 8)
    if kind in KS:
        # Float16 moves scale and offset by 2^-11 of themselves; Q6_K, in groups of 16, is quantised anew.
        groups = values.unflatten(1, (-1, GROUP))
        offset = torch.zeros_like(codes.scale) if codes.offset is None else codes.offset
        reach = groups.abs().amax(-1) + 2 * offset.float().abs()
        error = (codes.dequantised() - values).unflatten(1, (-1, GROUP)).abs().amax(-1)
        assert bool((error <= reach / (250 if kind == Q.Q6_K else 2000)).all())
    else:
        assert torch.equal(codes.dequantised(), values)


def test_types_equal_the_gguf_library() -> None:
    for kind in gguf_file._TYPES.values():
        theirs = Q(kind.number)
        assert (kind.name, (kind.elements, kind.size)) == (theirs.name, gguf.GGML_QUANT_SIZES[theirs])


def test_floats_have_no_codes(tmp_path: Path) -> None:
    store(tmp_path / "t.gguf", torch.randn(ROWS, COLUMNS).numpy(), Q.F32)
    assert read_gguf(tmp_path / "t.gguf").tensors["t"].codes() is None


def test_a_part_of_a_stack_keeps_its_codes(tmp_path: Path) -> None:
    store(tmp_path / "t.gguf", random_blocks(Q.Q4_1).reshape(3, 2, -1), Q.Q4_1)
    whole = read_gguf(tmp_path / "t.gguf").tensors["t"]
    for index in range(3):
        codes = whole.part(index).codes()
        assert codes is not None
        assert torch.equal(codes.dequantised(), whole.read()[index])


KS = (Q.Q4_K, Q.Q5_K, Q.Q6_K)


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16], ids=lambda kind: kind.name)
def test_plain_types_keep_their_bits(tmp_path: Path, kind: Q) -> None:
    values = torch.randn(ROWS, COLUMNS)
    dtype = {Q.F32: torch.float32, Q.F16: torch.float16, Q.BF16: torch.bfloat16}[kind]
    raw = values.to(dtype)
    data = raw.view(torch.uint8).numpy() if kind == Q.BF16 else raw.numpy()
    store(tmp_path / "t.gguf", data, kind)
    read = read_gguf(tmp_path / "t.gguf").tensors["t"].read()
    assert read.dtype == dtype
    assert torch.equal(read, raw)


def test_only_a_part_of_a_stack_is_read(tmp_path: Path) -> None:
    raw = random_blocks(Q.Q4_K).reshape(3, 2, -1)
    store(tmp_path / "t.gguf", raw, Q.Q4_K)
    whole = read_gguf(tmp_path / "t.gguf").tensors["t"]
    assert whole.shape == (3, 2, COLUMNS)
    for index in range(3):
        part = whole.part(index)
        assert part.shape == (2, COLUMNS)
        assert torch.equal(part.read(), whole.read()[index])


def test_a_file_that_is_held_is_not_read_again(tmp_path: Path) -> None:
    store(tmp_path / "t.gguf", random_blocks(Q.Q8_0), Q.Q8_0)
    first = read_gguf(tmp_path / "t.gguf")
    assert read_gguf(tmp_path / "t.gguf") is first
    (tmp_path / "t.gguf").unlink()
    store(tmp_path / "t.gguf", random_blocks(Q.Q4_0), Q.Q4_0)
    assert read_gguf(tmp_path / "t.gguf").tensors["t"].kind == "Q4_0"
