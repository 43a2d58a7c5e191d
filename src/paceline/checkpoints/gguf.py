"""GGUF files in Hugging Face's terms: the config. (Tensors: `gguf_tensors`; tokenizer: `text.gguf_tokenizer`.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.checkpoints.family import GGUFLayout
from paceline.checkpoints.gguf_file import GGUFFile, read_gguf
from paceline.checkpoints.gguf_metadata import ROPE_FACTORS, Config, Fields, Metadata, widest
from paceline.checkpoints.gguf_tensors import GGUFTensors
from paceline.checkpoints.registry import ARCHITECTURES
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import GGUF, check


def open_gguf(path: Path) -> tuple[Config, GGUFTensors, Fields]:
    """Return the config in Hugging Face's terms, lazily read tensors, and the raw metadata (the tokenizer's source).

    Raises `ModelNotFound`, `CorruptModel`, and `UnsupportedModel` for architectures, layouts or tensor types that
    are not supported.
    """
    file = read_gguf(path)
    check(path, file.fields, GGUF)
    family, layout = ARCHITECTURES[_architecture(file)]
    try:
        config = {"model_type": family.name, **config_of(file, layout)}
    except KeyError as missing:
        raise CorruptModel(f"{path} lacks {missing}", "Fetch the file again") from missing
    return config, GGUFTensors(file, layout, config), file.fields


_OTHER_KINDS = (
    (
        "mamba rwkv jamba hybrid plamo2 kimi-linear",
        "is a recurrent model, whose state cannot drop rejected tokens",
        "Use an attention-only model",
    ),
    (
        "clip vl gemma3n chameleon ocr glm4v mllama wavtokenizer",
        "is a multimodal model or a part of one",
        "Use a text-only model of the same family",
    ),
    ("eagle3 dflash", "is a drafter, not a model", "Name it as the drafter of a model: head:FILE"),
    ("bert t5 gemma-embedding llama-embed", "is an encoder, which generates no text", "Use a decoder-only model"),
)
"""Parts of the names of unsupported architectures, what these are, and the fix."""


def _architecture(file: GGUFFile) -> str:
    """Return the architecture's name. Raises `UnsupportedModel` that says what an unsupported file is instead."""
    name: str = file.fields.get("general.architecture", "?")
    title = file.path.name
    if (kind := file.fields.get("general.type", "model")) in ("adapter", "imatrix", "mmproj"):
        raise UnsupportedModel(f"{title} is a GGUF of type {kind!r}, not a model", "Name the model's own file")
    if name in ARCHITECTURES:
        return name
    for markers, what, fix in _OTHER_KINDS:
        if any(marker in name for marker in markers.split()):
            raise UnsupportedModel(f"{title} ({name}) {what}", fix)
    raise UnsupportedModel(
        f"GGUF architecture {name!r} of {title} is not supported",
        f"Paceline reads {', '.join(sorted(ARCHITECTURES))} (Mistral and Mixtral models are stored as llama)",
    )


_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")


