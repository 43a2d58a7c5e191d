"""Write a GGUF file with the shape of a real model and random weights. It takes as much time and memory as the model.

Tensor types are the same as in the model's most common file: Q4_K_M as llama.cpp's `llama-quantize` assigns types, or
MXFP4 for the experts of gpt-oss and Q8_0 for the rest. Quantised values are random bytes. Scales give every matrix a
mean of 0 and a standard deviation of 0.02, so that logits are finite. The tokenizer is a byte-level BPE of the real
size with made-up merges. By default, the large mixture-of-experts models have fewer layers, so that two copies fit
into 20 GB of memory.

    python benchmarks/random_gguf.py llama-3.1-8b /tmp/llama-3.1-8b.gguf
    python benchmarks/random_gguf.py gpt-oss-20b /tmp/tiny.gguf --layers 2
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter, TokenType
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Type = GGMLQuantizationType
F32, BF16, Q4_K, Q6_K = Type.F32, Type.BF16, Type.Q4_K, Type.Q6_K
Q5_0, Q8_0, MXFP4 = Type.Q5_0, Type.Q8_0, Type.MXFP4

SPREAD = 0.02
"""Standard deviation of the weights."""
_PIECE = 1 << 25
"""Bytes to write at once."""


class Part(NamedTuple):
    """A tensor: its name, its shape (outermost dimension first) and its type. Vectors are float32."""

    name: str
    shape: tuple[int, ...]
    type: Type = F32


@dataclass(frozen=True)
class Model:
    """A model's shape.

    Attributes:
        architecture: llama.cpp's name of the architecture.
        layers: Default number of layers in the file.
        hidden: Width of the residual stream.
        vocab: Number of tokens.
        fields: Metadata by key without the architecture. The number of layers and `hidden` are added.
        layer: Function from the index of a layer and the number of layers to the layer's tensors, without "blk.N.".
        fields_of_layers: Function from the number of layers to the metadata that depends on it.
        top: Function from the number of layers to the tensors outside the layers, except for the final norm.
        final_norm: Name of the final norm.
    """

    architecture: str
    layers: int
    hidden: int
    vocab: int
    fields: Mapping[str, Any]
    layer: Callable[[int, int], Iterable[Part]]
    top: Callable[[int], Iterable[Part]]
    fields_of_layers: Callable[[int], Mapping[str, Any]] = lambda layers: {}
    final_norm: str = "output_norm"

    def parts(self, layers: int) -> Iterator[Part]:
        """Yield all tensors of a file with this many layers."""
        yield from self.top(layers)
        yield Part(f"{self.final_norm}.weight", (self.hidden,))
        for i in range(layers):
            yield from (part._replace(name=f"blk.{i}.{part.name}") for part in self.layer(i, layers))


# Tensors


def _more_bits(i: int, count: int) -> Type:
    """Return the type of the i-th of `count` value or down projections in a Q4_K_M file: half of them are Q6_K."""
    return Q6_K if i < count // 8 or i >= 7 * count // 8 or (i - count // 8) % 3 == 2 else Q4_K


def _norms(size: int, *names: str) -> Iterator[Part]:
    return (Part(f"{name}.weight", (size,)) for name in names)


def _attention(hidden: int, queries: int, kv: int, values: Type, kind: Type = Q4_K, out: int = 0) -> Iterator[Part]:
    """Yield the projections of attention. `queries`, `kv`: total width of the heads; `out`: width of the output."""
    yield Part("attn_q.weight", (queries, hidden), kind)
    if kv:
        yield Part("attn_k.weight", (kv, hidden), kind)
        yield Part("attn_v.weight", (kv, hidden), values)
    yield Part("attn_output.weight", (hidden, out or queries), kind)


def _mlp(hidden: int, width: int, down: Type) -> Iterator[Part]:
    yield Part("ffn_gate.weight", (width, hidden), Q4_K)
    yield Part("ffn_up.weight", (width, hidden), Q4_K)
    yield Part("ffn_down.weight", (hidden, width), down)


def _experts(hidden: int, count: int, width: int, kind: Type, down: Type) -> Iterator[Part]:
    yield Part("ffn_gate_inp.weight", (count, hidden))
    yield Part("ffn_gate_exps.weight", (count, width, hidden), kind)
    yield Part("ffn_up_exps.weight", (count, width, hidden), kind)
    yield Part("ffn_down_exps.weight", (count, hidden, width), down)


def _shared_expert(hidden: int, width: int, down: Type) -> Iterator[Part]:
    return (part._replace(name=part.name.replace(".", "_shexp.")) for part in _mlp(hidden, width, down))


def _tables(vocab: int, hidden: int, embedding: Type, head: Type | None) -> Iterator[Part]:
    yield Part("token_embd.weight", (vocab, hidden), embedding)
    if head is not None:
        yield Part("output.weight", (vocab, hidden), head)


def _heads(count: int, kv: int, size: int) -> dict[str, int]:
    return {
        "attention.head_count": count,
        "attention.head_count_kv": kv,
        "attention.key_length": size,
        "attention.value_length": size,
    }


def _expert_sizes(count: int, used: int, width: int) -> dict[str, int]:
    return {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": width}


def _state_sizes(heads: int, groups: int, head: int) -> dict[str, int]:
    """Return the metadata of a recurrent state. `head`: Size of a value head."""
    sizes = {"conv_kernel": 4, "state_size": 128, "group_count": groups, "time_step_rank": heads}
    return {f"ssm.{name}": size for name, size in (sizes | {"inner_size": head * heads}).items()}


# Models


def _llama_layer(i: int, layers: int) -> Iterator[Part]:
    yield from _norms(4096, "attn_norm", "ffn_norm")
    yield from _attention(4096, 32 * 128, 8 * 128, _more_bits(i, layers))
    yield from _mlp(4096, 14336, _more_bits(i, layers))


LLAMA_3_1_8B = Model(
    "llama",
    layers=32,
    hidden=4096,
    vocab=128256,
    fields={
        **_heads(32, 8, 128),
        "context_length": 131072,
        "feed_forward_length": 14336,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
        "rope.dimension_count": 128,
        "vocab_size": 128256,
    },
    layer=_llama_layer,
    top=lambda layers: [*_tables(128256, 4096, Q4_K, Q6_K), Part("rope_freqs.weight", (64,))],
)


def _qwen3_layer(i: int, layers: int) -> Iterator[Part]:
    yield from _norms(2048, "attn_norm", "ffn_norm")
    yield from _norms(128, "attn_q_norm", "attn_k_norm")
    yield from _attention(2048, 32 * 128, 4 * 128, _more_bits(i, layers))
    yield from _experts(2048, 128, 768, Q4_K, _more_bits(i, layers))


QWEN3_30B_A3B = Model(
    "qwen3moe",
    layers=16,  # of 48
    hidden=2048,
    vocab=151936,
    fields={
        **_heads(32, 4, 128),
        "context_length": 40960,
        "feed_forward_length": 6144,
        **_expert_sizes(128, 8, 768),
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1000000.0,
    },
    layer=_qwen3_layer,
    top=lambda layers: _tables(151936, 2048, Q4_K, Q6_K),
)


def _gpt_oss_layer(i: int, layers: int) -> Iterator[Part]:
    yield from _norms(2880, "attn_norm", "post_attention_norm")
    yield from _attention(2880, 64 * 64, 8 * 64, Q8_0, Q8_0)
    yield Part("attn_sinks.weight", (64,))
    for name, size in (("attn_q", 64 * 64), ("attn_k", 8 * 64), ("attn_v", 8 * 64), ("attn_output", 2880)):
        yield Part(f"{name}.bias", (size,))
    yield from _experts(2880, 32, 2880, MXFP4, MXFP4)
    yield Part("ffn_gate_inp.bias", (32,))
    yield from (Part(f"ffn_{name}_exps.bias", (32, 2880)) for name in ("gate", "up", "down"))


GPT_OSS_20B = Model(
    "gpt-oss",
    layers=12,  # of 24
    hidden=2880,
    vocab=201088,
    fields={
        **_heads(64, 8, 64),
        "context_length": 131072,
        "feed_forward_length": 2880,
        **_expert_sizes(32, 4, 2880),
        "attention.sliding_window": 128,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 150000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 4096,
    },
    layer=_gpt_oss_layer,
    top=lambda layers: _tables(201088, 2880, Q8_0, Q8_0),
)


def _slides(i: int, layers: int) -> bool:
    """Return True for Gemma 4's layers with a sliding window: all but every sixth and the last."""
    return (i + 1) % 6 != 0 and i + 1 != layers


