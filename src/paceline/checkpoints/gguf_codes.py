"""The codes of GGUF's quantised types. They are kept as the file stores them. Only the scales of K-quants are converted
to floats.

Layouts: ggml's `ggml-common.h` and `ggml-quants.c`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.kernels.quantize import ZERO_POINT, Codes

_Parts = tuple[Tensor, Tensor, Tensor | None, int]
"""Codes [out, blocks, block], scale and offset [out, blocks, groups per block], bits."""


def gguf_codes(data: Tensor, kind: str, shape: tuple[int, ...]) -> Codes | None:
    """Decode the bytes of a matrix [out, in].

    The values of the codes equal `gguf.dequantize` bit for bit, except with K-quants, whose scales and offsets are
    rounded to float16.

    Args:
        data: Bytes of the matrix.
        kind: Name of the GGUF type.
        shape: Shape of the matrix.

    Returns:
        The codes, or None if the type is not supported or the tensor is not a matrix.
    """
    if kind not in _DECODERS or len(shape) != 2:
        return None
    bytes_of_block, decode = _DECODERS[kind]
    codes, scale, offset, bits = decode(data.view(shape[0], -1, bytes_of_block))
    return Codes(codes.flatten(1), scale.flatten(1), None if offset is None else offset.flatten(1), bits, shape[1])


def _q5_k(blocks: Tensor) -> _Parts:
    """Decode Q5_K. Bit j of the 32 bytes after the scales is the fifth bit of group j."""
    fifth = (blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    codes = _pairs(blocks[..., 48:]) + (fifth << 4) + ZERO_POINT[8]
    return codes.flatten(-2), *_scale_and_offset(blocks), 8


_DECODERS: dict[str, tuple[int, Callable[[Tensor], _Parts]]] = {
    "Q4_0": (18, lambda blocks: (_nibbles(blocks[..., 2:]), _half(blocks, 0), -8 * _half(blocks, 0), 4)),
    "Q4_1": (20, lambda blocks: (_nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2), 4)),
    # The zero point of Q5_0 is 16. Move it to the zero point of 8-bit codes.
    "Q5_0": (22, lambda blocks: (_five_bits(blocks[..., 2:]) + (ZERO_POINT[8] - 16), _half(blocks, 0), None, 8)),
    "Q5_1": (24, lambda blocks: (_five_bits(blocks[..., 4:]) + ZERO_POINT[8], _half(blocks, 0), _half(blocks, 2), 8)),
    "Q8_0": (34, lambda blocks: (blocks[..., 2:] ^ ZERO_POINT[8], _half(blocks, 0), None, 8)),
    "Q4_K": (144, lambda blocks: (_pairs(blocks[..., 16:]).flatten(-2), *_scale_and_offset(blocks), 4)),
    "Q5_K": (176, _q5_k),
}
"""Type -> size of a block in bytes, and the function that decodes blocks."""

BITS = {kind: 4 if kind.startswith("Q4") else 8 for kind in _DECODERS}
"""Type -> number of bits of the decoded codes. Five-bit types are decoded to eight bits."""


def pack_q4_1(codes: Codes) -> Tensor:
    """Return 4-bit codes as rows of Q4_1 blocks, bytes [out, blocks * 20]."""
    assert codes.offset is not None
    halves = torch.stack([codes.scale, codes.offset], -1).view(torch.uint8)
    low, high = codes.codes.unflatten(1, (-1, 2, 16)).unbind(2)
    return torch.cat([halves, low | high << 4], -1).flatten(1)


def _half(blocks: Tensor, start: int) -> Tensor:
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """Return the low 4 bits of all bytes, followed by the high 4 bits of all bytes."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _five_bits(packed: Tensor) -> Tensor:
    """Decode four bytes that hold the fifth bit of each code, followed by 16 bytes that hold the low 4 bits of two
    codes each."""
    fifth = (packed[..., :4, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return _nibbles(packed[..., 4:]) + (fifth.flatten(-2) << 4)


def _pairs(packed: Tensor) -> Tensor:
    """Decode bytes [..., 128] to 8 groups of 32 codes. Each run of 32 bytes holds one group in its low 4 bits, and the
    next group in its high 4 bits."""
    groups: Tensor = _nibbles(packed.unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)
    return groups


def _scale_and_offset(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and offsets of a K-quant's 8 groups. Each is one of the block's two float16 numbers times a
    6-bit number, whose bits are partly scattered."""
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scale = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], -1)
    offset = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], -1)
    return (_half(blocks, 0).float() * scale).half(), -(_half(blocks, 2).float() * offset).half()
