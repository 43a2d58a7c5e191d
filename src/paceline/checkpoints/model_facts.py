"""Facts about models that are not loaded, for lists of models. They come from a model's files, without reading
weights."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from paceline.checkpoints.checkpoint import open_folder
from paceline.checkpoints.gguf_file import read_gguf
from paceline.checkpoints.gguf_metadata import Metadata
from paceline.checkpoints.vision import has_vision
from paceline.errors import PacelineError
from paceline.files.gguf_names import parts_of
from paceline.files.reading import read_json_if_exists, read_text
from paceline.files.schema import DECODER, GENERATION, GGUF, NULL, check
from paceline.models.lazy import kind_of, shape_of
from paceline.text.infill import InfillTokens
from paceline.text.tokenizer import TOKENIZER_LIMIT, template_of

_FLOATS = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}
_CONTEXT = "max_position_embeddings"
_READ_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model. A number is 0 if it is not known.

    Attributes:
        format: Format of the files.
        size: Total size of the files, in bytes.
        family: Architecture, under the name that Ollama uses.
        quantization: Quantisation, under the name that Ollama uses.
        parameters: Number of parameters.
        context_length: Context length in tokens.
        vocab_size: Number of tokens.
        template: Chat template. Empty if there is none.
        vision: True if the files contain a vision tower that Paceline knows.
        infill: True if the tokenizer has tokens for fill-in-the-middle.
        generation: Contents of generation_config.json.
    """

    format: Literal["gguf", "safetensors"] = "gguf"
    size: int = 0
    family: str = "model"
    quantization: str = "unknown"
    parameters: int = 0
    context_length: int = 0
    vocab_size: int = 0
    template: str = ""
    vision: bool = False
    infill: bool = False
    generation: dict[str, Any] = field(default_factory=dict)


def facts_of(path: Path | None) -> ModelFacts | None:
    """Return the facts about a model's file or folder, or None if it cannot be read. A result is cached until the file
    or folder changes."""
    try:
        file = path / "config.json" if path and path.is_dir() else path
        state = file.stat() if file else None
    except OSError:
        return None
    with _READ_LOCK:  # concurrent calls read each file only once
        return _read(path, state.st_mtime_ns, state.st_size) if path and state else None


@lru_cache(maxsize=1 << 16)
def _read(path: Path, *_: int) -> ModelFacts | None:
    try:
        return _of_folder(path) if path.is_dir() else _of_gguf(path)
    except (PacelineError, OSError):
        return None


def _of_gguf(path: Path) -> ModelFacts:
    file = read_gguf(path)
    check(path, file.fields, GGUF)
    family = file.fields.get("general.architecture", "model")
    tensors = {name: tensor for name, tensor in file.tensors.items() if not name.startswith("rope_")}
    kind, count = _weights((tensor.kind, tensor.shape) for tensor in tensors.values())
    tokens = file.fields.get("tokenizer.ggml.tokens") or ()
    return ModelFacts(
        size=sum(path.with_name(name).stat().st_size for name in parts_of(path.name) or [path.name]),
        family=family,
        quantization=_mixture_name(file.fields.get("general.file_type")) or kind,
        parameters=count,
        context_length=Metadata(file, family).get("context_length", 0),
        vocab_size=len(tokens),
        template=file.fields.get("tokenizer.chat_template") or "",
        vision=has_vision(path),
        infill=InfillTokens.of({token: i for i, token in enumerate(tokens)}.get) is not None,
    )


def _of_folder(path: Path) -> ModelFacts:
    config, tensors = open_folder(path)
    check(path / "config.json", config, {_CONTEXT: DECODER[_CONTEXT] | NULL})
    kind, count = _weights((kind_of(tensors, name), shape_of(tensors, name)) for name in tensors)
    tokenizer = path / "tokenizer.json"
    words = read_text(tokenizer, TOKENIZER_LIMIT) if tokenizer.exists() else ""
    return ModelFacts(
        format="safetensors",
        size=sum(file.stat().st_size for file in path.glob("*.safetensors")),
        family=config.get("model_type", "model"),
        quantization=_FLOATS.get(kind, kind),
        parameters=count,
        context_length=config.get(_CONTEXT) or 0,
        vocab_size=config.get("vocab_size") or 0,
        template=template_of(path) or "",
        vision=has_vision(path),
        infill=InfillTokens.of(lambda token: 0 if f'"{token}"' in words else None) is not None,
        generation=read_json_if_exists(path / "generation_config.json", GENERATION),
    )


def _weights(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[str, int]:
    """Return the type that most elements have, and the total number of elements."""
    sizes: Counter[str] = Counter()
    for kind, shape in tensors:
        sizes[kind] += math.prod(shape)
    return max(sizes, key=sizes.__getitem__, default="unknown"), sizes.total()


def _mixture_name(file_type: Any) -> str:
    """Return the name of a mixture of types, such as "Q4_K_M", given llama.cpp's number. Return "" if the number is
    unknown."""
    import gguf

    names = [kind.name for kind in gguf.LlamaFileType if kind.value == file_type]
    return names[0].partition("_")[2] if names else ""
