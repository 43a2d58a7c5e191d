"""How many bytes of weights a pass would read, were the model loaded with `--quantize`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from paceline.bench.doctor.machine import weight_bytes
from paceline.checkpoints.gguf_codes import BITS
from paceline.checkpoints.gguf_file import GGUFFile, read_gguf
from paceline.checkpoints.loader import Loaded
from paceline.models.decoder import Decoder

_SCALE = 2 / 32
"""Bytes of a scale, or of a floor, for each weight of a group (docs/how-to/quantize.md)."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_HEAD_BITS = 8
"""An output head has at least so many."""


@dataclass(frozen=True, slots=True)
class _MatrixCost:
    """`own`: bits of the file's own codes, kept with any mode; None: those of the mode. `floor`: whether those have one
    beside the scale. `product`: matrices of one product are held in the same form."""

    product: str
    count: int
    own: int | None = None
    floor: bool = False

    def bits(self, mode: int) -> int:
        return self.own or (_HEAD_BITS if self.product == "head" else mode)


def quantised_bytes(model: Loaded) -> dict[str, int]:
    """By mode; empty for a model that is quantised already, or that cannot be."""
    target = model.target
    now = weight_bytes(target)
    if model.quantize or now is None or not isinstance(target, Decoder):
        return {}
    head = target.config.vocab_size * target.config.hidden
    matrices = [_MatrixCost("head", head), _MatrixCost("", now // target.dtype.itemsize - head)]
    if model.path.is_file():
        matrices = sorted(_of_gguf(read_gguf(model.path)), key=lambda matrix: matrix.product)
    others = max(0, now - target.dtype.itemsize * sum(matrix.count for matrix in matrices))
    products = [list(group) for _, group in groupby(matrices, lambda matrix: matrix.product)]
    return {
        name: others + round(sum(_bytes(product, mode) for product in products))
        for name, mode in (("int8", 8), ("int4", 4))
    }


def _bytes(product: list[_MatrixCost], mode: int) -> float:
    """As `quantize.stack` holds them: in 8 bits where they differ, with a floor where one has it."""
    kinds = {matrix.bits(mode) for matrix in product}
    floor = 4 in kinds or any(matrix.floor for matrix in product)
    return (max(kinds) / 8 + _SCALE * (1 + floor)) * sum(matrix.count for matrix in product)


def _of_gguf(header: GGUFFile) -> Iterable[_MatrixCost]:
    head = "output.weight" if "output.weight" in header.tensors else "token_embd.weight"
    for name, tensor in header.tensors.items():
        if len(tensor.shape) > 1 and (name == head or name != "token_embd.weight"):
            product = re.sub("attn_[qkv]|ffn_(gate|up)", lambda hit: hit[0][:4], name)
            # Types of another form are held in 8 bits (`GGUFTensor.codes`); floats have no codes.
            own = None if tensor.kind in _FLOATS else BITS.get(tensor.kind, 8)
            floor = own == 8 and tensor.kind in ("Q5_1", "Q5_K")
            yield _MatrixCost("head" if name == head else product, math.prod(tensor.shape), own, floor)
