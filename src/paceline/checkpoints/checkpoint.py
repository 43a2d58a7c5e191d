"""Model checkpoints in any layout: config, generation defaults, tensors by name, tokenizer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from paceline.checkpoints.registry import ARCHITECTURES, family_of, text_config, ties_head
from paceline.checkpoints.tensor_names import decoder_tensors
from paceline.errors import CorruptModel, ModelNotFound, UnsupportedModel
from paceline.files.locate import is_adapter
from paceline.files.reading import MIB, library_errors, map_file, read_json, read_json_if_exists
from paceline.files.schema import GENERATION, IDENTITY, INDEX, check, format_value
from paceline.kernels.stored import FLOATS, Stored
from paceline.models.lazy import LazyTensors, Renamed
from paceline.text.tokenizer import Tokenizer

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FETCH_AGAIN = "Fetch the model again"
_MAX_INDEX_BYTES, _MAX_NAME_LENGTH = 16 * MIB, 255


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint.

    Attributes:
        path: The folder or GGUF file.
        config: Contents of config.json. For a GGUF file, its metadata, translated to the same keys.
        generation: Contents of generation_config.json. Empty if there is none.
        tensors: Tensors by Hugging Face name. Each access reads a tensor, in the dtype of the file (float32 for a
            quantised GGUF file).
        tokenizer: The tokenizer.
    """

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer


def open_checkpoint(path: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Open a folder in Hugging Face's layout or a GGUF file.

    Args:
        path: A path that `files.resolve` returned.
        allow_pickle: Accept pytorch_model.bin if there are no safetensors. It is read with `weights_only`.

    Raises:
        ModelNotFound: If a file is missing.
        CorruptModel: If a file is damaged.
        UnsupportedModel: If Paceline does not support the checkpoint.
    """
    if path.is_file():
        from paceline.checkpoints.gguf import open_gguf

        config, tensors, fields = open_gguf(path)
        layout = ARCHITECTURES[fields["general.architecture"]][1]
        tokenizer = Tokenizer.from_gguf(fields, strips_spaces=layout.strips_spaces)
        return Checkpoint(path, config, {}, tensors, tokenizer)
    config, weights = open_folder(path, allow_pickle=allow_pickle)
    generation = read_json_if_exists(path / "generation_config.json", GENERATION)
    return Checkpoint(path, config, generation, weights, Tokenizer.from_folder(path))


def open_folder(path: Path, *, allow_pickle: bool = False) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Open a folder in Hugging Face's layout. Return its config and tensors (see `Checkpoint`). Raise the errors of
    `open_checkpoint`."""
    config = text_config(_config(path))
    weights = open_weights(path, "model.safetensors", "pytorch_model.bin", allow_pickle)
    weights = decoder_tensors(config, weights)
    if EMBEDDING not in weights and ties_head(config):
        # If two modules share a tensor, transformers saves it under only one of their names, which may be the head's.
        weights = Renamed(weights, {EMBEDDING if name == HEAD else name: name for name in weights})
    return config, weights


def eos_token_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Tokenizer | None = None
) -> tuple[int, ...]:
    """Return all EOS ids in the config and in generation_config.json. If there are none, return the tokenizer's EOS id.

    Raises:
        CorruptModel: If a value is neither an id nor a list of ids.
    """
    ids: list[int] = []
    for where, values in (("config.json", config), ("generation_config.json", generation)):
        check(where, values, {"eos_token_id": IDENTITY["eos_token_id"]})
        found = values.get("eos_token_id")
        ids += found if isinstance(found, list) else [] if found is None else [found]
    if not ids and tokenizer is not None and tokenizer.eos_token_id is not None:
        ids = [tokenizer.eos_token_id]
    return tuple(dict.fromkeys(ids))


def _config(path: Path) -> dict[str, Any]:
    if is_adapter(path):
        raise UnsupportedModel(
            f"{path} is an adapter, not a model", "Name its base model, and this folder as the adapter"
        )
    config = read_json(path / "config.json", IDENTITY)
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "?") if isinstance(quantised, dict) else "?"
        if method in family_of(config).quantised:
            return config
        raise UnsupportedModel(f"{path} is quantised with {method}", "Use the unquantised checkpoint or a GGUF file")
    return config


