"""Readers for block drafters (DFlash 1 and 2, DSpark), in the layouts of their authors and in the layout of
`speculators`.

DFlash numbers a tap by the layer whose *output* it reads. This is one less than the layer that the stream enters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.checkpoints.head_folder import HeadFolder, Raw, ReadHead, Tensors
from paceline.checkpoints.model_config import read_config
from paceline.errors import UnsupportedModel
from paceline.models.config import ModelConfig
from paceline.models.heads import BlockConfig
from paceline.types import Tap

DFLASH2 = {
    "conv": "conv_kernel_size",
    "conv_group": "conv_group_size",
    "selector": "selector_rank",
    "candidates": "selector_top_k",
}
"""Fields of `BlockConfig` that every DFlash 2 head has -> their keys in the head's config."""
_DSPARK = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "sample_from_anchor")
_NESTED = (*_DSPARK, *DFLASH2.values())
"""Keys of DSpark and DFlash 2 that may also be at the top level of the config, next to the layers' keys."""


def read_dflash(folder: HeadFolder) -> ReadHead:
    """Read z-lab's layout, including the keys that vLLM's `qwen3_dflash.py` adds, and DeepSpec's layout of DSpark.

    DSpark's own keys may be at the top level or in one of the nested objects.
    """
    raw = folder.raw
    nested = {**{key: raw[key] for key in _NESTED if key in raw}, **(raw.get("dflash_config") or {})}
    nested |= raw.get("dspark_config") or {}
    layer = block_layer({**raw, "model_type": "qwen3"})
    _refuse_dflash(folder, {**raw, **nested}, any(x.window for x in layer.plan))
    stated = raw.get("is_causal")
    stated = nested.get("causal") if stated is None else stated
    causal = tuple(x.window is not None if stated is None else bool(stated) for x in layer.plan)
    ids = nested.get("target_layer_ids")
    taps = tuple(x + 1 for x in ids) if ids else _spread(folder.number("num_target_layers"), layer.layers)
    anchored = "dspark" in " ".join(map(str, raw.get("architectures") or [])).lower()
    if nested.get("markov_rank") and not anchored and nested.get("sample_from_anchor") is None:
        raise UnsupportedModel(
            f"{folder.path} does not say which token its first entry predicts", "Set sample_from_anchor in config.json"
        )
    config = _block(folder, layer, taps, {"sample_from_anchor": anchored, **nested}, causal)
    if _is_dflash2(raw) or any(nested.get(key) for key in DFLASH2.values()):
        config = _dflash2(folder, config, nested)
    return "reference", config, _without_copies(folder, config)


def _is_dflash2(raw: Raw) -> bool:
    """Return True if the config names the DFlash 2 architecture."""
    return "dflash2" in " ".join(map(str, raw.get("architectures") or [])).lower()


def _dflash2(folder: HeadFolder, config: BlockConfig, nested: Raw) -> BlockConfig:
    stated = {**folder.raw, **nested}
    others = {
        "input_embedding_scale": stated.get("input_embedding_scale") not in (None, 1),
        "output_multiplier": stated.get("output_multiplier") not in (None, 1),
        "final_logit_softcapping": stated.get("final_logit_softcapping"),
        "markov_rank": config.markov,
        "sample_from_anchor": config.from_anchor,
        "draft_vocab_size": config.draft_vocab,
    }
    if used := [name for name, present in others.items() if present]:
        raise UnsupportedModel(
            f"{folder.path} is a DFlash 2 head with {', '.join(used)}, which Paceline does not support",
            "Use a head without this",
        )
    numbers: Any = {field: folder.number(key, nested) for field, key in DFLASH2.items()}
    return replace(config, **numbers)