def config_of(file: GGUFFile, layout: GGUFLayout) -> Config:
    """Return the config in Hugging Face's terms. Raises `KeyError` for metadata that is missing, `CorruptModel`,
    `UnsupportedModel`."""
    meta = Metadata(file, layout.architecture, layout.keys)
    title = meta.file.path.name
    widths = [set(value) - {0} for key in _PER_LAYER if isinstance(value := meta.get(key), list)]
    uneven = any(len(found) > 1 for found in widths) or (widths and not layout.uneven)
    if uneven and not layout.own_sizes:
        raise UnsupportedModel(f"{title} has layers of different widths", "Use a uniform model")
    if meta.get("pooling_type", 0):
        raise UnsupportedModel(f"{title} embeds or ranks texts and writes none", "Use a language model")
    if (layers := meta["block_count"] - meta.get("nextn_predict_layers", 0)) < 1:
        raise CorruptModel(f"{title} has no layers but those that predict later tokens", "Fetch the file again")
    # Mamba-2 has 0 heads, which is as good as one.
    heads, hidden = max(1, widest(meta["attention.head_count"])), meta["embedding_length"]
    kv_heads = max(1, widest(meta.get("attention.head_count_kv", heads)))
    head_dim = meta.get("attention.key_length") or hidden // heads
    if not layout.own_sizes and meta.get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{title} has keys and values of different sizes", "Use another model")
    experts = "expert_" if meta.get("expert_count") else ""
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        # Where every layer is a mixture, there may be no other width.
        "intermediate_size": widest(meta.get("feed_forward_length", 0)) or meta[f"{experts}feed_forward_length"],
        # Nemotron-H has the other name for the same.
        "rms_norm_eps": meta.get("attention.layer_norm_epsilon") or meta["attention.layer_norm_rms_epsilon"],
        "rope_theta": meta.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta),
        "rope_freqs": meta.factors(ROPE_FACTORS[0]),
        "max_position_embeddings": meta["context_length"],
        "vocab_size": _vocab_size(meta),
        "tie_word_embeddings": "output.weight" not in meta.file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in meta.file.tensors,
        "hidden_act": "silu",
        "sliding_window": meta.get("attention.sliding_window") or None,
        "bos_token_id": meta.file.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos(meta.file.fields),
    }
    config |= layout.read(meta, config)
    rotated = meta.get("rope.dimension_count", head_dim)
    encodes = meta.get("rope.scaling.finetuned", True)  # for llama.cpp: whether positions are encoded
    if encodes and not layout.own_sizes and rotated != head_dim * config.get("partial_rotary_factor", 1):
        raise UnsupportedModel(f"{title} rotates only part of each head", "Use another model")
    return {key: value for key, value in config.items() if value is not None}


def _vocab_size(meta: Metadata) -> int:
    """Return the tokenizer's count, or more where the vocabulary is padded. A drafter may have no embedding."""
    table = meta.file.tensors.get("token_embd.weight")
    return table.shape[0] if table else meta.get("vocab_size") or len(meta.file.fields["tokenizer.ggml.tokens"])


def _rope_scaling(meta: Metadata) -> dict[str, Any] | None:
    original = meta.get("rope.scaling.original_context_length")
    long, short = meta.factors(ROPE_FACTORS[1]), meta.factors(ROPE_FACTORS[2])
    if long and short:
        scaling = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        return {**scaling, "original_max_position_embeddings": original or meta["context_length"]}
    kind = meta.get("rope.scaling.type") or "linear"
    factor = meta.get("rope.scaling.factor") or meta.get("rope.scale_linear")
    if kind == "none" or not factor or (kind == "linear" and factor == 1.0):
        return None
    entries = {
        "rope_type": kind,
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": meta.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": meta.get("rope.scaling.yarn_beta_slow"),
        "attention_factor": meta.get("rope.scaling.yarn_attn_factor"),
    }
    return {key: value for key, value in entries.items() if value is not None}


_EOS_TOKENS = {
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"),
    *("<EOT>", "<turn|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|return|>", "<|call|>"),
}
_HARMONY = {"<|return|>", "<|call|>"}
"""In gpt-oss's chat format these end a reply, and "<|end|>" ends a message, of which a reply may have several."""


def _eos(fields: Fields) -> list[int] | None:
    """Return all EOS ids: end of sequence, turn and message, then tokens spelled like one of `_EOS_TOKENS`.

    Converters write one id where config.json lists several, so llama.cpp too goes by the spelling.
    """
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [fields[key] for key in (f"tokenizer.ggml.{key}" for key in keys) if key in fields]
    tokens = fields.get("tokenizer.ggml.tokens") or ()
    wanted = _EOS_TOKENS - {"<|end|>"} if {*tokens} >= _HARMONY else _EOS_TOKENS
    spelled = [index for index, token in enumerate(tokens) if token in wanted]
    return list(dict.fromkeys(ids + spelled)) or None
