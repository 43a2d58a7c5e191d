"""Gemma 4's assistants: small learned drafters that read the target's keys and values instead of computing their
own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.checkpoints.checkpoint import open_weights
from paceline.checkpoints.model_config import read_config
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.reading import read_json
from paceline.files.schema import FIX_INVALID_FILE, OBJECT, check_value, integer
from paceline.models.heads import AssistantConfig, HeadFile
from paceline.models.lazy import Renamed

ASSISTANT = "gemma4_assistant"
"""The `model_type` of an assistant."""


def open_assistant(path: Path, *, allow_pickle: bool = False) -> HeadFile:
    """Open the assistant in a folder in transformers' layout, without reading its tensors.

    The optional `masked_embedding`, which limits the head to the likeliest groups of tokens, is ignored. Paceline
    scores all tokens.

    Raises:
        ModelNotFound: If a file is missing.
        CorruptModel: If a file is damaged.
        UnsupportedModel: If the folder does not hold an assistant that Paceline supports.
    """
    file = path / "config.json"
    raw = read_json(file, {"text_config": OBJECT})
    text: dict[str, Any] = raw.get("text_config") or {}
    check_value(file, "backbone_hidden_size", hidden := raw.get("backbone_hidden_size", 1536), integer(1, 2**20))
    layers = text.get("num_hidden_layers")
    if text.get("num_kv_shared_layers", layers) not in (0, layers):
        raise UnsupportedModel(f"{path} has keys and values of its own", "Use an assistant of Gemma 4")
    try:
        layer = read_config({**text, "model_type": "gemma4_text", "num_kv_shared_layers": layers}, file)
    except KeyError as missing:
        raise CorruptModel(f"{file} lacks {missing}", FIX_INVALID_FILE) from missing
    if layer.token_inputs or layer.mixture:
        raise UnsupportedModel(f"{path} has experts or per-layer embeddings", "Use an assistant of Gemma 4")
    tensors = open_weights(path, "model.safetensors", "pytorch_model.bin", allow_pickle)
    names = {name: name for name in tensors if not name.startswith("masked_embedding.")}
    return HeadFile(path, "transformers", AssistantConfig(layer, hidden), Renamed(tensors, names))
