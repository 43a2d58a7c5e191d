"""The models on this machine that Paceline, the hub's client, Ollama or LM Studio have downloaded."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from paceline.errors import InvalidOption, ModelNotFound
from paceline.files.gguf_names import complete_models, gguf_files, parts_of, quantization_of
from paceline.files.hub import client_cache, snapshot_of, store_folder
from paceline.files.names import short_name
from paceline.files.wheels import PACKAGED_MODELS, cache_folder

OLLAMA, LM_STUDIO = "ollama:", "lmstudio:"
"""Prefixes of names in other programs' stores."""
_OLLAMA_WEIGHTS = "application/vnd.ollama.image.model"
_OLLAMA_HOSTS = ("registry.ollama.ai", "ollama.com")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MAX_MANIFEST_BYTES = 1 << 20
_MAX_FILES = 10_000
"""Maximum number of files to look at in a store."""


_DELETE_ADVICE = {"ollama": "Delete it with `ollama rm`", "lmstudio": "Delete it in LM Studio"}
"""Another program's store -> how to delete a model from it."""


class StoredModel(NamedTuple):
    """A model on this machine.

    Attributes:
        name: The name under which `find_model` finds the model.
        path: The model's file or folder.
        size: Size in bytes.
        store: Name of the store that contains it.
    """

    name: str
    path: Path
    size: int
    store: str


def stored_models(everything: bool = False) -> list[StoredModel]:
    """Return the downloaded models. With `everything`, include models of Ollama and LM Studio."""
    found = [*_packaged_models(), *_downloaded_models(), *_hub_cache_models()]
    if everything:
        found += [*_ollama_models(), *_lm_studio_models()]
    return sorted(found, key=lambda model: (model.store != "paceline", model.store, model.name))


def name_of(path: Path) -> str:
    """Return the name under which `stored_models` lists this file or folder. If it is not listed, return its path."""
    return next((model.name for model in stored_models(everything=True) if model.path == path), str(path))