def _shared(layers: int) -> int:
    """Return the number of Gemma 4's upper layers that reuse keys and values of lower layers: 18 of 42.

    It is a multiple of 6, as llama.cpp expects.
    """
    return layers * 3 // 7 // 6 * 6


_GEMMA_4 = {
    "attention.key_length_swa": 256,
    "attention.value_length_swa": 256,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1000000.0,
    "rope.freq_base_swa": 10000.0,
    "rope.dimension_count": 512,
    "rope.dimension_count_swa": 256,
    "final_logit_softcapping": 30.0,
}


def _gemma_layer(i: int, layers: int) -> Iterator[Part]:
    size, own = 256 if _slides(i, layers) else 512, layers - _shared(layers)
    yield from _norms(2560, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm")
    yield from _norms(size, "attn_q_norm", *(["attn_k_norm"] if i < own else []))
    yield from _attention(2560, 8 * size, 2 * size if i < own else 0, _more_bits(i, own))
    yield from _mlp(2560, 10240, _more_bits(i, layers))
    yield Part("inp_gate.weight", (256, 2560), Q4_K)
    yield Part("proj.weight", (2560, 256), Q4_K)
    yield Part("layer_output_scale.weight", (1,))


def _gemma_top(layers: int) -> Iterator[Part]:
    yield from _tables(262144, 2560, Q6_K, None)
    yield Part("per_layer_token_embd.weight", (262144, 256 * layers), Q6_K)
    yield Part("per_layer_model_proj.weight", (256 * layers, 2560), BF16)
    yield Part("per_layer_proj_norm.weight", (256,))
    yield Part("rope_freqs.weight", (256,))


GEMMA_4_E4B = Model(
    "gemma4",
    layers=42,
    hidden=2560,
    vocab=262144,
    fields={
        **_heads(8, 2, 512),
        **_GEMMA_4,
        "context_length": 131072,
        "feed_forward_length": 10240,
        "embedding_length_per_layer_input": 256,
        "attention.sliding_window": 512,
    },
    layer=_gemma_layer,
    top=_gemma_top,
    fields_of_layers=lambda layers: {
        "attention.shared_kv_layers": _shared(layers),
        "attention.sliding_window_pattern": [_slides(i, layers) for i in range(layers)],
    },
)


def _gemma_moe_layer(i: int, layers: int) -> Iterator[Part]:
    slides, down = _slides(i, layers), Q8_0 if _more_bits(i, layers) == Q6_K else Q5_0  # blocks of 256 do not fit 704
    size, kv = (256, 8) if slides else (512, 2)
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    yield from _norms(2816, *norms, "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
    yield from _norms(size, "attn_q_norm", "attn_k_norm")
    values = _more_bits(i, layers)
    yield from (x for x in _attention(2816, 16 * size, kv * size, values) if slides or x.name != "attn_v.weight")
    yield from _mlp(2816, 2112, down)
    yield Part("ffn_gate_inp.weight", (128, 2816))
    yield Part("ffn_gate_inp.scale", (2816,))
    yield Part("ffn_gate_up_exps.weight", (128, 2 * 704, 2816), Q4_K)
    yield Part("ffn_down_exps.weight", (128, 2816, 704), down)
    yield Part("ffn_down_exps.scale", (128,))
    yield Part("layer_output_scale.weight", (1,))


GEMMA_4_26B_A4B = Model(
    "gemma4",
    layers=12,  # of 30
    hidden=2816,
    vocab=262144,
    fields={
        **_heads(16, 8, 512),
        **_GEMMA_4,
        "context_length": 262144,
        "feed_forward_length": 2112,
        **_expert_sizes(128, 8, 704),
        "embedding_length_per_layer_input": 0,
        "attention.sliding_window": 1024,
    },
    layer=_gemma_moe_layer,
    top=lambda layers: [*_tables(262144, 2816, Q6_K, None), Part("rope_freqs.weight", (256,))],
    fields_of_layers=lambda layers: {
        "attention.head_count_kv": [8 if _slides(i, layers) else 2 for i in range(layers)],
        "attention.sliding_window_pattern": [_slides(i, layers) for i in range(layers)],
    },
)


def _qwen3_5_layer(i: int, layers: int) -> Iterator[Part]:
    yield from _norms(2560, "attn_norm", "post_attention_norm")
    if (i + 1) % 4 == 0:
        yield from _norms(256, "attn_q_norm", "attn_k_norm")
        yield from _attention(2560, 2 * 16 * 256, 4 * 256, _more_bits(i, layers), out=16 * 256)  # queries and gates
    else:
        keys, values, heads = 16 * 128, 32 * 128, 32
        yield Part("attn_qkv.weight", (2 * keys + values, 2560), _more_bits(i, layers))
        yield Part("attn_gate.weight", (values, 2560), Q4_K)
        yield Part("ssm_conv1d.weight", (2 * keys + values, 4))
        yield Part("ssm_dt.bias", (heads,))
        yield Part("ssm_a", (heads,))
        yield Part("ssm_beta.weight", (heads, 2560), Q4_K)
        yield Part("ssm_alpha.weight", (heads, 2560), Q4_K)
        yield Part("ssm_norm.weight", (128,))
        yield Part("ssm_out.weight", (2560, values), Q4_K)
    yield from _mlp(2560, 9216, _more_bits(i, layers))


QWEN3_5_4B = Model(
    "qwen35",
    layers=32,
    hidden=2560,
    vocab=248320,
    fields={
        **_heads(16, 4, 256),
        "context_length": 262144,
        "feed_forward_length": 9216,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000000.0,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "full_attention_interval": 4,
        **_state_sizes(32, 16, 128),
    },
    layer=_qwen3_5_layer,
    top=lambda layers: _tables(248320, 2560, Q6_K, None),
)


def _glm_layer(i: int, layers: int) -> Iterator[Part]:
    values = _more_bits(i, layers)
    yield from _norms(2048, "attn_norm", "ffn_norm")
    yield from (*_norms(768, "attn_q_a_norm"), *_norms(512, "attn_kv_a_norm"))
    yield Part("attn_q_a.weight", (768, 2048), Q4_K)
    yield Part("attn_q_b.weight", (20 * 256, 768), Q4_K)
    yield Part("attn_kv_a_mqa.weight", (512 + 64, 2048), Q4_K)
    yield Part("attn_k_b.weight", (20, 512, 192), Q8_0)  # blocks of 256 do not fit 192
    yield Part("attn_v_b.weight", (20, 256, 512), Q4_K)
    yield Part("attn_output.weight", (2048, 20 * 256), Q4_K)
    if i == 0:
        yield from _mlp(2048, 10240, values)
        return
    yield from _experts(2048, 64, 1536, Q4_K, values)
    yield from _shared_expert(2048, 1536, values)
    yield Part("exp_probs_b.bias", (64,))


GLM_4_7_FLASH = Model(
    "deepseek2",
    layers=20,  # of 47
    hidden=2048,
    vocab=154880,
    fields={
        "attention.head_count": 20,
        "attention.head_count_kv": 1,
        "attention.key_length": 512 + 64,
        "attention.value_length": 512,
        "attention.key_length_mla": 256,
        "attention.value_length_mla": 256,
        "attention.q_lora_rank": 768,
        "attention.kv_lora_rank": 512,
        "context_length": 202752,
        "vocab_size": 154880,
        "feed_forward_length": 10240,
        "leading_dense_block_count": 1,
        **_expert_sizes(64, 4, 1536),
        "expert_shared_count": 1,
        "expert_weights_scale": 1.8,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1000000.0,
        "rope.dimension_count": 64,
    },
    layer=_glm_layer,
    top=lambda layers: _tables(154880, 2048, Q4_K, Q6_K),
)


def _lfm2_attends(i: int) -> bool:
    return i in (2, 6, 10, 14, 18, 21)


def _lfm2_layer(i: int, layers: int) -> Iterator[Part]:
    yield from _norms(2048, "attn_norm", "ffn_norm")
    if _lfm2_attends(i):
        yield from _norms(64, "attn_q_norm", "attn_k_norm")
        yield from _attention(2048, 32 * 64, 8 * 64, _more_bits(i, layers))
    else:
        yield Part("shortconv.conv.weight", (2048, 3))
        yield Part("shortconv.in_proj.weight", (3 * 2048, 2048), Q4_K)
        yield Part("shortconv.out_proj.weight", (2048, 2048), Q4_K)
    if i < 2:
        yield from _mlp(2048, 7168, _more_bits(i, layers))
        return
    yield from _experts(2048, 32, 1792, Q4_K, _more_bits(i, layers))
    yield Part("exp_probs_b.bias", (32,))


LFM2_8B_A1B = Model(
    "lfm2moe",
    layers=24,
    hidden=2048,
    vocab=65536,
    fields={
        "attention.head_count": 32,
        "context_length": 128000,
        "vocab_size": 65536,
        "feed_forward_length": 7168,
        "leading_dense_block_count": 2,
        **_expert_sizes(32, 4, 1792),
        "expert_gating_func": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1000000.0,
        "shortconv.l_cache": 3,
    },
    layer=_lfm2_layer,
    top=lambda layers: _tables(65536, 2048, Q6_K, None),
    final_norm="token_embd_norm",
    fields_of_layers=lambda layers: {"attention.head_count_kv": [8 if _lfm2_attends(i) else 0 for i in range(layers)]},
)


def _granite_attends(i: int) -> bool:
    return i in (5, 15, 25, 35)


def _mamba(hidden: int, heads: int, groups: int, kind: Type) -> Iterator[Part]:
    """Yield the tensors of Mamba-2 with heads of 64 and states of 128 elements. `kind`: Type of `ssm_in`."""
    inner, channels = 64 * heads, 64 * heads + 2 * groups * 128
    yield Part("ssm_in.weight", (inner + channels + heads, hidden), kind)
    yield Part("ssm_conv1d.weight", (channels, 4))
    yield Part("ssm_conv1d.bias", (channels,))
    yield Part("ssm_dt.bias", (heads,))
    yield from (Part(name, (heads, 1)) for name in ("ssm_a", "ssm_d"))
    yield Part("ssm_norm.weight", (groups, inner // groups))
    yield Part("ssm_out.weight", (hidden, inner), Q4_K)


def _granite_layer(i: int, layers: int) -> Iterator[Part]:
    values = _more_bits(i, layers)
    yield from _norms(1536, "attn_norm", "ffn_norm")
    if _granite_attends(i):
        yield from _attention(1536, 12 * 128, 4 * 128, values)
    else:
        yield from _mamba(1536, 48, 1, Q4_K)
    yield from _experts(1536, 64, 512, Q4_K, values)
    yield from _shared_expert(1536, 1024, values)


GRANITE_4_H_TINY = Model(
    "granitehybrid",
    layers=40,
    hidden=1536,
    vocab=100352,
    fields={
        **_heads(12, 4, 128),
        "attention.scale": 0.0078125,
        "embedding_scale": 12.0,
        "residual_scale": 0.22,
        "logit_scale": 6.0,
        "context_length": 131072,
        "vocab_size": 100352,
        "feed_forward_length": 512,
        "expert_shared_feed_forward_length": 1024,
        **_expert_sizes(64, 6, 512),
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 128,
        "rope.freq_base": 10000.0,
        "rope.scaling.finetuned": False,  # no positions
        **_state_sizes(48, 1, 64),
    },
    layer=_granite_layer,
    top=lambda layers: _tables(100352, 1536, Q6_K, None),
    fields_of_layers=lambda layers: {
        "attention.head_count_kv": [4 if _granite_attends(i) else 0 for i in range(layers)]
    },
)

_NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
"""A letter for each layer: M for Mamba-2, E for experts, * for attention."""


def _nemotron_layer(i: int, layers: int) -> Iterator[Part]:
    more = Q8_0 if _more_bits(i, layers) == Q6_K else Q5_0  # K-quants need rows divisible by 256
    yield from _norms(2688, "attn_norm")
    if _NEMOTRON[i] == "M":
        yield from _mamba(2688, 64, 8, Q5_0)
    elif _NEMOTRON[i] == "*":
        yield from (
            part._replace(type=Q4_K if part.name == "attn_output.weight" else part.type)
            for part in _attention(2688, 32 * 128, 2 * 128, more, Q5_0)
        )
    else:
        yield from (x for x in _experts(2688, 128, 1856, Q5_0, more) if x.name != "ffn_gate_exps.weight")
        yield Part("ffn_up_shexp.weight", (3712, 2688), Q5_0)
        yield Part("ffn_down_shexp.weight", (2688, 3712), more)
        yield Part("exp_probs_b.bias", (128,))


NEMOTRON_3_NANO = Model(
    "nemotron_h_moe",
    layers=20,  # of 52
    hidden=2688,
    vocab=131072,
    fields={
        **_heads(32, 2, 128),
        "context_length": 262144,
        "vocab_size": 131072,
        **_expert_sizes(128, 6, 1856),
        "expert_shared_count": 1,
        "expert_shared_feed_forward_length": 3712,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.dimension_count": 84,
        "rope.scaling.finetuned": False,  # no positions
        **_state_sizes(64, 8, 64),
    },
    layer=_nemotron_layer,
    top=lambda layers: _tables(131072, 2688, Q5_0, Q8_0),
    fields_of_layers=lambda layers: {
        "attention.head_count_kv": [2 * (kind == "*") for kind in _NEMOTRON[:layers]],
        "feed_forward_length": [1856 * (kind == "E") for kind in _NEMOTRON[:layers]],
    },
)

MODELS = {
    "llama-3.1-8b": LLAMA_3_1_8B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
    "gemma-4-e4b": GEMMA_4_E4B,
    "gemma-4-26b-a4b": GEMMA_4_26B_A4B,
    "qwen3.5-4b": QWEN3_5_4B,
    "glm-4.7-flash": GLM_4_7_FLASH,
    "lfm2-8b-a1b": LFM2_8B_A1B,
    "granite-4-h-tiny": GRANITE_4_H_TINY,
    "nemotron-3-nano": NEMOTRON_3_NANO,
}


# Values


def _half(value: float) -> Bytes:
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)


def _rms(values: Iterable[float]) -> float:
    return float(np.sqrt(np.mean(np.square([*values]))))


_FOUR_BITS, _SIX_BITS, _SIGNED = range(16), range(64), range(-128, 128)
_Q4_K_SCALE = SPREAD / _rms(_SIX_BITS) / _rms(q - 7.5 for q in _FOUR_BITS)
_Q6_K_SCALE = SPREAD / _rms(_SIGNED) / _rms(q - 32 for q in _SIX_BITS)
_SCALES = {Q5_0: SPREAD / _rms(range(-16, 16)), Q8_0: SPREAD / _rms(_SIGNED)}
_MXFP4_EXPONENT = 127 + round(math.log2(SPREAD / _rms([0, 0.5, 1, 1.5, 2, 3, 4, 6])))


def _blocks(kind: Type, count: int, dice: np.random.Generator) -> Bytes:
    """Return random blocks, uint8 [count, bytes per block], with the layouts of ggml's `ggml-common.h`."""
    size = GGML_QUANT_SIZES[kind][1]
    words = dice.integers(0, 2**64, -(-count * size // 8), np.uint64)  # seven times as fast as single bytes
    blocks = words.view(np.uint8)[: count * size].reshape(count, size)
    if (
        kind == Q4_K
    ):  # two float16 factors, 8 scales and 8 minima of 6 bits, values; each minimum is 7.5 times its scale
        blocks[:, :2], blocks[:, 2:4] = _half(_Q4_K_SCALE), _half(7.5 * _Q4_K_SCALE)
        blocks[:, 8:12] = blocks[:, 4:8]
        blocks[:, 12:16] = (blocks[:, 12:16] & 15) * 17
    elif kind == Q6_K:  # values, 16 signed scales, a float16 factor
        blocks[:, -2:] = _half(_Q6_K_SCALE)
    elif kind in _SCALES:  # a float16 factor, values
        blocks[:, :2] = _half(_SCALES[kind])
    else:
        assert kind == MXFP4, kind
        blocks[:, 0] = _MXFP4_EXPONENT
    return blocks


def _floats(part: Part, dice: np.random.Generator) -> NDArray[np.float32]:
    """Return the values of a float tensor."""
    if part.name == "rope_freqs.weight" and part.shape == (256,):  # Gemma 4 rotates a quarter of each head
        return np.repeat(np.float32([1, 1e30]), [64, 192])
    if part.name.endswith(("norm.weight", "scale.weight", "freqs.weight")):
        return np.ones(part.shape, np.float32)
    if part.name.endswith("ssm_a"):
        return np.full(part.shape, -0.5, np.float32)
    return dice.standard_normal(part.shape, np.float32) * np.float32(SPREAD)


def _pieces(part: Part, dice: np.random.Generator) -> Iterator[bytes]:
    """Yield the bytes of a tensor."""
    if part.type == F32:
        yield _floats(part, dice).tobytes()
    elif part.type == BF16:
        yield (_floats(part, dice).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        elements, size = GGML_QUANT_SIZES[part.type]
        left = math.prod(part.shape) // elements
        while left:
            count = min(left, _PIECE // size)
            yield _blocks(part.type, count, dice).tobytes()
            left -= count


# The file


def _tokenizer(vocab: int) -> dict[str, Any]:
    """Return the metadata of a tokenizer with all bytes, all pairs of bytes, some triples, and two control tokens."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [chr(256 + i) for i in range(256 - len(printable))]
    tokens, merges = [*map(chr, printable), *others], []
    for i in range(vocab - 256 - 2):
        left, right = tokens[i // 256], tokens[i % 256]
        merges.append(f"{left} {right}")
        tokens.append(left + right)
    tokens += ["<|begin|>", "<|end|>"]
    kinds = [TokenType.NORMAL] * (vocab - 2) + [TokenType.CONTROL] * 2
    return {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": tokens,
        "token_type": [*map(int, kinds)],
        "merges": merges,
        "bos_token_id": vocab - 2,
        "eos_token_id": vocab - 1,
    }


def write(model: Model, path: Path, layers: int) -> None:
    """Write a file with random weights, piece by piece."""
    writer = GGUFWriter(path, model.architecture)
    fields = {"block_count": layers, "embedding_length": model.hidden, **model.fields, **model.fields_of_layers(layers)}
    own = {f"{model.architecture}.{key}": value for key, value in fields.items()}
    for key, value in {**own, **{f"tokenizer.ggml.{k}": v for k, v in _tokenizer(model.vocab).items()}}.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        writer.add_key_value(key, value, GGUFValueType.UINT32 if whole else GGUFValueType.get_type(value))
    parts = [*model.parts(layers)]
    for part in parts:
        elements, size = GGML_QUANT_SIZES[part.type]
        shape = (*part.shape[:-1], part.shape[-1] // elements * size)
        writer.add_tensor_info(part.name, shape, np.dtype(np.uint8), math.prod(shape), part.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    (file,), dice = writer.fout, np.random.Generator(np.random.SFC64(0))
    for part in parts:
        writer.write_padding(file, file.tell())
        for piece in _pieces(part, dice):
            file.write(piece)
    writer.write_padding(file, file.tell())
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("path", type=Path, help="file to write")
    parser.add_argument("--layers", type=int, help="number of layers to write")
    args = parser.parse_args()
    model = MODELS[args.model]
    layers = args.layers or model.layers
    write(model, args.path, layers)
    print(f"wrote {args.path}: {layers} layers, {args.path.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
