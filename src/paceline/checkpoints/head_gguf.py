"""Learned drafters in GGUF files that llama.cpp's converter wrote: EAGLE-3, DFlash and DSpark.

Taps are numbered as in Paceline, by the layer that the stream enters. llama.cpp's tensor names are translated to the
names in `models/heads.py`. The embedding and the output head of a DFlash drafter are copies of the target's, unless the
drafter has a reduced vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoints.family import LAYER, QK_NORMS, GGUFLayout
from paceline.checkpoints.gguf import config_of
from paceline.checkpoints.gguf_file import GGUFFile, read_gguf
from paceline.checkpoints.gguf_metadata import Config, Metadata, layer_types
from paceline.checkpoints.gguf_tensors import GGUFTensors
from paceline.checkpoints.head_dflash import block_layer
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import GGUF, check
from paceline.models.heads import BlockConfig, EagleConfig, HeadConfig, HeadFile
from paceline.models.lazy import Renamed
from paceline.types import Tap

_UNSUPPORTED_KEYS = (
    "logit_scale",
    "embedding_scale",
    "attention.scale",
    "attention.value_scale",
    "final_logit_softcapping",
)
"""Metadata keys that only unsupported variants of these drafters have."""


def is_head_gguf(path: Path) -> bool:
    """Return True if a GGUF file holds only a drafter: EAGLE-3, DFlash, or an MTP layer without its model. Raise the
    errors of `read_gguf`."""
    file = read_gguf(path)
    cut = "blk.0.attn_norm.weight" not in file.tensors and any(".nextn." in name for name in file.tensors)
    return cut or file.fields.get("general.architecture") in _LAYOUTS


def open_head_gguf(path: Path) -> HeadFile | None:
    """Open the drafter in a GGUF file, without reading its tensors. Return None if the file holds a model.

    Raises:
        ModelNotFound: If the file does not exist.
        CorruptModel: If the file is damaged.
        UnsupportedModel: If the drafter is not supported.
    """
    file = read_gguf(path)
    name = file.fields.get("general.architecture")
    if name not in _LAYOUTS:
        return None
    check(path, file.fields, GGUF)
    layout, make = _LAYOUTS[name]
    try:
        raw = config_of(file, layout)
        tensors = _tensors(file, layout, raw)
        config = make(Metadata(file, name), raw, tensors)
    except KeyError as missing:
        raise CorruptModel(f"{path} lacks {missing}", "Fetch the file again") from missing
    if isinstance(config, BlockConfig):
        # Skip copies of the target's tensors. An output head for the whole vocabulary is always a copy.
        unused = {"embed_tokens.weight", *(() if config.draft_vocab else ("lm_head.weight",))}
        tensors = Renamed(tensors, {name: name for name in tensors if name not in unused})
    return HeadFile(path, "llama.cpp", config, tensors)


def _refuse_unsupported_keys(meta: Metadata) -> None:
    if strange := [key for key in _UNSUPPORTED_KEYS if meta.get(key, 1) not in (0, 1)]:
        raise UnsupportedModel(
            f"{meta.file.path.name} is a drafter with {', '.join(strange)}, which is not supported",
            "Use a drafter without this",
        )


def _eagle3_metadata(meta: Metadata, config: Config) -> Config:
    _refuse_unsupported_keys(meta)
    return {"model_type": "llama"}


def _dflash_metadata(meta: Metadata, config: Config) -> Config:
    _refuse_unsupported_keys(meta)
    window = meta.get("attention.sliding_window", 0)
    kinds = layer_types(meta, meta["block_count"], 1)
    return {"model_type": "qwen3", "use_sliding_window": bool(window), "layer_types": kinds if window else None}


def _tensors(file: GGUFFile, layout: GGUFLayout, raw: Mapping[str, Any]) -> Renamed:
    """Return the tensors under the names in `models/heads.py`."""
    tensors = GGUFTensors(file, layout, raw)
    return Renamed(tensors, {name.removeprefix("model."): name for name in tensors})


def _rows(tensors: Renamed, vocab: int) -> int:
    """Return the number of tokens that a drafter can draft."""
    return tensors.shape("d2t")[0] if "d2t" in tensors else vocab


def _eagle3(meta: Metadata, raw: Mapping[str, Any], tensors: Renamed) -> HeadConfig:
    layer = block_layer(raw)
    return EagleConfig(
        layer,
        tuple(meta["target_layers"]),
        meta.get("target_hidden_size", layer.hidden),
        _rows(tensors, layer.vocab_size),
        norm_before_residual=meta.get("norm_before_residual", False),
        norm_before_fc=meta.get("norm_before_fc", False),
    )


def _block(meta: Metadata, raw: Mapping[str, Any], tensors: Renamed) -> HeadConfig:
    layer, stated = block_layer(raw), meta.get("attention.causal")
    causal = tuple(x.window is not None if stated is None else stated for x in layer.plan)
    mask = meta.file.fields.get("tokenizer.ggml.mask_token_id")
    if mask is None:
        raise CorruptModel(f"{meta.file.path} names no mask token", "Fetch the file again")
    rows, taps = _rows(tensors, layer.vocab_size), tuple[Tap, ...](meta["target_layers"])
    return BlockConfig(
        layer,
        taps,
        meta["block_size"],
        mask,
        causal if any(causal) else (),
        from_anchor=meta.get("sample_from_anchor", False),
        draft_vocab=rows if rows != layer.vocab_size else 0,
        markov=_width(tensors, "markov_head.markov_w1.weight"),
        confidence=_width(tensors, "confidence_head.proj.weight"),
    )


def _width(tensors: Renamed, name: str) -> int:
    """Return the number of columns of a matrix, or 0 if it does not exist."""
    return tensors.shape(name)[-1] if name in tensors else 0


_EAGLE3 = GGUFLayout(
    "eagle3",
    {**LAYER, "attn_norm_2": "hidden_norm"},
    top_level={"fc.weight": "fc.weight", "enc.output_norm.weight": "input_norm.weight", "d2t": "d2t"},
    interleaved=True,
    read=_eagle3_metadata,
)
_DFLASH = GGUFLayout(
    "dflash",
    {**LAYER, **QK_NORMS},
    top_level={
        "fc.weight": "fc.weight",
        "enc.output_norm.weight": "hidden_norm.weight",
        "d2t": "d2t",
        **{f"markov_w{i}.weight": f"markov_head.markov_w{i}.weight" for i in (1, 2)},
        **{f"conf_proj.{part}": f"confidence_head.proj.{part}" for part in ("weight", "bias")},
    },
    read=_dflash_metadata,
)
_LAYOUTS = {"eagle3": (_EAGLE3, _eagle3), "dflash": (_DFLASH, _block)}
"""Architecture -> its layout, and the function that builds its config."""
