"""Tiny random models of every form that the CPU kernels support, run by the kernels and by torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.kernels import linear as runner
from paceline.kernels.quantize import Mode
from paceline.models.config import (
    AttentionConfig,
    DeltaNetConfig,
    Groups,
    LayerConfig,
    Mamba2Config,
    MixtureConfig,
    ModelConfig,
    NormConfig,
    RopeConfig,
    ShortConvConfig,
)
from paceline.models.decoder import Decoder
from paceline.models.lazy import Quantised
from paceline.testing import random_tensors
from paceline.types import Tap, Want
from paceline.verify.tree import pack_prefix

CPU = torch.device("cpu")
BASE = ModelConfig("llama", 67, 64, 2, 4, 2, 16, 96, 4096, tied=True)
FULL, LOCAL = RopeConfig(1e6), RopeConfig(1e4)


def plan(*windows: int | None) -> dict[str, Any]:
    layers = tuple(LayerConfig(LOCAL if window else FULL, window) for window in windows)
    return {"layers": len(layers), "special": layers}


GEMMA = {"norms": NormConfig(offset=1.0, after=True), "embed_scale": 8.0, "activation": "gelu_pytorch_tanh"}
_LOCAL, _WIDE = LayerConfig(LOCAL, 7, head_dim=20), LayerConfig(FULL, kv_heads=1, head_dim=32, keys_as_values=True)
GEMMA4 = "gemma4: token embeddings, keys of earlier layers, sizes by layer"
GEMMA4_MOE = "gemma4 26b: experts beside a dense network, each with norms"
DELTA = DeltaNetConfig(key_heads=2, heads=6, key_dim=24, value_dim=20, width=4)
_DELTA = LayerConfig(None, recurrent=DELTA, attends=False)
DELTA_NET = "qwen3.5: Gated DeltaNet, gated attention"
QWEN_MOE = "qwen3.5 moe: Gated DeltaNet, and an expert for all rows that has a weight by row"
LFM2 = "lfm2: short convolutions between gates"
_CONV = LayerConfig(None, recurrent=ShortConvConfig(72, 3), attends=False)
_MAMBA = Mamba2Config(key_heads=2, heads=6, key_dim=24, value_dim=10, width=4)
_MAMBAS = [LayerConfig(None, recurrent=replace(_MAMBA, norm_first=first), attends=False) for first in (False, True)]
MAMBA = "granite 4: Mamba-2, experts beside a wider expert for all rows"
NEMOTRON = "nemotron: layers with a mixer or a network, squared ReLU without a gate"
FALCON = "falcon-h1: Mamba-2 in parallel with attention"
MAMBA_ALONE = "mamba 2: no attention"
WIDE_SHARED = "qwen2 moe: a wider expert for all rows that has a weight by row"
SCORED = MixtureConfig(8, 3, 32, normalised=True, shared_block="mlp.shared_experts", sigmoid=True)
RECURRENT = (DELTA_NET, LFM2, MAMBA, MAMBA_ALONE, NEMOTRON, FALCON)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "odd feed-forward, one key head": {"ffn": 80, "kv_heads": 1},
    "a key head for each query, own head": {"kv_heads": 4, "tied": False, "hidden": 48, "layers": 3},
    "qwen2: biases": {"family": "qwen2"},
    "qwen3: head norms": {"norms": NormConfig(heads="shared"), "head_dim": 32},
    "gemma2": {**GEMMA, **plan(7, None, 7), "attention": AttentionConfig(scale=0.2, softcap=3.0), "final_softcap": 5.0},
    "gemma3": {**GEMMA, **plan(9, 9, None), "norms": NormConfig(1e-5, offset=1.0, after=True, heads="shared")},
    GEMMA4: {
        **{"norms": NormConfig(after=True, heads="shared", values=True), "attention": AttentionConfig(scale=0.1)},
        **{"activation": "gelu_pytorch_tanh", "layer_scale": True, "token_inputs": 24, "layers": 5},
        "special": (_LOCAL, _WIDE, _LOCAL, *(replace(x, source=i, ffn=150) for x, i in ((_LOCAL, 2), (_WIDE, 1)))),
    },
    GEMMA4_MOE: {
        **{"norms": NormConfig(after=True, heads="shared", values=True), "attention": AttentionConfig(scale=0.1)},
        **{"activation": "gelu_pytorch_tanh", "layer_scale": True, "ffn": 80, "layers": 3},
        "mixture": MixtureConfig(9, 3, 52, normalised=True, with_dense=True, router="router.proj"),
        "special": tuple(replace(layer, sparse=True) for layer in (_LOCAL, _WIDE, _LOCAL)),
    },
    DELTA_NET: {
        **{"family": "qwen3_5_text", "norms": NormConfig(heads="shared"), "attention": AttentionConfig(gated=True)},
        **{"head_dim": 20, "layers": 4, "special": (_DELTA, _DELTA, LayerConfig(replace(FULL, share=0.4)), _DELTA)},
    },
    "qwen3.5 from llama.cpp: value heads in another order": {
        "norms": NormConfig(heads="shared"),
        "special": (replace(_DELTA, recurrent=replace(DELTA, tiled=True)), LayerConfig(FULL)),
    },
    QWEN_MOE: {
        **{"family": "qwen3_5_moe_text", "norms": NormConfig(heads="shared"), "attention": AttentionConfig(gated=True)},
        "mixture": MixtureConfig(6, 2, 32, normalised=True, shared=32, shared_block="mlp.shared_expert"),
        "special": (replace(_DELTA, sparse=True), LayerConfig(FULL, sparse=True)),
    },
    LFM2: {
        **{"hidden": 72, "ffn": 100, "norms": NormConfig(heads="shared"), "head_dim": 20, "layers": 4},
        "special": (
            _CONV,
            LayerConfig(FULL),
            replace(_CONV, sparse=True),
            LayerConfig(FULL, sparse=True),
        ),
        "mixture": MixtureConfig(6, 2, 32, normalised=True),
    },
    MAMBA: {
        **{"hidden": 72, "head_dim": 20, "residual_scale": 0.3, "layers": 4},
        "mixture": MixtureConfig(6, 2, 32, normalised=True, shared=56, shared_block="mlp.shared_experts"),
        "special": (_MAMBAS[0], replace(_MAMBAS[1], sparse=True), LayerConfig(None, sparse=True), _MAMBAS[0]),
    },
    NEMOTRON: {
        **{"hidden": 72, "head_dim": 20, "layers": 5, "activation": "relu2", "gated_mlp": False},
        "mixture": replace(SCORED, count=6, shared=44, scale=1.7),
        "special": (
            replace(_MAMBAS[0], feeds=False),
            LayerConfig(None, sparse=True, attends=False),
            LayerConfig(None, feeds=False),
            LayerConfig(None, attends=False),
            replace(_MAMBAS[0], feeds=False),
        ),
    },
    FALCON: {
        **{"hidden": 72, "head_dim": 20, "layers": 4},
        "special": (replace(_MAMBAS[1], attends=True, rope=FULL), replace(_MAMBAS[0], attends=True)) * 2,
    },
    MAMBA_ALONE: {"layers": 3, "special": (replace(_MAMBAS[0], feeds=False),) * 3},
    WIDE_SHARED: {
        "mixture": MixtureConfig(6, 2, 32, normalised=False, shared=52, shared_block="mlp.shared_expert"),
        "special": (LayerConfig(FULL, sparse=True), LayerConfig(FULL)),
    },
    "one expert beside a wider expert for all rows": {
        "mixture": MixtureConfig(1, 1, 32, normalised=False, shared=52, shared_block="mlp.shared_experts"),
        "special": (LayerConfig(FULL, sparse=True), LayerConfig(FULL)),
    },
    "one expert with its own score beside a wider expert for all rows": {
        "mixture": replace(SCORED, count=1, used=1, shared=52, normalised=False, scale=1.7),
        "special": (LayerConfig(FULL), LayerConfig(FULL, sparse=True)),
    },
    "gelu": {"activation": "gelu"},
    "partial rotary": {"rope": RopeConfig(share=0.5), "head_dim": 32},
    "layers without rope": {"special": (LayerConfig(None), LayerConfig(FULL))},
    "heads of 80": {"head_dim": 80, "heads": 2, "kv_heads": 1},
    "heads of 128": {"head_dim": 128, "heads": 3, "kv_heads": 1},
    "a mixture": {
        "mixture": MixtureConfig(6, 2, 32, normalised=True),
        "special": (LayerConfig(FULL), LayerConfig(FULL, sparse=True)),
    },
    "twenty experts, ragged": {
        **{"hidden": 72, "mixture": MixtureConfig(20, 3, 52, normalised=False)},
        "special": (LayerConfig(FULL, sparse=True), LayerConfig(FULL, sparse=True)),
    },
    "glm4.5: experts by their own scores, in groups, and one for all rows": {
        "mixture": replace(SCORED, groups=Groups(4, 2, 2), shared=32, scale=1.7),
        **{"special": (LayerConfig(FULL), LayerConfig(FULL, sparse=True)), "norms": NormConfig(heads="shared")},
    },
    "experts by their own scores, ragged": {
        **{"hidden": 72, "mixture": replace(SCORED, count=18, ffn=52, normalised=False)},
        "special": (LayerConfig(FULL, sparse=True), LayerConfig(FULL)),
    },
    "gpt-oss: sinks, clamped experts with biases": {
        **{"family": "gpt_oss", "activation": "clamped_swiglu", "attention": AttentionConfig(sinks=True)},
        **{"hidden": 72, "head_dim": 20, "mixture": MixtureConfig(6, 2, 36, normalised=True, router="router")},
        "special": (LayerConfig(FULL, 9, sparse=True), LayerConfig(FULL, sparse=True)),
    },
    "granite: factors": {
        "residual_scale": 0.3,
        "logits_divisor": 4.0,
        "embed_scale": 12.0,
        "attention": AttentionConfig(scale=0.1),
    },
    "no size in whole lanes": {
        "hidden": 50,
        "ffn": 70,
        "head_dim": 36,
        "norms": NormConfig(heads="shared"),
        "tied": False,
    },
    "gemma of odd sizes": {
        **GEMMA,
        **plan(9, None),
        "hidden": 100,
        "ffn": 37,
        "head_dim": 22,
        "attention": AttentionConfig(softcap=3.0),
    },
    "sixteen queries to a key head, a window of three": {**plan(3, None), "heads": 16, "kv_heads": 1},
}
GPT_OSS = "gpt-oss: sinks, clamped experts with biases"
GLM = "glm4.5: experts by their own scores, in groups, and one for all rows"


def tensors_of(c: ModelConfig) -> dict[str, Tensor]:
    """Return random weights for all tensors of a config, rounded to bfloat16."""
    draw = torch.Generator().manual_seed(7)
    tensors = random_tensors(c, 1, scale=1.3 * c.hidden**-0.5)
    for i in range(c.layers):
        layer = f"model.layers.{i}."
        if c.family == "qwen2":
            sizes = {"q": c.heads * c.head_dim, "k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.head_dim}
            tensors |= {f"{layer}self_attn.{x}_proj.bias": torch.zeros(size) for x, size in sizes.items()}
        if c.attention.sinks:
            tensors |= {f"{layer}self_attn.sinks.weight": torch.full((c.heads,), 2.0)}
        if isinstance(c.plan[i].recurrent, ShortConvConfig):
            tensors = short_convolution_layer(c, i, tensors, draw)
        elif isinstance(c.plan[i].recurrent, Mamba2Config):
            tensors = mamba_layer(c, i, tensors, draw)
        elif c.plan[i].recurrent:
            tensors = delta_net_layer(c, i, tensors, draw)
        elif c.attention.gated:
            shape = 2 * c.heads * c.head_dim, c.hidden
            tensors[f"{layer}self_attn.q_proj.weight"] = torch.randn(shape, generator=draw) * c.hidden**-0.5
        if c.norms.heads and not c.plan[i].recurrent:
            size = c.of(c.plan[i]).head_dim
            tensors |= {f"{layer}self_attn.{x}_norm.weight": torch.ones(size) for x in "qk"}
        if c.norms.after:
            tensors |= {f"{layer}{x}_feedforward_layernorm.weight": torch.ones(c.hidden) for x in ("pre", "post")}
        if c.mixture and c.mixture.with_dense:
            tensors |= experts_beside_dense(c, layer, draw)
        elif c.mixture and c.plan[i].sparse:
            dense = {f"{layer}mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
            tensors = {name: x for name, x in tensors.items() if name not in dense}
            tensors |= experts_of(c, f"{layer}mlp.", draw)
        if c.layer_scale:
            tensors = gemma4_layer(c, i, tensors, draw)
    if c.token_inputs:
        width, name = c.layers * c.token_inputs, "model.per_layer_model_projection.weight"
        tensors |= {"model.embed_tokens_per_layer.weight": torch.randn(c.vocab_size, width, generator=draw) * 0.2}
        tensors |= {name: torch.randn(width, c.hidden, generator=draw)}
        tensors |= {"model.per_layer_projection_norm.weight": torch.ones(c.token_inputs)}
    tensors = {name: x for name, x in tensors.items() if not is_missing(c, name)}
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            tensors[name] = tensor - c.norms.offset * ("norm" in name) + torch.randn(tensor.shape, generator=draw) * 0.3
    tensors["model.embed_tokens.weight"] *= 4
    return {name: tensor.bfloat16().float() for name, tensor in tensors.items()}


def is_missing(c: ModelConfig, name: str) -> bool:
    """Return True for a tensor of a gate, mixer or feed-forward block that the model does not have."""
    if not c.gated_mlp and ".gate_proj." in name:
        return True
    if not name.startswith("model.layers."):
        return False
    layer = c.plan[int(name.split(".")[2])]
    missing = [part for part, has in ((".self_attn.", layer.attends), (".mlp.", layer.feeds)) if not has]
    if not ((layer.attends or layer.recurrent) and layer.feeds):
        missing.append(".post_attention_layernorm.")
    return any(part in name for part in missing)


def gemma4_layer(c: ModelConfig, i: int, tensors: dict[str, Tensor], draw: torch.Generator) -> dict[str, Tensor]:
    """Return the tensors of Gemma 4's layer i, from the tensors of a Llama layer."""
    own, layer, shape = c.plan[i], f"model.layers.{i}.", (c.token_inputs, c.hidden)
    lacks = ("k_proj", "v_proj", "k_norm") if own.source is not None else ("v_proj",) if own.keys_as_values else ()
    names = {f"{layer}self_attn.{name}.weight" for name in lacks}
    tensors = {name: x for name, x in tensors.items() if name not in names}
    tensors[layer + "layer_scalar"] = torch.ones(1)
    if c.token_inputs:
        for name, size in (("per_layer_input_gate", shape), ("per_layer_projection", shape[::-1])):
            tensors[f"{layer}{name}.weight"] = torch.randn(size, generator=draw) * 0.5 * size[1] ** -0.5
        tensors[layer + "post_per_layer_input_norm.weight"] = torch.ones(c.hidden)
    return tensors


