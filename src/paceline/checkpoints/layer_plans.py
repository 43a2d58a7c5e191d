"""The types, windows and rotary embeddings of a model's layers, as read from its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import FIX_INVALID_FILE
from paceline.models.config import LayerConfig, ModelConfig, RopeConfig

Raw = Mapping[str, Any]

FULL, SLIDING = "full_attention", "sliding_attention"


def read_types(
    given: Sequence[str] | None,
    base: ModelConfig,
    known: Sequence[str],
    default: Callable[[int], str] | None = None,
    key: str = "layer_types",
) -> list[str]:
    """Return the type of each layer.

    Args:
        given: The types in the config. None if the config has none.
        base: The common part of the config.
        known: The supported types.
        default: Maps a layer's index to its type, for configs without types.
        key: The config key that holds the types, for error messages.

    Raises:
        UnsupportedModel: If a type is not in `known`.
        CorruptModel: If the number of types is not the number of layers.
    """
    types = list(map(default, range(base.layers)) if default and not given else given or ())
    if unknown := set(types) - set(known):
        raise UnsupportedModel(
            f"{key} names layers of type {', '.join(sorted(unknown))}, which are not supported in {base.family}",
            f"Use a model whose layers are {' or '.join(known)}",
        )
    if len(types) != base.layers:
        raise CorruptModel(f"{key} names {len(types)} of {base.layers} layers", FIX_INVALID_FILE)
    return types


def windows_everywhere(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Add the sliding window, if there is one, to every layer (Mistral, Phi-3)."""
    return with_layers(base, [raw.get("sliding_window")] * base.layers)


def windows_by_type(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Add windows by `layer_types`. By default, all layers have the sliding window, if there is one (Ministral)."""
    window = raw.get("sliding_window")
    return with_layers(base, layer_windows(raw, base, window, lambda i: window is not None))


def windows_except_every(
    raw: Raw, base: ModelConfig, every: int, near: RopeConfig | None, far: RopeConfig | None
) -> ModelConfig:
    """Add windows by `layer_types`. By default, every layer has a sliding window, except every `every`-th layer.

    Args:
        raw: The config.
        base: The common part.
        every: Period of the layers without a window.
        near: The rotary embedding of layers with a window.
        far: The rotary embedding of layers without a window.
    """
    windows = layer_windows(raw, base, raw["sliding_window"], lambda i: (i + 1) % every != 0)
    return with_layers(base, windows, [near if window else far for window in windows])


def layer_windows(raw: Raw, base: ModelConfig, window: int | None, default: Callable[[int], bool]) -> list[int | None]:
    """Return the window of each layer, according to `layer_types`. If the config has no `layer_types`, use
    `default`."""
    types = read_types(raw.get("layer_types"), base, (FULL, SLIDING), lambda i: SLIDING if default(i) else FULL)
    if window is None and SLIDING in types:
        raise CorruptModel("layer_types names sliding layers, but the config has no sliding_window", FIX_INVALID_FILE)
    return [window if kind == SLIDING else None for kind in types]


def sparse_layers(raw: Raw, base: ModelConfig) -> list[bool]:
    """Return, for each layer, True if it is a mixture of experts, according to Qwen's keys."""
    dense = raw.get("mlp_only_layers") or ()
    return [i not in dense and (i + 1) % raw["decoder_sparse_step"] == 0 for i in range(base.layers)]


def rotates_by_interval(raw: Raw, base: ModelConfig) -> list[bool]:
    """Return, for each layer, True if it encodes positions, according to `no_rope_layers` or
    `no_rope_layer_interval`."""
    every = raw["no_rope_layer_interval"]
    rotates = raw.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(base.layers)]
    if len(rotates) < base.layers:
        raise CorruptModel(f"no_rope_layers names {len(rotates)} of {base.layers} layers", FIX_INVALID_FILE)
    return [bool(one) for one in rotates[: base.layers]]


def with_layers(
    base: ModelConfig,
    windows: Sequence[int | None],
    ropes: Sequence[RopeConfig | None] | None = None,
    sparse: Sequence[bool] | None = None,
) -> ModelConfig:
    """Return the config with these settings for its layers. Windows that cover the whole context are dropped."""
    ropes, sparse = ropes or [base.rope] * base.layers, sparse or [False] * base.layers
    bounded = [w if w and w < base.context_length else None for w in windows]
    return replace(base, special=tuple(map(LayerConfig, ropes, bounded, sparse)))