def find_model(name: str) -> StoredModel:
    """Find a model by its name in `stored_models`. The quantisation may be omitted if it is unambiguous.

    Raises:
        ModelNotFound: If there is no such model, or there are several.
    """
    models = stored_models(name.startswith((OLLAMA, LM_STUDIO)))
    found = [model for model in models if model.name == name] or [
        model for model in models if model.name.rpartition(":")[0] == name
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelNotFound(f"there are {len(found)} models {name!r}", f"Use {' or '.join(one.name for one in found)}")
    raise ModelNotFound(
        f"there is no model {name!r} on this machine", "Run `paceline list --all` to see the available models"
    )


def remove_model(model: StoredModel) -> None:
    """Delete a model's files. Raise `InvalidOption` if the model belongs to another program."""
    if model.store in _DELETE_ADVICE:
        raise InvalidOption(f"{model.name} belongs to {model.store}", _DELETE_ADVICE[model.store])
    names = parts_of(model.path.name) or [model.path.name]
    is_folder = model.path.is_dir()
    for path in [*model.path.rglob("*")] if is_folder else [model.path.with_name(name) for name in names]:
        if path.is_file():
            _delete(path)
    if is_folder:
        shutil.rmtree(model.path)


def _delete(path: Path) -> None:
    """Delete a file. If it is a link to a blob of the hub's client, also delete the blob, unless another snapshot uses
    it."""
    blob = path.resolve()
    path.unlink()
    if blob != path and blob.parent.name == "blobs":
        others = blob.parent.parent.glob("snapshots/**/*")
        if not any(other.is_symlink() and other.resolve() == blob for other in others):
            blob.unlink(missing_ok=True)


def models_in(folder: Path, subfolders: bool = True) -> list[StoredModel]:
    """Return the models in a folder: GGUF files, named without the extension, and folders in Hugging Face's layout.

    Args:
        folder: The folder.
        subfolders: Search subfolders at any depth. If False, look only at direct entries of the folder.

    Raises:
        ModelNotFound: If there is no such folder.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"there is no folder {folder}", "Use a folder of GGUF files")
    files = _ggufs(folder, subfolders)
    found = [StoredModel(_stem(parts[0]), folder / parts[0], _size(folder, parts), "folder") for parts in files]
    for config in islice(folder.glob("**/config.json" if subfolders else "*/config.json"), _MAX_FILES):
        weights = [path.name for path in config.parent.glob("*.safetensors") if path.is_file()]
        if weights:
            size = _size(config.parent, weights)
            found.append(StoredModel(config.parent.relative_to(folder).as_posix(), config.parent, size, "folder"))
    # If the last part of a name is unique, use only that part.
    last = [model.name.rpartition("/")[2] for model in found]
    return [
        model._replace(name=short) if last.count(short) == 1 else model
        for model, short in zip(found, last, strict=True)
    ]


def _ggufs(folder: Path, subfolders: bool = True) -> list[list[str]]:
    return complete_models(islice(gguf_files(folder, subfolders), _MAX_FILES))


def _stem(file: str) -> str:
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", file, flags=re.IGNORECASE)


def _size(folder: Path, files: list[str]) -> int:
    return sum((folder / file).stat().st_size for file in files)


def _packaged_models() -> Iterator[StoredModel]:
    for name, model in PACKAGED_MODELS.items():
        path = cache_folder() / model.filename
        if path.is_file() and path.stat().st_size == model.size:
            yield StoredModel(name, path, model.size, "paceline")


def _hub_files(repository: str, folder: Path, store: str) -> Iterator[StoredModel]:
    for parts in _ggufs(folder):
        name = short_name(repository, quantization_of(parts[0]) or parts[0])
        yield StoredModel(name, folder / parts[0], _size(folder, parts), store)


def _downloaded_models() -> Iterator[StoredModel]:
    for folder in islice(store_folder().glob("*/*"), _MAX_FILES):
        yield from _hub_files(folder.relative_to(store_folder()).as_posix(), folder, "paceline")


def _hub_cache_models() -> Iterator[StoredModel]:
    for folder in islice(client_cache().glob("models--*--*"), _MAX_FILES):
        repository = folder.name.removeprefix("models--").replace("--", "/", 1)
        snapshot = snapshot_of(repository, None)
        if snapshot is None:
            continue
        yield from _hub_files(repository, snapshot, "huggingface")
        weights = [path.name for path in snapshot.glob("*.safetensors") if path.is_file()]
        if weights and (snapshot / "config.json").exists():
            yield StoredModel(repository, snapshot, _size(snapshot, weights), "huggingface")


def _ollama_folder() -> Path | None:
    named = os.environ.get("OLLAMA_MODELS")
    folders = [Path(named).expanduser()] if named else [Path.home() / ".ollama/models"]
    folders.append(Path("/usr/share/ollama/.ollama/models"))  # used when Linux runs Ollama as a service
    return next((folder for folder in folders if _is_folder(folder / "blobs")), None)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # it may belong to another user
        return False


def _ollama_models() -> Iterator[StoredModel]:
    """Yield Ollama's models. Each has a JSON manifest HOST/OWNER/NAME/TAG, which names the blob of its weights."""
    if not (folder := _ollama_folder()):
        return
    for path in islice(folder.glob("manifest*/*/*/*/*"), _MAX_FILES):
        blob = _weights_of(path, folder / "blobs")
        if blob is None:
            continue
        host, owner, model, tag = path.parts[-4:]
        place = "" if host in _OLLAMA_HOSTS else f"{host}/"
        owner = "" if not place and owner == "library" else f"{owner}/"
        yield StoredModel(f"{OLLAMA}{place}{owner}{model}:{tag}", blob, blob.stat().st_size, "ollama")


def _weights_of(manifest: Path, blobs: Path) -> Path | None:
    """Return the GGUF file that a manifest of Ollama names, or None if there is none."""
    try:
        if manifest.stat().st_size > _MAX_MANIFEST_BYTES:
            return None
        layers = json.loads(manifest.read_bytes())["layers"]
        digest = next(layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA_WEIGHTS)
        found = _DIGEST.fullmatch(digest)
        blob = blobs / f"sha256-{found[1]}" if found else None
        return blob if blob and blob.is_file() else None
    except (OSError, ValueError, KeyError, TypeError, StopIteration, RecursionError):
        return None


def _lm_studio_models() -> Iterator[StoredModel]:
    """Yield LM Studio's models, which are stored as PUBLISHER/REPOSITORY/FILE."""
    for place in (".lmstudio/models", ".cache/lm-studio/models"):
        folder = Path.home() / place
        if folder.is_dir():
            for parts in _ggufs(folder):
                yield StoredModel(LM_STUDIO + _stem(parts[0]), folder / parts[0], _size(folder, parts), "lmstudio")
