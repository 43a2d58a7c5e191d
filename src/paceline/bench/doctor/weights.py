"""Bytes of weights that a pass reads: of the loaded model, and of the same model under `--quantize`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from paceline.checkpoints.gguf_codes import BITS
from paceline.checkpoints.gguf_file import GGUFFile, read_gguf
from paceline.checkpoints.loader import Loaded
from paceline.models.decoder import Decoder
from paceline.models.held import tensors_of
from paceline.protocols import Target

_SCALE = 2 / 32
"""Bytes of a scale, or of a floor, per weight of a group (docs/how-to/quantize.md)."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_HEAD_BITS = 8
"""Bits per weight of an output head, at least."""


def weight_bytes(target: Target) -> int | None:
    """Return the bytes that a small pass reads: all weights, but of the embedding table only what the head shares.

    None for targets other than the native decoder, and for experts, of which a pass reads only some.
    """
    if not isinstance(target, Decoder) or any(layer.sparse for layer in target.config.plan):
        return None
    parts = {name: part for name, part in vars(target).items() if name != "_embed"}
    return sum(t.numel() * t.element_size() for t in tensors_of(parts, target))


@dataclass(frozen=True, slots=True)
class _MatrixCost:
    """Storage of a matrix. `product`: matrices of one product are stored alike. `kept`: bits per weight of the file's
    own codes, which any mode keeps, None without such codes. `floor`: whether these have a floor beside the scale."""

    product: str
    count: int
    kept: int | None = None
    floor: bool = False

    def bits(self, mode: int) -> int:
        return self.kept or (_HEAD_BITS if self.product == "head" else mode)


def quantised_bytes(model: Loaded) -> dict[str, int]:
    """Return `weight_bytes` by mode; empty for a model that is already quantised or cannot be."""
    target = model.target
    now = weight_bytes(target)
    if model.quantize or now is None or not isinstance(target, Decoder):
        return {}
    head = target.config.vocab_size * target.config.hidden
    matrices = [_MatrixCost("head", head), _MatrixCost("", now // target.dtype.itemsize - head)]
    if model.path.is_file():
        matrices = sorted(_gguf_matrices(read_gguf(model.path)), key=lambda matrix: matrix.product)
    others = max(0, now - target.dtype.itemsize * sum(matrix.count for matrix in matrices))
    products = [list(group) for _, group in groupby(matrices, lambda matrix: matrix.product)]
    modes = {"int8": 8, "int4": 4}
    return {name: others + round(sum(_product_bytes(p, bits) for p in products)) for name, bits in modes.items()}


def _product_bytes(product: list[_MatrixCost], mode: int) -> float:
    """As `quantize.stack` stores them: in 8 bits where they differ, with a floor where one has it."""
    kinds = {matrix.bits(mode) for matrix in product}
    floor = 4 in kinds or any(matrix.floor for matrix in product)
    return (max(kinds) / 8 + _SCALE * (1 + floor)) * sum(matrix.count for matrix in product)


def _gguf_matrices(header: GGUFFile) -> Iterable[_MatrixCost]:
    head = "output.weight" if "output.weight" in header.tensors else "token_embd.weight"
    for name, tensor in header.tensors.items():
        if len(tensor.shape) > 1 and (name == head or name != "token_embd.weight"):
            product = re.sub("attn_[qkv]|ffn_(gate|up)", lambda match: match[0][:4], name)
            # Other types are stored in 8 bits (`GGUFTensor.codes`); floats have no codes.
            kept = None if tensor.kind in _FLOATS else BITS.get(tensor.kind, 8)
            floor = kept == 8 and tensor.kind in ("Q5_1", "Q5_K")
            yield _MatrixCost("head" if name == head else product, math.prod(tensor.shape), kept, floor)
