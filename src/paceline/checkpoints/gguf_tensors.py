"""The tensors of a GGUF file under Hugging Face's names and in its layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.family import GGUFLayout
from paceline.checkpoints.gguf_file import FLOATS, GGUFFile, GGUFTensor
from paceline.checkpoints.gguf_metadata import ROPE_FACTORS
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import EXPERTS
from paceline.kernels.quantize import Codes
from paceline.kernels.stored import Stored
from paceline.models.lazy import LazyTensors

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "output_norm.bias": "model.norm.bias",
    "output.bias": "lm_head.bias",
}

_NEXT = {
    "eh_proj.weight": "fc.weight",
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "shared_head_norm.weight": "norm.weight",
    "shared_head_head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed_tokens.weight",
}
"""Name after "nextn." of a part of an MTP layer -> its name after "mtp."."""
_FLAT = (".A_log", ".mamba.D", ".mamba.norm.weight")
"""Name suffixes of vectors that some files store as matrices."""


class GGUFTensors(LazyTensors):
    """The tensors of a file by Hugging Face name. Each access reads a tensor, and dequantises it to float32.

    Raises:
        UnsupportedModel: If `layout` does not include a tensor of the file, or the `gguf` library does not know a
            tensor type.
    """

    def __init__(self, file: GGUFFile, layout: GGUFLayout, config: Mapping[str, Any]) -> None:
        self._config, self._layout = config, layout
        self._names = self._tensors = _named(file, layout, config["num_hidden_layers"])
        for tensor in {tensor.kind: tensor for tensor in self._tensors.values()}.values():
            tensor.check()

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name].read()
        convert = self._conversion(name)
        return convert(tensor) if convert else tensor

    def codes(self, name: str) -> Codes | None:
        codes, convert = self._tensors[name].codes(), self._conversion(name)
        return codes[convert(torch.arange(len(codes.codes)))] if codes and convert else codes

    def stored(self, name: str) -> Stored | None:
        if len(self.shape(name)) != 2:
            return None
        stored, convert = self._tensors[name].stored(), self._conversion(name)
        return stored[convert(torch.arange(len(stored.rows)))] if convert else stored

    def mostly_codes(self) -> bool:
        sizes = [(tensor.kind in FLOATS, math.prod(tensor.shape)) for tensor in self._tensors.values()]
        return 2 * sum(size for is_float, size in sizes if not is_float) > sum(size for _, size in sizes)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self._tensors[name].shape
        if name.endswith(("conv1d.weight", ".conv.conv.weight")):
            return shape[0], 1, *shape[1:]
        if name.endswith(_FLAT):
            return (math.prod(shape),)
        return (1, *shape) if name.endswith("shared_expert_gate.weight") and len(shape) == 1 else shape

    def _conversion(self, name: str) -> Callable[[Tensor], Tensor] | None:
        if name == "d2t":  # GGUF stores the token ids instead of offsets
            return lambda tokens: tokens - torch.arange(len(tokens))
        if name.endswith("A_log"):
            return lambda rate: (-rate).log().flatten()
        if name.endswith(("conv1d.weight", ".conv.conv.weight", "shared_expert_gate.weight", *_FLAT)):
            return lambda weight: weight.view(self.shape(name))
        if self._layout.norms_include_one and _is_norm(name) and not name.endswith("linear_attn.norm.weight"):
            return lambda weight: weight - 1
        if self._layout.interleaved and ".self_attn.q_proj." in name:
            return partial(unpair, heads=self._config["num_attention_heads"])
        if self._layout.interleaved and ".self_attn.k_proj." in name:
            return partial(unpair, heads=self._config["num_key_value_heads"])
        return None


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight") or ".pre_fc_norm_" in name


def _named(file: GGUFFile, layout: GGUFLayout, layers: int) -> dict[str, GGUFTensor]:
    """Return the tensors by Hugging Face name. The layers after the model's own layers are MTP layers, which get Qwen's
    names ("mtp.")."""
    found: dict[str, GGUFTensor] = {}
    unknown = []
    for name, tensor in file.tensors.items():
        number = name.removeprefix("blk.").partition(".")[0]
        if number.isdecimal() and len(number) < 6 and int(number) >= layers:
            for known, part in _hf_names(name, tensor, layout).items():
                found[known.replace(f"model.layers.{number}.", f"mtp.layers.{int(number) - layers}.")] = part
            known = _NEXT.get(name.partition(".nextn.")[2], "")
            if known and int(number) == layers:
                found["mtp." + known] = tensor
            continue
        names = _hf_names(name, tensor, layout)
        found.update(names)
        if not names and name not in ROPE_FACTORS:
            unknown.append(name)
    if unknown:
        raise UnsupportedModel(
            f"{file.path.name} holds {len(unknown)} tensors that its architecture does not have ({unknown[0]}, ...)",
            "This variant of the architecture is not supported. Use another model",
        )
    return found


def _hf_names(name: str, tensor: GGUFTensor, layout: GGUFLayout) -> dict[str, GGUFTensor]:
    """Return a GGUF tensor under its Hugging Face name. A stack of experts becomes one tensor per expert. The result is
    empty for an unknown tensor."""
    if top := layout.top_level.get(name) or _TOP.get(name):
        return {top: tensor}
    block, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    if block == "blk" and rest in layout.exact_names:
        return {f"model.layers.{layer}.{layout.exact_names[rest]}": tensor}
    part, _, kind = rest.rpartition(".")
    if block != "blk" or kind not in ("weight", "bias"):
        return {}
    prefix = f"model.layers.{layer}"
    if part in layout.experts:
        if tensor.shape[0] > EXPERTS:
            raise CorruptModel(
                f"{name} stacks {tensor.shape[0]} experts, more than the supported {EXPERTS}", "Fetch the file again"
            )
        pattern = f"{prefix}.{layout.experts[part]}.{kind}"
        return {pattern.format(e): tensor.part(e) for e in range(tensor.shape[0])}
    return {f"{prefix}.{layout.names[part]}.{kind}": tensor} if part in layout.names else {}


def unpair(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows [heads * D, ...] within each head, from (pair, half) order to (half, pair) order."""
    if weight.shape[0] % (2 * heads):
        raise CorruptModel(f"a projection of {weight.shape[0]} rows does not fit {heads} heads", "Fetch the file again")
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
