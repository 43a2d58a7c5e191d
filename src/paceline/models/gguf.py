"""GGUF files in Hugging Face's terms: config, tensor names, tensor layout.

To add a family: one entry in `ARCHITECTURES`, and its tensor names in `_LAYER` where they are new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.models.gguf_file import GGUFFile, GGUFTensor, read_gguf

Fields = Mapping[str, Any]
Fix = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What is peculiar to one GGUF architecture.

    `model_type`: Hugging Face's name. `paired`: query and key rows are stored with the two halves of each rotary
    pair side by side, while Hugging Face keeps all first halves before all second ones. `extra`: config entries
    that the metadata does not hold.
    """

    model_type: str
    paired: bool = False
    extra: tuple[tuple[str, Any], ...] = ()


ARCHITECTURES = {
    "llama": Architecture("llama", paired=True),
    "qwen2": Architecture("qwen2", extra=(("attention_bias", True),)),
}

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
_FACTORS = "rope_freqs.weight"


class GGUFTensors(Mapping[str, Tensor]):
    """The tensors of a file by Hugging Face name; each access reads and dequantises anew (quantised: float32)."""

    def __init__(self, tensors: dict[str, GGUFTensor], fixes: dict[str, Fix]) -> None:
        self._tensors, self._fixes = tensors, fixes

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name].read()
        fix = self._fixes.get(".".join(name.split(".")[3:5]))
        return fix(tensor) if fix else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def open_gguf(path: Path) -> tuple[dict[str, Any], GGUFTensors, Fields]:
    """Config in Hugging Face terms, lazily read tensors, and the raw metadata (the tokenizer's source).

    Raises `ModelNotFound`, `CorruptModel`, and `UnsupportedModel` for architectures, layouts or tensor types that
    are not read.
    """
    file = read_gguf(path)
    if int(file.fields.get("split.count", 1)) > 1:
        raise UnsupportedModel(f"{path} is one part of a split GGUF", "Join the parts with `llama-gguf-split --merge`")
    architecture = _architecture(file)
    try:
        config = _config(file, architecture)
    except KeyError as missing:
        raise CorruptModel(f"{path} lacks {missing}", "Fetch the file again") from missing
    except (TypeError, ZeroDivisionError) as error:
        raise CorruptModel(f"the metadata of {path} makes no model ({error})", "Fetch the file again") from error
    tensors = _named(file)
    for tensor in {tensor.kind: tensor for tensor in tensors.values()}.values():
        tensor.check()
    return config, GGUFTensors(tensors, _fixes(architecture, config)), file.fields


def _architecture(file: GGUFFile) -> Architecture:
    name = str(file.fields.get("general.architecture", "?"))
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF architecture {name!r} of {file.path.name} is not supported",
            f"Paceline reads {', '.join(sorted(ARCHITECTURES))} (Mistral models are stored as llama)",
        )
    if int(file.fields.get(f"{name}.expert_count", 0)) > 0:
        raise UnsupportedModel(f"{file.path.name} is a mixture of experts", "Use a dense model of the same family")
    return ARCHITECTURES[name]


def _named(file: GGUFFile) -> dict[str, GGUFTensor]:
    found = {_hf_name(name): tensor for name, tensor in file.tensors.items() if name != _FACTORS}
    if unknown := [name for name in found if not name.startswith(("model.", "lm_head."))]:
        raise UnsupportedModel(
            f"{file.path.name} holds {len(unknown)} tensors this architecture does not know ({unknown[0]}, ...)",
            "It is a variant of the architecture that Paceline does not run",
        )
    return found


def _hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; a name that is not known stays as it is."""
    if name in _TOP:
        return _TOP[name]
    block, _, rest = name.partition(".")
    index, _, rest = rest.partition(".")
    part, _, kind = rest.rpartition(".")
    if block != "blk" or part not in _LAYER:
        return name
    return f"model.layers.{index}.{_LAYER[part]}.{kind}"


def _fixes(architecture: Architecture, config: dict[str, Any]) -> dict[str, Fix]:
    if not architecture.paired:
        return {}
    return {
        "self_attn.q_proj": partial(unpair, heads=config["num_attention_heads"]),
        "self_attn.k_proj": partial(unpair, heads=config["num_key_value_heads"]),
    }


def unpair(weight: Tensor, heads: int) -> Tensor:
    """Rows [heads * D, ...] ordered (pair, half) within each head, to the order (half, pair)."""
    if weight.shape[0] % (2 * heads):
        raise CorruptModel(f"a projection of {weight.shape[0]} rows does not fit {heads} heads", "Fetch the file again")
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _config(file: GGUFFile, architecture: Architecture) -> dict[str, Any]:
    fields, prefix = file.fields, str(file.fields["general.architecture"])

    def field(key: str, default: Any = None) -> Any:
        return fields.get(f"{prefix}.{key}", default)

    heads, hidden = fields[f"{prefix}.attention.head_count"], fields[f"{prefix}.embedding_length"]
    if any(isinstance(field(key), list) for key in _PER_LAYER):
        raise UnsupportedModel(f"{file.path.name} has layers of different widths", "Use a uniform model")
    head_dim = field("attention.key_length") or hidden // heads
    if field("rope.dimension_count", head_dim) != head_dim or field("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{file.path.name} rotates or keeps only part of each head", "Use another model")
    config = {
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": fields[f"{prefix}.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": fields[f"{prefix}.feed_forward_length"],
        "rms_norm_eps": fields[f"{prefix}.attention.layer_norm_rms_epsilon"],
        "rope_theta": field("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(field),
        "max_position_embeddings": fields[f"{prefix}.context_length"],
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "hidden_act": "silu",
        "sliding_window": field("attention.sliding_window"),
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos(fields),
        **dict(architecture.extra),
    }
    if _FACTORS in file.tensors:
        config["rope_freqs"] = file.tensors[_FACTORS].read().to(torch.float64).flatten().tolist()
    return {key: value for key, value in config.items() if value is not None}


def _vocab_size(file: GGUFFile) -> int:
    """The rows of the embedding: the tokenizer's count, or more where the vocabulary is padded."""
    return file.tensors["token_embd.weight"].shape[0]


def _rope_scaling(field: Callable[..., Any]) -> dict[str, Any] | None:
    kind = field("rope.scaling.type") or "linear"
    factor = field("rope.scaling.factor") or field("rope.scale_linear")
    if kind == "none" or not factor or (kind == "linear" and factor == 1.0):
        return None
    scaling = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": field("rope.scaling.original_context_length"),
        "beta_fast": field("rope.scaling.yarn_beta_fast"),
        "beta_slow": field("rope.scaling.yarn_beta_slow"),
        "attention_factor": field("rope.scaling.attn_factor"),
    }
    return {key: value for key, value in scaling.items() if value is not None}


def _eos(fields: Fields) -> list[int] | None:
    """End of sequence, of turn and of message: any of them ends a reply."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [fields[key] for key in (f"tokenizer.ggml.{key}" for key in keys) if key in fields]
    return list(dict.fromkeys(ids)) or None