def delta_net_layer(c: ModelConfig, i: int, tensors: dict[str, Tensor], draw: torch.Generator) -> dict[str, Tensor]:
    """Return the tensors with Gated DeltaNet in layer i instead of attention."""
    d, layer = DELTA, f"model.layers.{i}.linear_attn."
    values = d.heads * d.value_dim
    sizes = {"in_proj_qkv": d.channels, "in_proj_z": values, "in_proj_b": d.heads, "in_proj_a": d.heads}
    shapes = {name: (size, c.hidden) for name, size in sizes.items()} | {"out_proj": (c.hidden, values)}
    for name, shape in shapes.items():
        tensors[f"{layer}{name}.weight"] = torch.randn(shape, generator=draw) * shape[1] ** -0.5
    tensors[layer + "conv1d.weight"] = torch.randn(d.channels, 1, d.width, generator=draw) * 0.5
    # The states of the first heads last for hundreds of tokens, those of the last heads for one.
    tensors[layer + "A_log"] = torch.linspace(-4.0, 1.0, d.heads)
    ones = {"dt_bias": d.heads, "norm.weight": d.value_dim}
    return tensors | {layer + name: torch.ones(size) for name, size in ones.items()}


def mamba_layer(c: ModelConfig, i: int, tensors: dict[str, Tensor], draw: torch.Generator) -> dict[str, Tensor]:
    """Return the tensors with Mamba-2 in layer i instead of attention."""
    m, layer = _MAMBA, f"model.layers.{i}.mamba."
    values = m.heads * m.value_dim
    for name, shape in {
        "in_proj": (values + m.channels + m.heads, c.hidden),
        "out_proj": (c.hidden, values),
    }.items():
        tensors[f"{layer}{name}.weight"] = torch.randn(shape, generator=draw) * shape[1] ** -0.5
    tensors[layer + "conv1d.weight"] = torch.randn(m.channels, 1, m.width, generator=draw) * 0.5
    # The states of the first heads last for hundreds of tokens, those of the last heads for one.
    tensors[layer + "A_log"] = torch.linspace(-4.0, 1.0, m.heads)
    ones = {"dt_bias": m.heads, "D": m.heads, "conv1d.bias": m.channels, "norm.weight": values}
    return tensors | {layer + name: torch.ones(size) for name, size in ones.items()}


