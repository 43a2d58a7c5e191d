"""The tensors and the config of one rank with tensor parallelism. A rank has fewer heads, narrower MLPs and fewer
tokens than the model.

Projections whose outputs are heads, MLP elements or tokens are split by rows. Projections whose inputs are heads or MLP
elements are split by columns, and the ranks add their results (`ranks.Summed`). Only rank 0 adds the bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from paceline.errors import UnsupportedModel
from paceline.kernels.cpu.build import library
from paceline.kernels.cpu.matrix import block_elements
from paceline.kernels.low_rank import Factors
from paceline.kernels.quantize import GROUP, Codes
from paceline.kernels.stored import Stored
from paceline.models.config import MixtureConfig, ModelConfig
from paceline.models.lazy import Renamed, codes_of, kind_of, shape_of, stored_of

_HEADS = ("q_proj", "k_proj", "v_proj", "query_key_value", "sinks")
_TOKENS = ("embed_tokens", "lm_head")


def spans(size: int, count: int, unit: int = 1) -> list[tuple[int, int]]:
    """Split `size` into one range (first, end) per rank. Every range consists of whole units, except perhaps the last
    one."""
    units = size // unit
    borders = [units * rank // count * unit for rank in range(count)] + [size]
    return list(pairwise(borders))


@dataclass(frozen=True, slots=True)
class Division:
    """The split of a model across `count` ranks. A rank's number of MLP elements is a multiple of `unit`."""

    config: ModelConfig
    count: int
    unit: int

    def tokens(self) -> list[tuple[int, int]]:
        """Return each rank's range of the vocabulary."""
        return spans(self.config.vocab_size, self.count)

    def inner(self, width: int) -> list[tuple[int, int]]:
        """Return each rank's range of an MLP's elements."""
        return spans(width, self.count, self.unit if width >= self.unit * self.count else 1)

    def part(self, rank: int) -> ModelConfig:
        """Return the config of a rank's part of the model."""
        c = self.config

        def own(width: int) -> int:
            first, end = self.inner(width)[rank]
            return end - first

        first, end = self.tokens()[rank]
        experts = c.mixture and replace(c.mixture, ffn=own(c.mixture.ffn), shared=own(c.mixture.shared))
        heads, kv_heads = c.heads // self.count, c.kv_heads // self.count
        return replace(c, vocab_size=end - first, heads=heads, kv_heads=kv_heads, ffn=own(c.ffn), mixture=experts)


def divide(config: ModelConfig, tensors: Mapping[str, Tensor], count: int) -> Division:
    """Return the split of a model. Raise `UnsupportedModel` if the model cannot be split into `count` parts."""
    if config.kv_heads % count:
        fitting = [str(n) for n in range(1, config.kv_heads + 1) if config.kv_heads % n == 0]
        raise UnsupportedModel(
            f"the model's {config.kv_heads} key heads cannot be divided by {count} processes",
            f"Start {' or '.join(fitting)}: torchrun --nproc-per-node {fitting[-1]}",
        )
    narrow = min(width for width in (config.ffn, config.mixture and config.mixture.ffn) if width)
    if min(narrow, config.vocab_size) < count:
        raise UnsupportedModel(f"the model is too small for {count} processes", "Start fewer processes")
    down = _block(tensors, ("down_proj", config.mixture.names[2] if config.mixture else "down_proj"))
    cut, block = config.heads // count * config.head_dim, _block(tensors, ("o_proj",))
    if cut % block and block > 1:
        raise UnsupportedModel(
            f"each process would get {cut} columns of attention's output, which are no whole blocks of {block}",
            "Use another quantization (Q8_0, Q4_0: blocks of 32), --quantize none, or another number of processes",
        )
    return Division(config, count, max(down, GROUP))


def _block(tensors: Mapping[str, Tensor], modules: tuple[str, ...]) -> int:
    """Return the largest storage block size of these modules' weights. It is 1 for floats."""
    names = [name for name in tensors if name.endswith(tuple(f".{module}.weight" for module in modules))]
    if library() is None:
        return max((GROUP for name in names if codes_of(tensors, name)), default=1)
    kinds = {kind for name in names if (one := stored_of(tensors, name)) for kind in one.kinds}
    return max(map(block_elements, kinds), default=1)


