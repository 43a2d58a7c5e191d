"""The types of a model's layers, by the names in its config."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import CORRECT
from paceline.models.config import ModelConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def read_types(
    given: Sequence[str] | None,
    base: ModelConfig,
    known: Sequence[str],
    default: Callable[[int], str] | None = None,
    key: str = "layer_types",
) -> list[str]:
    """Return the type of each layer: `given`, which stands under `key`, or of layer i `default(i)` if that is missing.

    Raises `UnsupportedModel` for a type that is not `known`, `CorruptModel` for another number of types than layers.
    """
    types = list(map(default, range(base.layers)) if default and not given else given or ())
    if unknown := set(types) - set(known):
        raise UnsupportedModel(
            f"{key} names layers of type {', '.join(sorted(unknown))}, which are not supported in {base.family}",
            f"Use a model whose layers are {' or '.join(known)}",
        )
    if len(types) != base.layers:
        raise CorruptModel(f"{key} names {len(types)} of {base.layers} layers", CORRECT)
    return types
