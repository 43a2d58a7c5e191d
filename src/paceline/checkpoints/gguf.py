"""The config of a GGUF file, under Hugging Face's keys. `gguf_tensors` reads the tensors, and `text.gguf_tokenizer`
reads the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.checkpoints.family import GGUFLayout
from paceline.checkpoints.gguf_file import GGUFFile, read_gguf
from paceline.checkpoints.gguf_metadata import ROPE_FACTORS, Config, Fields, Metadata, largest_size
from paceline.checkpoints.gguf_tensors import GGUFTensors
from paceline.checkpoints.registry import ARCHITECTURES
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import GGUF, check


def open_gguf(path: Path) -> tuple[Config, GGUFTensors, Fields]:
    """Open a GGUF file.

    Returns:
        The config under Hugging Face's keys, the tensors, which are read on access, and the raw metadata, which
        contains the tokenizer.

    Raises:
        ModelNotFound: If the file does not exist.
        CorruptModel: If the file is damaged.
        UnsupportedModel: If the architecture, layout or a tensor type is not supported.
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
"""For each group of unsupported architectures: a part of their names, a description, and the fix."""


def _architecture(file: GGUFFile) -> str:
    """Return the architecture's name. Raise `UnsupportedModel` if the file is not a supported model."""
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
    """Return the config under Hugging Face's keys.

    Raises:
        KeyError: If metadata is missing.
        CorruptModel: If metadata is invalid.
        UnsupportedModel: If the metadata describes a model that is not supported.
    """
    meta = Metadata(file, layout.architecture, layout.keys)
    title = meta.file.path.name
    widths = [set(value) - {0} for key in _PER_LAYER if isinstance(value := meta.get(key), list)]
    uneven = any(len(found) > 1 for found in widths) or (widths and not layout.uneven)
    if uneven and not layout.own_sizes:
        raise UnsupportedModel(f"{title} has layers of different widths", "Use a uniform model")
    if meta.get("pooling_type", 0):
        raise UnsupportedModel(f"{title} embeds or ranks texts, but does not generate text", "Use a language model")
    if (layers := meta["block_count"] - meta.get("nextn_predict_layers", 0)) < 1:
        raise CorruptModel(f"{title} has no layers except MTP layers", "Fetch the file again")
    # Mamba-2 has 0 heads. Using 1 avoids a division by zero, and has no other effect.
    heads, hidden = max(1, largest_size(meta["attention.head_count"])), meta["embedding_length"]
    kv_heads = max(1, largest_size(meta.get("attention.head_count_kv", heads)))
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
        # If every layer is a mixture of experts, the metadata may contain only the experts' width.
        "intermediate_size": largest_size(meta.get("feed_forward_length", 0)) or meta[f"{experts}feed_forward_length"],
        # Nemotron-H uses another key for the same value.
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
    encodes = meta.get("rope.scaling.finetuned", True)  # llama.cpp uses this key to turn positions off
    if encodes and not layout.own_sizes and rotated != head_dim * config.get("partial_rotary_factor", 1):
        raise UnsupportedModel(f"{title} rotates only part of each head", "Use another model")
    return {key: value for key, value in config.items() if value is not None}


def _vocab_size(meta: Metadata) -> int:
    """Return the size of the vocabulary, including padding. A drafter may have no embedding that shows this size."""
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
"""The tokens that end a reply in gpt-oss's chat format. "<|end|>" only ends a message, and a reply may have several
messages."""


def _eos(fields: Fields) -> list[int] | None:
    """Return all EOS ids: the tokens that end a sequence, a turn or a message, and all tokens in `_EOS_TOKENS`.

    Tokens are also found by their text, because converters store a single id even if config.json lists several.
    llama.cpp does the same.
    """
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [fields[key] for key in (f"tokenizer.ggml.{key}" for key in keys) if key in fields]
    tokens = fields.get("tokenizer.ggml.tokens") or ()
    wanted = _EOS_TOKENS - {"<|end|>"} if {*tokens} >= _HARMONY else _EOS_TOKENS
    spelled = [index for index, token in enumerate(tokens) if token in wanted]
    return list(dict.fromkeys(ids + spelled)) or None