def short_convolution_layer(
    c: ModelConfig, i: int, tensors: dict[str, Tensor], draw: torch.Generator
) -> dict[str, Tensor]:
    """Return the tensors with a short convolution in layer i instead of attention."""
    layer, wide = f"model.layers.{i}.conv.", c.hidden
    for name, shape in (("in_proj", (3 * wide, wide)), ("out_proj", (wide, wide)), ("conv", (wide, 1, 3))):
        tensors[f"{layer}{name}.weight"] = torch.randn(shape, generator=draw) * shape[-1] ** -0.5
    return tensors | {
        f"{layer}{name}.bias": torch.zeros(size) for name, size in (("in_proj", 3 * wide), ("conv", wide))
    }


def experts_of(c: ModelConfig, block: str, draw: torch.Generator) -> dict[str, Tensor]:
    """Return experts and a router with scores so far apart that rounding does not change the chosen experts."""
    e = c.mixture
    assert e
    networks = {f"{block}experts.{number}.": e.ffn for number in range(e.count)}
    networks |= {f"{block.removesuffix('mlp.')}{e.shared_block}.": e.shared} if e.shared else {}
    tensors = {
        f"{network}{name}.weight": torch.randn(shape, generator=draw) * shape[1] ** -0.5
        for network, width in networks.items()
        for name, shape in {
            "gate_proj": (width, c.hidden),
            "up_proj": (width, c.hidden),
            "down_proj": (c.hidden, width),
        }.items()
    }
    if e.shared and e.shared_block == "mlp.shared_expert":
        tensors |= {f"{block}shared_expert_gate.weight": torch.randn(1, c.hidden, generator=draw)}
    if e.sigmoid:
        tensors |= {f"{block}expert_bias": torch.zeros(e.count)}
    if c.activation == "clamped_swiglu":  # biases large enough to reach its bounds of 7
        ends = 6.0 - 12.0 * (torch.arange(e.ffn) % 2)
        biases = {"gate_proj": ends, "up_proj": ends, "down_proj": torch.zeros(c.hidden)}
        tensors |= {f"{block}experts.{i}.{name}.bias": x for i in range(e.count) for name, x in biases.items()}
        tensors |= {f"{block}{e.router}.bias": torch.zeros(e.count)}
    return tensors | {f"{block}{e.router}.weight": torch.randn(e.count, c.hidden, generator=draw)}