class RankTensors(Renamed):
    """One rank's part of a model's tensors."""

    def __init__(self, tensors: Mapping[str, Tensor], division: Division, rank: int) -> None:
        super().__init__(tensors)
        self._division, self._rank = division, rank

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        rows, columns = self._cut(name)
        if rows is not None:
            return tensor[rows]
        if columns is None:
            return tensor
        if name.endswith(".bias"):
            return tensor if self._rank == 0 else torch.zeros_like(tensor)
        return tensor[:, columns]

    def factors(self, adapter: Factors) -> Factors:
        """Return this rank's part of an adapter.

        B is split by rows and A is split by columns, in the same way as W.

        Raises:
            AdapterMismatch: If the adapter does not fit the model.
        """
        return Factors(adapter.name, {module: self._part(adapter, module) for module in adapter.factors})

    def _part(self, adapter: Factors, module: str) -> tuple[Tensor, Tensor]:
        (a, b), name = adapter.factors[module], module + ".weight"
        rows, columns = self._cut(name) if name in self._tensors else (None, None)
        if rows is not None or columns is not None:
            adapter.check(module, shape_of(self._tensors, name))  # before the split: a part could fit by chance
        return a if columns is None else a[:, columns], b if rows is None else b[rows]

    def codes(self, name: str) -> Codes | None:
        codes, (rows, columns) = codes_of(self._tensors, name), self._cut(name)
        if codes is None or columns is None:
            return codes if codes is None or rows is None else codes[rows]
        return codes.columns(columns.start, columns.stop)

    def stored(self, name: str) -> Stored | None:
        stored, (rows, columns) = stored_of(self._tensors, name), self._cut(name)
        if stored is None or columns is None:
            return stored if stored is None or rows is None else stored[rows]
        return stored.columns(columns.start, columns.stop)

    def kind(self, name: str) -> str:
        return kind_of(self._tensors, name)

    def shape(self, name: str) -> tuple[int, ...]:
        shape, (rows, columns) = shape_of(self._tensors, name), self._cut(name)
        if rows is not None:
            count = len(rows) if isinstance(rows, Tensor) else rows.stop - rows.start
            return (count, *shape[1:])
        return (shape[0], columns.stop - columns.start) if columns and len(shape) == 2 else shape

    def _cut(self, name: str) -> tuple[slice | Tensor | None, slice | None]:
        """Return this rank's rows and this rank's columns of a tensor. Each is None if the tensor is not split along
        that dimension."""
        module, config, count = name.rpartition(".")[0].rpartition(".")[2], self._division.config, self._division.count
        experts = config.mixture
        gate, up, down = experts.names if experts and ".experts." in name else ("gate_proj", "up_proj", "down_proj")
        if module in _TOKENS:
            return slice(*self._division.tokens()[self._rank]), None
        if module in (*_HEADS, "qkv_proj"):
            sizes = [shape_of(self._tensors, name)[0]]
            if module == "qkv_proj":
                sizes = [heads * config.head_dim for heads in (config.heads, config.kv_heads, config.kv_heads)]
            return _rows(sizes, [spans(size, count)[self._rank] for size in sizes]), None
        if module == "o_proj":
            return None, slice(*spans(config.heads * config.head_dim, count)[self._rank])
        inner = self._division.inner(_width(config, experts, name))[self._rank]
        if module == down:
            return None, slice(*inner)
        if module in (gate, up):
            return slice(*inner), None
        return (_rows([config.ffn] * 2, [inner] * 2), None) if module == "gate_up_proj" else (None, None)


def _width(config: ModelConfig, experts: MixtureConfig | None, name: str) -> int:
    """Return the width of the MLP that a tensor belongs to."""
    if experts and ".experts." in name:
        return experts.ffn
    return experts.shared if experts and f".{experts.shared_block}." in name else config.ffn


def _rows(sizes: list[int], parts: list[tuple[int, int]]) -> slice | Tensor:
    """Select one part of each of several stacked matrices."""
    if len(sizes) == 1:
        return slice(*parts[0])
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return torch.cat([torch.arange(start + a, start + b) for start, (a, b) in zip(starts, parts, strict=True)])