def open_weights(path: Path, safe: str, pickled: str, allow_pickle: bool) -> Mapping[str, Tensor]:
    """Open the weights in a folder: a single file, or shards with an index.

    Args:
        path: The folder.
        safe: Name of the safetensors file, which is preferred.
        pickled: Name of the pickled file.
        allow_pickle: Accept the pickled file.

    Raises:
        ModelNotFound: If neither file exists.
        CorruptModel: If a file is damaged.
        UnsupportedModel: If only the pickled file exists, and it is not accepted.
    """
    if files := _shards(path, safe):
        return Shards(files, _open_safetensors, mapped=True)
    if not (files := _shards(path, pickled)):
        raise ModelNotFound(f"{path} contains neither {safe} nor an index of it", "Fetch the weights too")
    if not allow_pickle:
        raise UnsupportedModel(
            f"{path} holds only pickled weights ({pickled}), which may run code when read",
            "Use a safetensors copy, or set allow_pickle=True to read only the tensors (weights_only)",
        )
    return Shards(files, _open_pickle)


def _shards(path: Path, single: str) -> dict[Path, tuple[str, ...] | None] | None:
    """Return the shards, and for each shard the tensors that the index lists for it (None if there is no index).

    Return None if neither the file nor its index exists.
    """
    index = path / f"{single}.index.json"
    if not index.exists():
        return {path / single: None} if (path / single).exists() else None
    where = read_json(index, INDEX, _MAX_INDEX_BYTES).get("weight_map")
    if not where:
        raise CorruptModel(f"{index} names no tensors", _FETCH_AGAIN)
    shards: dict[Path, list[str]] = {}
    for name, file in where.items():
        # Shards must be in the index's folder. A name that contains folders could read any file on the machine.
        if Path(file).name != file or not file.isprintable() or len(file.encode()) > _MAX_NAME_LENGTH:
            raise CorruptModel(f"{index} names the shard {format_value(file)}, which is not a file name", _FETCH_AGAIN)
        shards.setdefault(path / file, []).append(name)
    return {file: tuple(names) for file, names in shards.items()}


Read = Callable[[str], Tensor]


class Shards(LazyTensors):
    """Tensors by name, from one or more files. The headers are checked on creation, and the tensors are read on
    access."""

    def __init__(
        self,
        files: Mapping[Path, tuple[str, ...] | None],
        opener: Callable[[Path], tuple[list[str], Read]],
        mapped: bool = False,
    ) -> None:
        """`mapped`: True if the float tensors that `opener` reads are memory-mapped pages of the file."""
        self._mapped = mapped
        self._names = self._sources = dict[str, tuple[Path, Read]]()
        for path, listed in files.items():
            if not path.is_file():
                raise CorruptModel(f"the shard {path} is missing", _FETCH_AGAIN)
            names, read = opener(path)
            if absent := set(listed or ()) - set(names):
                raise CorruptModel(f"{path} lacks {min(absent)}, which its index lists", _FETCH_AGAIN)
            self._sources.update(dict.fromkeys(listed or names, (path, read)))

    def __getitem__(self, name: str) -> Tensor:
        path, read = self._sources[name]
        with library_errors(f"cannot read {name} from {path}", _FETCH_AGAIN):
            return read(name)

    def stored(self, name: str) -> Stored | None:
        tensor = self[name]
        return Stored.floats(tensor, None, self._mapped) if tensor.ndim == 2 and tensor.dtype in FLOATS else None


_MAPPED_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}


def _open_safetensors(path: Path) -> tuple[list[str], Read]:
    """Open a safetensors file. Paceline itself maps tensors of common types into memory, because `Stored` must be able
    to release their pages."""
    with library_errors(f"{path} is damaged or cut off", _FETCH_AGAIN):
        file: Any = safe_open(path, framework="pt", device="cpu")  # checks the header
        buffer = map_file(path).buffer
        start = 8 + int.from_bytes(buffer[:8], "little")
        entries = json.loads(buffer[8:start])

    def read(name: str) -> Tensor:
        kind, shape = entries[name]["dtype"], entries[name]["shape"]
        if kind not in _MAPPED_TYPES or 0 in shape:
            tensor: Tensor = file.get_tensor(name)
            return tensor
        first = start + entries[name]["data_offsets"][0]
        return torch.frombuffer(buffer, dtype=_MAPPED_TYPES[kind], count=math.prod(shape), offset=first).view(shape)

    return list(file.keys()), read


def _open_pickle(path: Path) -> tuple[list[str], Read]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises various exceptions for damaged files
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptModel(f"{path} cannot be read as plain tensors ({reason})", _FETCH_AGAIN) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CorruptModel(f"{path} holds no table of tensors", "Use a safetensors copy of the model")
    return list(state), state.__getitem__