def experts_beside_dense(c: ModelConfig, layer: str, draw: torch.Generator) -> dict[str, Tensor]:
    """Return the experts, the router and the norms that Gemma 4's mixture adds to a dense layer."""
    e = c.mixture
    assert e
    norms = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
    tensors = {f"{layer}{name}.weight": torch.ones(c.hidden) for name in norms}
    tensors |= {f"{layer}router.scale": torch.ones(c.hidden), f"{layer}router.per_expert_scale": torch.ones(e.count)}
    tensors |= experts_of(c, layer, draw)
    tensors[f"{layer}router.proj.weight"] *= c.hidden**0.5  # the router's input is divided by it
    return tensors


def native(
    c: ModelConfig,
    mode: Mode | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> Decoder:
    tensors = tensors_of(c)
    target = Decoder(c, tensors if mode is None else Quantised(tensors, mode), dtype, CPU, kv_dtype=kv_dtype)
    assert target._stack.native
    return target


def by_torch(c: ModelConfig, dtype: torch.dtype, mode: Mode | None = None) -> Decoder:
    tensors = tensors_of(c)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "library", lambda: None)
        target = Decoder(c, tensors if mode is None else Quantised(tensors, mode), dtype, CPU)
    assert not target._stack.native
    return target


def text(count: int, seed: int = 3) -> list[int]:
    return torch.randint(0, 67, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def whole(target: Decoder, tokens: Sequence[int], taps: tuple[Tap, ...] = ()) -> tuple[Tensor, dict[Tap, Tensor]]:
    cache = target.new_cache()
    out = target.forward(pack_prefix(tokens, cache.acquire(), 0, CPU), cache, Want(taps=taps))
    return out.logits[0], {tap: states[0].float() for tap, states in out.taps.items()}
