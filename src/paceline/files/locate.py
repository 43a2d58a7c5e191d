"""Model references resolved to local files."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import ModelNotFound, UnsupportedModel
from paceline.files.reading import open_regular
from paceline.files.wheels import PACKAGED, packaged

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
_PICKLES = ["pytorch_model*.bin", "adapter_model.bin", "medusa_lm_head.pt"]
_UNWANTED = ["*/*", "consolidated*"]
"""Subfolders and consolidated files of a hub model repeat its weights in other layouts."""
_TRANSPORTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "hf_xet")
"""Modules of the hub client's transports, whose errors may be no OSError."""
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

    `reference`: "demo", a folder ("./demo" for one of that name), a GGUF file, or a hub id "owner/name" with `revision`
    (branch, tag or commit) and `token`. `quiet`: no progress bars. `allow_pickle`: where a hub model has no
    safetensors, download its pickled weights. Raises `ModelNotFound`, `UnsupportedModel` or `CorruptModel`.
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
    if isinstance(reference, str) and _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _hub(name, revision, token, quiet, allow_pickle)
    raise ModelNotFound(
        f"there is no model {name!r}", "Give 'demo', a folder, a .gguf file, or a hub id like 'owner/name'"
    )


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
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise ModelNotFound(f"{folder} holds {len(files)} GGUF files", f"Name one of them, as {files[0]}")
    return files[0] if files else folder


def is_adapter(path: Path) -> bool:
    """Whether this is the folder of an adapter without its base model."""
    return (path / ADAPTER_CONFIG).exists() and not (path / "config.json").exists()


def _hub(name: str, revision: str | None, token: str | None, quiet: bool, allow_pickle: bool) -> Path:
    path = _snapshot(name, revision, token, quiet, _WANTED)
    if any(path.glob("*.safetensors")):
        return path
    if allow_pickle:
        return _snapshot(name, revision, token, quiet, _WANTED + _PICKLES)
    raise UnsupportedModel(
        f"the hub model {name} holds no safetensors",
        "Use another model, download one of its GGUF files and name that, or set allow_pickle=True",
    )


def _snapshot(name: str, revision: str | None, token: str | None, quiet: bool, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        with _progress_bars(quiet):
            folder = snapshot_download(
                name, revision=revision, token=token, allow_patterns=patterns, ignore_patterns=_UNWANTED
            )
    except Exception as error:
        known = isinstance(error, (OSError, HFValidationError))
        if not known and type(error).__module__.partition(".")[0] not in _TRANSPORTS:
            raise
        raise _download_error(name, revision, error) from error
    return Path(folder)


@contextmanager
def _progress_bars(quiet: bool) -> Iterator[None]:
    """Turn the hub client's progress bars off where `quiet`, and restore them afterwards."""
    # The functions are public by documentation, but not in the module's __all__.
    utils: Any = importlib.import_module("huggingface_hub.utils")
    silence = quiet and not utils.are_progress_bars_disabled()
    if silence:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        if silence:
            utils.enable_progress_bars()


def _download_error(name: str, revision: str | None, error: Exception) -> ModelNotFound:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        error = errors.OfflineModeIsEnabled(str(error))

    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    cause = f"the hub model {name} is not on this machine and cannot be downloaded ({reason})"
    fix = "Check the network and free disk space, or download it elsewhere and name the folder"
    if isinstance(error, errors.GatedRepoError):
        cause = f"the hub model {name} is gated"
        fix = "Accept its terms on huggingface.co, then give token=... or run `hf auth login`"
    elif isinstance(error, errors.RepositoryNotFoundError):
        cause = f"there is no hub model {name}, or it is private, and no such folder here"
        fix = "Check the name; a private model needs token=... or `hf auth login`"
    elif isinstance(error, errors.RevisionNotFoundError):
        cause, fix = f"the hub model {name} has no revision {revision!r}", "Name a branch, tag or commit of it"
    elif isinstance(error, errors.HFValidationError):
        cause, fix = f"{name!r} is not a hub id ({reason})", "Write it as 'owner/name'"
    elif isinstance(error, errors.OfflineModeIsEnabled):
        cause = f"the hub model {name} is not on this machine and offline mode is on"
        fix = "Unset HF_HUB_OFFLINE, or download it on a machine with a network and name the folder"
    elif isinstance(error, errors.HfHubHTTPError):
        cause, fix = f"the hub refused {name} ({reason})", "Check the token and the name, or try again later"
    return ModelNotFound(cause, fix)
