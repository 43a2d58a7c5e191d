"""The registry of all model families, which is collected from the files in `families/`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from paceline.checkpoints import families
from paceline.checkpoints.family import Family, GGUFLayout, Raw


def _found() -> Iterator[Family]:
    for module in sorted(one.name for one in iter_modules(families.__path__)):
        yield from import_module(f"{families.__name__}.{module}").FAMILIES


FAMILIES: dict[str, Family] = {family.name: family for family in _found()}
"""`model_type` -> family."""
ARCHITECTURES: dict[str, tuple[Family, GGUFLayout]] = {
    layout.architecture: (family, layout) for family in FAMILIES.values() for layout in family.gguf
}
"""Name of an architecture in GGUF files -> its family and layout."""
_PARTS = {whole: family.name for family in FAMILIES.values() for whole in family.part_of}
"""Model type of a multimodal model -> model type of its language model."""
_UNKNOWN = Family("")


def family_of(raw: Raw) -> Family:
    """Return the family of a config. For an unknown model type, return a family without any special properties."""
    return FAMILIES.get(raw.get("model_type", ""), _UNKNOWN)


def ties_head(raw: Raw) -> bool:
    """Return True if the embedding is also the output head, according to the config or the family's default."""
    return bool({**family_of(raw).defaults, **raw}.get("tie_word_embeddings"))


def text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a multimodal model's language model. Return other configs unchanged."""
    if raw.get("model_type") not in _PARTS:
        return raw
    inner = raw.get("text_config", {key: value for key, value in raw.items() if key != "vision_config"})
    if not isinstance(inner, dict):
        return raw
    shared = {key: raw[key] for key in ("architectures", "tie_word_embeddings", "eos_token_id") if key in raw}
    tied = {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}  # transformers ignores the inner key
    return {**shared, **inner, **tied, "model_type": _PARTS[raw["model_type"]]}
