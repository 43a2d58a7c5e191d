"""Tiny GGUF files with one random layer, or with any fields and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from tests.support.lazy import transformers

Q = gguf.GGMLQuantizationType
HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 64, 4, 2, 96, 5
"""Sizes of the model that `write_gguf` writes."""


def write_file(
    path: Path, arch: str, fields: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor | np.ndarray]]
) -> None:
    """Write a file with these fields and tensors, in float32.

    Args:
        fields: Fields by name. Names outside "tokenizer." and "general." have no architecture prefix. None is skipped.
        tensors: Tensors by name. Byte arrays are stored as MXFP4.
    """
    writer = gguf.GGUFWriter(path, arch)
    for name, value in fields.items():
        key = name if name.startswith(("tokenizer.", "general.", "split.", f"{arch}.")) else f"{arch}.{name}"
        if value is not None:
            writer.add_key_value(key, value, _type(value))
    for name, tensor in tensors:
        values = tensor.detach().float().contiguous().numpy() if isinstance(tensor, Tensor) else tensor
        writer.add_tensor(name, values, raw_dtype=Q.MXFP4 if values.dtype == np.uint8 else None)
    finish(writer)


def _type(value: Any) -> gguf.GGUFValueType:
    """Return the GGUF type that converters use for a value. Integers are unsigned."""
    kind = gguf.GGUFValueType.get_type(value)
    unsigned = kind == gguf.GGUFValueType.INT32 and value >= 0
    return gguf.GGUFValueType.UINT32 if unsigned else kind


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the writer's contents and close its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def config_fields(c: Any) -> dict[str, Any]:
    """Return the fields that nearly every architecture has, from a transformers config."""
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    return {
        **{"block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings},
        **{"embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size},
        **{"attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads},
        **dict.fromkeys(("attention.key_length", "attention.value_length"), getattr(c, "head_dim", None)),
        "attention.layer_norm_rms_epsilon": getattr(c, "rms_norm_eps", None),
        "rope.freq_base": rope["rope_theta"],
    }


def rope_scaling_fields(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of RoPE scaling, or {} without scaling."""
    if rope["rope_type"] not in ("linear", "yarn"):
        return {}
    return {
        **{"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]},
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
    }


def rope_tensors(config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with RoPE factors per dimension, from a transformers config."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"])
    if rope.get("rope_type") == "llama3":
        plain = 1 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        yield "rope_freqs.weight", plain / scaled


@cache
def _names(arch: str) -> gguf.TensorNameMap:
    number = {name: one for one, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    return gguf.get_tensor_name_map(number, 64)


def stored_name(arch: str, name: str) -> str:
    """Return the name of a tensor in GGUF files, from the gguf library's table."""
    stored = _names(arch).get_name(name, (".weight", ".bias"))
    assert stored, name
    return stored


def write_gguf(
    path: Path, arch: str = "llama", tied: bool = True, kind: Q = Q.F32, **extra: Any
) -> dict[str, np.ndarray]:
    """Write a model with one layer. Return its tensors by GGUF name. `extra`: layers, fields, tokens, tensors."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(extra.pop("layers", 1))
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in extra.pop("fields", {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(extra.pop("tokens", ["a", "b", "ab", "<s>", "</s>"]))
    writer.add_token_merges(["a b"])
    writer.add_token_types([1, 1, 1, 3, 3])
    writer.add_bos_token_id(3)
    writer.add_eos_token_id(4)
    shapes = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v.weight": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (FFN, HIDDEN),
        "blk.0.ffn_up.weight": (FFN, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FFN),
        **({} if tied else {"output.weight": (VOCAB, HIDDEN)}),
        **extra.pop("tensors", {}),
    }
    tensors = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        stored = kind if len(shape) > 1 else Q.F32
        raw = values if stored in (Q.F32, Q.F16) else gguf.quantize(values, stored)
        raw = raw.astype(np.float16) if stored == Q.F16 else raw
        tensors[name] = gguf.dequantize(raw, stored)
        writer.add_tensor(name, raw, raw_dtype=None if stored in (Q.F32, Q.F16) else stored)
    finish(writer)
    return tensors