def read_speculators_dflash(folder: HeadFolder) -> ReadHead:
    raw = folder.raw
    layer = block_layer({"model_type": "qwen3", **raw["transformer_layer_config"]})
    _refuse_dflash(folder, raw, sliding=False)
    causal = tuple(x.window is not None and not raw.get("sliding_window_non_causal") for x in layer.plan)
    taps = tuple(raw["aux_hidden_state_layer_ids"] or ())
    config = _block(folder, layer, taps, raw, causal)
    return "speculators", config, _without_copies(folder, config)


def _without_copies(folder: HeadFolder, config: BlockConfig) -> Tensors:
    """Return the tensors without copies of the target's embedding and output head, which are never trained.

    An output head for the whole vocabulary is always such a copy.
    """
    unused = ("embed_tokens.weight", *(() if config.draft_vocab else ("lm_head.weight", "d2t", "t2d")))
    return {name: tensor for name, tensor in folder.tensors.items() if name not in unused}


def _refuse_dflash(folder: HeadFolder, raw: Raw, sliding: bool) -> None:
    """Raise `UnsupportedModel` for features that `BlockNetwork` does not have. `sliding`: True if some layers have a
    window."""
    found = {
        **{name: raw.get(name) for name in ("use_swa", "attention_sink_bias", "add_swa_attention_sink_bias")},
        "swa_window_size": sliding and raw.get("swa_window_size"),
        "attention_value_scale": raw.get("attention_value_scale") not in (None, 1),
        "is_neox_style": raw.get("is_neox_style") is False,
        "use_aux_hidden_state": raw.get("use_aux_hidden_state") is False,
        "projector_type": raw.get("projector_type") not in (None, "dflash", "dspark", "dflash2"),
        "markov_head_type": raw.get("markov_head_type") not in (None, "vanilla"),
        "dspark_backbone_conv_enabled": raw.get("dspark_backbone_conv_enabled"),
        "attention_mode": raw.get("attention_mode") not in (None, "gqa"),
        "shift_label": raw.get("shift_label"),
        "mask_embedding.pt": (folder.path / "mask_embedding.pt").exists(),
    }
    if used := [name for name, present in found.items() if present]:
        raise UnsupportedModel(
            f"{folder.path} is a DFlash head with {', '.join(used)}, which Paceline does not support",
            "Use a head without this",
        )


def block_layer(raw: Raw) -> ModelConfig:
    """Read the config of the layers. A window that is longer than the head's own context is kept, because the target's
    context may be longer than the window."""
    layer, unbounded = read_config(raw), read_config({**raw, "max_position_embeddings": 1 << 40})
    plan = tuple(replace(x, window=y.window) for x, y in zip(layer.plan, unbounded.plan, strict=True))
    return replace(layer, tied=False, special=plan if any(x.window for x in plan) else ())


def _block(
    folder: HeadFolder, layer: ModelConfig, taps: tuple[Tap, ...], nested: Raw, causal: tuple[bool, ...]
) -> BlockConfig:
    """Build the config. `nested`: Holds mask_token_id. It also holds block_size, unless this is at the top level of the
    config."""
    vocab = folder.raw.get("draft_vocab_size") or layer.vocab_size
    sure = folder.tensors.get("confidence_head.proj.weight")
    return BlockConfig(
        layer=layer,
        taps=taps,
        size=folder.number("block_size", folder.raw if folder.raw.get("block_size") else nested),
        mask_token=folder.number("mask_token_id", nested),
        causal=causal if any(causal) else (),
        from_anchor=bool(nested.get("sample_from_anchor")),
        draft_vocab=vocab if vocab != layer.vocab_size else 0,
        markov=nested.get("markov_rank") or 0,
        confidence=len(sure.T) if sure is not None and sure.ndim == 2 else 0,
    )


def _spread(target_layers: int, layers: int) -> tuple[Tap, ...]:
    """Return DFlash's default taps: the outputs of evenly spaced layers, from the second layer to the third from the
    end."""
    if layers == 1:
        return (target_layers // 2 + 1,)
    return tuple(round(1 + i * (target_layers - 4) / (layers - 1)) + 1 for i in range(layers))
