"""A checkpoint on disk, whatever its layout: config, generation defaults, tensors by name, tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import CorruptModel, ModelNotFound, UnsupportedModel
from paceline.files.locate import is_adapter
from paceline.files.reading import MIB, read_json, read_json_if_there
from paceline.files.schema import GENERATION, IDENTITY, TEXT, check, check_value, mapping, shown
from paceline.models.families import ties_head
from paceline.models.lazy import LazyTensors, Renamed
from paceline.text.tokenizer import Tokenizer

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_AGAIN = "Fetch the model again"
_INDEX_LIMIT, _LONGEST_NAME = 16 * MIB, 255


@dataclass(frozen=True)
class Checkpoint:
    """What every loader needs.

    `config`: Hugging Face's config.json terms (a GGUF's metadata is translated). `generation`: the contents of
    generation_config.json, or {}. `tensors`: by Hugging Face name, in the dtype of the file (quantised GGUF:
    float32), read at each access.
    """

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]
    tensors: Mapping[str, Tensor]
    tokenizer: Tokenizer


def open_checkpoint(path: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Open what `files.resolve` returned: a folder in Hugging Face's layout or a GGUF file.

    `allow_pickle` admits pytorch_model.bin where there are no safetensors, read with `weights_only`.
    Raises `ModelNotFound` (a file is missing), `CorruptModel` (it is damaged), `UnsupportedModel` (not read).
    """
    if path.is_file():
        from paceline.checkpoints.gguf import open_gguf

        config, tensors, fields = open_gguf(path)
        return Checkpoint(path, config, {}, tensors, Tokenizer.from_gguf(fields))
    config = _config(path)
    generation = read_json_if_there(path / "generation_config.json")
    check(path / "generation_config.json", generation, GENERATION)
    weights = open_weights(path, "model.safetensors", "pytorch_model.bin", allow_pickle)
    if EMBEDDING not in weights and ties_head(config):
        # transformers writes a matrix that two modules share under the name of one of them, which may be the head.
        weights = Renamed(weights, HEAD, EMBEDDING)
    return Checkpoint(path, config, generation, weights, Tokenizer.from_folder(path))


def eos_token_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Tokenizer | None = None
) -> tuple[int, ...]:
    """Every id that ends a reply: the config's, then generation_config's; only if neither names one, the tokenizer's.

    Raises `CorruptModel` for anything but an id or a list of ids.
    """
    check("config.json", config, {"eos_token_id": IDENTITY["eos_token_id"]})
    check("generation_config.json", generation, {"eos_token_id": GENERATION["eos_token_id"]})
    ids = [*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))]
    if not ids and tokenizer is not None and tokenizer.eos_token_id is not None:
        ids = [tokenizer.eos_token_id]
    return tuple(dict.fromkeys(ids))


def _ids(value: int | list[int] | None) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _config(path: Path) -> dict[str, Any]:
    if is_adapter(path):
        raise UnsupportedModel(
            f"{path} is an adapter, not a model", "Name its base model, and this folder as the adapter"
        )
    config = read_json(path / "config.json")
    check(path / "config.json", config, IDENTITY)
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "?") if isinstance(quantised, dict) else "?"
        raise UnsupportedModel(f"{path} is quantised with {method}", "Use the unquantised checkpoint or a GGUF file")
    return config


def open_weights(path: Path, safe: str, pickled: str, allow_pickle: bool) -> Mapping[str, Tensor]:
    """The first file of the two that is there, whole or in shards: safetensors, then pickles if allowed."""
    files = _shards(path, safe)
    if files is not None:
        return Shards(files, _open_safetensors)
    files = _shards(path, pickled)
    if files is None:
        raise ModelNotFound(f"{path} holds no {safe} or its index", "Fetch the weights too")
    if not allow_pickle:
        raise UnsupportedModel(
            f"{path} holds only pickled weights ({pickled}), which may run code when read",
            "Use a safetensors copy, or say allow_pickle=True to read the tensors alone (weights_only)",
        )
    return Shards(files, _open_pickle)


def _shards(path: Path, single: str) -> dict[Path, tuple[str, ...] | None] | None:
    """Shard -> the tensors the index promises in it (None: no index), or None where this layout is absent."""
    index = path / f"{single}.index.json"
    if not index.exists():
        return {path / single: None} if (path / single).exists() else None
    where = read_json(index, _INDEX_LIMIT).get("weight_map")
    check_value(index, "weight_map", where, mapping(TEXT))
    if not where:
        raise CorruptModel(f"{index} names no tensors", _AGAIN)
    shards: dict[Path, list[str]] = {}
    for name, file in where.items():
        # A shard lies beside its index: a name with folders in it would read files elsewhere on the machine.
        if Path(file).name != file or not file.isprintable() or len(file.encode()) > _LONGEST_NAME:
            raise CorruptModel(f"{index} names the shard {shown(file)}, which is not a file name", _AGAIN)
        shards.setdefault(path / file, []).append(name)
    return {file: tuple(names) for file, names in shards.items()}


Read = Callable[[str], Tensor]


class Shards(LazyTensors):
    """Tensors by name over one or more files. All headers are checked here, tensors are read at each access."""

    def __init__(
        self,
        files: Mapping[Path, tuple[str, ...] | None],
        opener: Callable[[Path], tuple[list[str], Read]],
    ) -> None:
        self._names = self._home = dict[str, tuple[Path, Read]]()
        for path, promised in files.items():
            if not path.is_file():
                raise CorruptModel(f"the shard {path} is missing", _AGAIN)
            names, read = opener(path)
            if absent := set(promised or ()) - set(names):
                raise CorruptModel(f"{path} lacks {min(absent)}, which its index promises", _AGAIN)
            self._home.update(dict.fromkeys(promised or names, (path, read)))

    def __getitem__(self, name: str) -> Tensor:
        path, read = self._home[name]
        try:
            return read(name)
        except (RuntimeError, OSError, ValueError) as error:
            raise CorruptModel(f"cannot read {name} from {path} ({error})", _AGAIN) from error


def _open_safetensors(path: Path) -> tuple[list[str], Read]:
    from safetensors import SafetensorError, safe_open

    try:
        file: Any = safe_open(path, framework="pt", device="cpu")
        return list(file.keys()), file.get_tensor
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptModel(f"{path} is damaged or cut off ({error})", _AGAIN) from error


def _open_pickle(path: Path) -> tuple[list[str], Read]:
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises whatever the damage happens to hit
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptModel(f"{path} cannot be read as plain tensors ({reason})", _AGAIN) from error
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise CorruptModel(f"{path} holds no table of tensors", "Use a safetensors copy of the model")
    return list(state), state.__getitem__
