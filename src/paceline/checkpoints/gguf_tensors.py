"""GGUF tensors under Hugging Face's names and in its layout, by the table `LAYOUTS`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.gguf_file import FLOATS, GGUFFile, GGUFTensor
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import EXPERTS
from paceline.kernels.quantize import Codes
from paceline.kernels.stored import Stored
from paceline.models.lazy import LazyTensors


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Tensor names and storage conventions of one architecture.

    `names`: part of a layer -> Hugging Face's name. `experts`: the same for parts that stack all experts along their
    first dimension; "{}" stands for the expert. `paired`: query and key rows are stored with the two halves of each
    rotary pair side by side, while Hugging Face has all first halves before all second ones. `shifted`: norms are
    stored with the 1 added that Hugging Face's code adds. `whole`: part -> Hugging Face name, where neither ends in
    ".weight" or ".bias". `top`: names that belong to no layer, besides those of all architectures.
    """

    names: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    paired: bool = False
    shifted: bool = False
    whole: Mapping[str, str] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=dict)


_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd_norm.weight": "model.norm.weight",  # LFM2
    "output.weight": "lm_head.weight",
    "output_norm.bias": "model.norm.bias",
    "output.bias": "lm_head.bias",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}

ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
LAYER = {**ATTENTION, "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = {
    **LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_DELTA_NET = {
    **{**LAYER, **QK_NORMS, "post_attention_norm": "post_attention_layernorm"},
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    **{"ssm_ba": "linear_attn.in_proj_ba", "ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"},
    **{"ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}
_NEXT = {
    "eh_proj.weight": "fc.weight",
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "shared_head_norm.weight": "norm.weight",
    "shared_head_head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed_tokens.weight",
}
"""Parts of a layer that predicts later tokens, after "nextn." -> their names after "mtp."."""
_DELTA_WHOLE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_MAMBA = {
    **{"ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_norm": "mamba.norm", "ssm_out": "mamba.out_proj"},
}
_MAMBA_WHOLE = {
    **{"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"},
    "ffn_norm": "post_attention_layernorm.weight",  # Falcon-H1
}
_BIAS = {"exp_probs_b.bias": "mlp.expert_bias"}
_MIXTRAL, _QWEN_MOE = "block_sparse_moe.experts.{}", "mlp.experts.{}"

LAYOUTS = {
    "llama": TensorLayout(
        {**LAYER, "ffn_gate_inp": "block_sparse_moe.gate"},
        {"ffn_gate_exps": f"{_MIXTRAL}.w1", "ffn_down_exps": f"{_MIXTRAL}.w2", "ffn_up_exps": f"{_MIXTRAL}.w3"},
        paired=True,
    ),
    "smollm3": TensorLayout(LAYER, paired=True),
    "granite": TensorLayout(LAYER, paired=True),
    "qwen2": TensorLayout(LAYER),
    "qwen3": TensorLayout({**LAYER, **QK_NORMS}),
    "qwen3moe": TensorLayout(
        {**LAYER, **QK_NORMS, "ffn_gate_inp": "mlp.gate"},
        {f"ffn_{part}_exps": f"{_QWEN_MOE}.{part}_proj" for part in ("gate", "up", "down")},
    ),
    **dict.fromkeys(
        ("lfm2", "lfm2moe"),
        TensorLayout(
            {
                **{**LAYER, **QK_NORMS, "ffn_gate_inp": "mlp.gate"},
                **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
            },
            {"ffn_gate_exps": f"{_QWEN_MOE}.w1", "ffn_down_exps": f"{_QWEN_MOE}.w2", "ffn_up_exps": f"{_QWEN_MOE}.w3"},
            whole=_BIAS,
        ),
    ),
    **dict.fromkeys(("mamba2", "falcon-h1"), TensorLayout({**LAYER, **_MAMBA}, whole=_MAMBA_WHOLE)),
    "granitehybrid": TensorLayout(
        {
            **{**LAYER, **_MAMBA, "ffn_gate_inp": "block_sparse_moe.router.layer"},
            **{f"ffn_{part}_shexp": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
        },
        {f"ffn_{part}_exps": f"{_MIXTRAL}.{part}_proj" for part in ("gate", "up", "down")},
        paired=True,
        whole=_MAMBA_WHOLE,
    ),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        TensorLayout(
            {
                **{**LAYER, **_MAMBA, "ffn_gate_inp": "mlp.gate"},
                **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("up", "down")},
            },
            {f"ffn_{part}_exps": f"{_QWEN_MOE}.{part}_proj" for part in ("up", "down")},
            paired=True,
            whole={**_MAMBA_WHOLE, **_BIAS},
        ),
    ),
    "gpt-oss": TensorLayout(
        {
            **ATTENTION,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        {f"ffn_{part}_exps": f"{_QWEN_MOE}.{part}_proj" for part in ("gate", "up", "down")},
    ),
    **{
        name: TensorLayout(
            _DELTA_NET,
            {f"ffn_{part}_exps": f"{_QWEN_MOE}.{part}_proj" for part in ("gate", "up", "down")},
            shifted=True,
            whole=_DELTA_WHOLE,
        )
        for name in ("qwen3next", "qwen35", "qwen35moe")
    },
    "phi3": TensorLayout(
        {**ATTENTION, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
    ),
    "gemma": TensorLayout(LAYER, shifted=True),
    "seed_oss": TensorLayout({**LAYER, "post_attention_norm": "post_attention_layernorm"}),
    "gemma2": TensorLayout(_GEMMA, shifted=True),
    **dict.fromkeys(("olmo2", "exaone4"), TensorLayout({**_GEMMA, **QK_NORMS})),
    "glm4": TensorLayout({**_GEMMA, "ffn_up": "mlp.gate_up_proj"}),
    "deepseek2": TensorLayout(
        {
            **{**LAYER, "ffn_gate_inp": "mlp.gate", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa"},
            **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q_a", "q_b", "kv_b", "k_b", "v_b")},
            **{f"attn_{part}_a_norm": f"self_attn.{part}_a_layernorm" for part in ("q", "kv")},
            **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
        },
        {f"ffn_{part}_exps": f"{_QWEN_MOE}.{part}_proj" for part in ("gate", "up", "down")},
        whole=_BIAS,
    ),
    **dict.fromkeys(("ernie4_5", "starcoder2"), TensorLayout(LAYER)),
    **dict.fromkeys(("qwen3vl", "command-r", "cohere2", "stablelm"), TensorLayout({**LAYER, **QK_NORMS})),
    **dict.fromkeys(("phi2", "gptneox"), TensorLayout({**LAYER, "attn_qkv": "self_attn.qkv_proj"})),
    "glm4moe": TensorLayout(
        {
            **{**LAYER, **QK_NORMS, "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate"},
            **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
        },
        {f"ffn_{part}_exps": f"{_QWEN_MOE}.{part}_proj" for part in ("gate", "up", "down")},
        whole=_BIAS,
    ),
    "llama4": TensorLayout(
        {
            **{**LAYER, "ffn_gate_inp": "mlp.router"},
            **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        },
        {f"ffn_{part}_exps": f"{_QWEN_MOE}.{part}_proj" for part in ("gate", "up", "down")},
    ),
    "gemma3": TensorLayout({**_GEMMA, **QK_NORMS}, shifted=True),
    "gemma4": TensorLayout(
        {
            **{**_GEMMA, **QK_NORMS},
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "ffn_gate_inp": "router.proj",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        },
        {f"ffn_{part}_exps": f"experts.{{}}.{part}_proj" for part in ("gate", "up", "gate_up", "down")},
        whole={
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
    ),
}
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that become fields of the config."""


_FLAT = (".A_log", ".mamba.D", ".mamba.norm.weight")
"""Ends of the names of vectors that files may have as matrices."""


class GGUFTensors(LazyTensors):
    """Tensors of a file by Hugging Face name, read and dequantised (to float32) at each access.

    Raises `UnsupportedModel` for tensors or tensor types that `layout` or the `gguf` library does not know.
    """

    def __init__(self, file: GGUFFile, layout: TensorLayout, config: Mapping[str, Any]) -> None:
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
        if name == "d2t":  # stored as the tokens themselves
            return lambda tokens: tokens - torch.arange(len(tokens))
        if name.endswith("A_log"):
            return lambda rate: (-rate).log().flatten()
        if name.endswith(("conv1d.weight", ".conv.conv.weight", "shared_expert_gate.weight", *_FLAT)):
            return lambda weight: weight.view(self.shape(name))
        if self._layout.shifted and _is_norm(name) and not name.endswith("linear_attn.norm.weight"):
            return lambda weight: weight - 1
        if self._layout.paired and ".self_attn.q_proj." in name:
            return partial(unpair, heads=self._config["num_attention_heads"])
        if self._layout.paired and ".self_attn.k_proj." in name:
            return partial(unpair, heads=self._config["num_key_value_heads"])
        return None


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight") or ".pre_fc_norm_" in name


def _named(file: GGUFFile, layout: TensorLayout, layers: int) -> dict[str, GGUFTensor]:
    """By Hugging Face name. Layers after the model's own predict later tokens, and have Qwen's names ("mtp.")."""
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
            "It is a variant of the architecture that Paceline does not run",
        )
    return found


def _hf_names(name: str, tensor: GGUFTensor, layout: TensorLayout) -> dict[str, GGUFTensor]:
    """Return Hugging Face's name of a GGUF tensor, one per expert where it stacks them; {} where it is unknown."""
    if top := layout.top.get(name) or _TOP.get(name):
        return {top: tensor}
    block, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    if block == "blk" and rest in layout.whole:
        return {f"model.layers.{layer}.{layout.whole[rest]}": tensor}
    part, _, kind = rest.rpartition(".")
    if block != "blk" or kind not in ("weight", "bias"):
        return {}
    prefix = f"model.layers.{layer}"
    if part in layout.experts:
        if tensor.shape[0] > EXPERTS:
            raise CorruptModel(
                f"{name} stacks {tensor.shape[0]} experts; at most {EXPERTS} are read", "Fetch the file again"
            )
        pattern = f"{prefix}.{layout.experts[part]}.{kind}"
        return {pattern.format(e): tensor.part(e) for e in range(tensor.shape[0])}
    return {f"{prefix}.{layout.names[part]}.{kind}": tensor} if part in layout.names else {}


def unpair(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows [heads * D, ...] from (pair, half) within each head to (half, pair)."""
    if weight.shape[0] % (2 * heads):
        raise CorruptModel(f"a projection of {weight.shape[0]} rows does not fit {heads} heads", "Fetch the file again")
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
