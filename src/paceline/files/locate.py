"""Model references resolved to local files."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ModelNotFound, UnsupportedModel
from paceline.files.gguf_names import whole
from paceline.files.hub import hub_model
from paceline.files.names import hub_name, similar
from paceline.files.reading import open_regular
from paceline.files.stores import LM_STUDIO, OLLAMA, find
from paceline.files.wheels import PACKAGED, packaged

ADAPTER_CONFIG = "adapter_config.json"
"""File that marks a folder as a PEFT adapter."""


def resolve(
    reference: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    quiet: bool = False,
    allow_pickle: bool = False,
) -> Path:
    """Return the local folder (Hugging Face's or PEFT's layout) or GGUF file of a model, downloaded if necessary.

    `reference`: "demo", a folder ("./demo" for one of that name), a GGUF file, a short name ("qwen3:0.6b"), a hub id
    "owner/name", also with the quantisation of a GGUF file ("owner/name:Q8_0"), with `revision` (branch, tag or commit)
    and `token`, or a name in the store of Ollama ("ollama:NAME") or LM Studio ("lmstudio:NAME"). `quiet`: no progress
    bars. `allow_pickle`: where a hub model has no safetensors, download its pickled weights. Raises `ModelNotFound`,
    `UnsupportedModel` or `CorruptModel`.
    """
    name = str(reference)
    if isinstance(reference, str) and name in PACKAGED:
        return packaged(name, quiet)
    try:
        path = Path(name).expanduser()
        here = path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotFound(f"{name[:80]!r} cannot be used as a path ({error})") from error
    if here and name.strip():
        return _local(path)
    if isinstance(reference, str):
        if name.startswith((OLLAMA, LM_STUDIO)):
            return find(name).path
        if hub := hub_name(name):
            return hub_model(*hub, revision=revision, token=token, quiet=quiet, allow_pickle=allow_pickle)
    kinds = "'demo', a folder, a .gguf file, a hub id like 'owner/name', or what `paceline list --all` shows"
    raise ModelNotFound(f"there is no model {name!r}", f"Give {' or '.join(similar(name)) or kinds}")


def _local(path: Path) -> Path:
    if path.is_dir():
        return _in_folder(path)
    with open_regular(path) as file:
        if path.suffix == ".gguf" or file.read(4) == b"GGUF":
            return path
    raise UnsupportedModel(
        f"{path} is neither a folder nor a GGUF file", "For safetensors, name the folder that also holds config.json"
    )


def _in_folder(folder: Path) -> Path:
    """Return the folder itself, or the GGUF file in a folder that holds one and nothing else to load."""
    if (folder / "config.json").exists() or is_adapter(folder):
        return folder
    files = [folder / parts[0] for parts in whole(path.name for path in folder.glob("*.gguf"))]
    if len(files) > 1:
        raise ModelNotFound(f"{folder} holds {len(files)} GGUF files", f"Name one of them, as {files[0]}")
    return files[0] if files else folder


def is_adapter(path: Path) -> bool:
    """Whether this is the folder of an adapter without its base model."""
    return (path / ADAPTER_CONFIG).exists() and not (path / "config.json").exists()
