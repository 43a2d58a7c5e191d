"""Models of the Hugging Face hub.

The hub's client downloads folders of safetensors, and Paceline's own code downloads GGUF files. The client discards a
file after an interruption, and does not check hashes, which is not acceptable for files of several gigabytes.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO
from math import inf
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from paceline.errors import CorruptModel, ModelNotFound, PacelineError, UnsupportedModel
from paceline.files.gguf_names import choose_model, gguf_files
from paceline.files.progress import progress_bar
from paceline.files.wheels import cache_folder

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Progress = Callable[[str, int, int], None]

_FILE_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", ".gitattributes"]
"""Patterns of the files to download. Every repository contains .gitattributes, and the client would print a warning if
no file matched."""
_PICKLE_PATTERNS = ["pytorch_model*.bin", "adapter_model.bin", "medusa_lm_head.pt"]
_SKIPPED_PATTERNS = ["*/*", "consolidated*"]
"""Files to skip: subfolders and consolidated files contain the same weights in other layouts."""
_TRANSPORTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "hf_xet")
"""Modules of the transports that the hub's client uses. Some of their errors are not subclasses of OSError."""
_CHUNK_BYTES = 1 << 20
_MIN_FREE_BYTES = 1 << 28
"""Number of bytes that a download must leave free on the disk."""


def store_folder() -> Path:
    """Return the folder of downloaded GGUF files, which are stored in it as OWNER/NAME/FILE."""
    return cache_folder() / "models"


def hub_model(
    name: str,
    quantization: str | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    quiet: bool = False,
    allow_pickle: bool = False,
    newest: bool = False,
) -> Path:
    """Return the folder or the GGUF file of a hub model. Download it if necessary.

    Args:
        name: Repository, "owner/name".
        quantization: GGUF file to choose (`gguf_names.choose_model`). None means the safetensors, or a GGUF file if
            there are no safetensors.
        revision: Branch, tag or commit. None means the main branch.
        token: Access token of the hub. None uses the token of the user.
        quiet: Show no progress bars.
        allow_pickle: Download pickled weights if there are no safetensors.
        newest: Ask the hub for a newer version even if a GGUF file is already on this machine.

    Raises:
        ModelNotFound: If the model does not exist or cannot be downloaded.
        UnsupportedModel: If the repository contains neither safetensors nor GGUF files.
        CorruptModel: If a downloaded file has the wrong hash.
    """
    if not newest and (path := _downloaded(name, quantization, revision)):
        return path
    if quantization is None and "gguf" not in name.lower():  # repositories of GGUF files have "gguf" in their names
        folder = _snapshot(name, revision, token, quiet, _FILE_PATTERNS)
        if any(folder.glob("*.safetensors")):
            return folder
        if allow_pickle:
            return _snapshot(name, revision, token, quiet, _FILE_PATTERNS + _PICKLE_PATTERNS)
    return hub_gguf(name, quantization, revision=revision, token=token, quiet=quiet)


def hub_gguf(
    name: str,
    quantization: str | None = None,
    *,
    revision: str | None = None,
    token: str | Literal[False] | None = None,
    quiet: bool = False,
    most: float = inf,
    progress: Progress | None = None,
) -> Path:
    """Return the GGUF file of a hub model. Download it unless the same file is already on this machine.

    Args:
        name: Repository, "owner/name".
        quantization: See `gguf_names.choose_model`.
        revision: Branch, tag or commit. None means the main branch.
        token: Access token of the hub. None uses the token of the user, and False sends none.
        quiet: Show no progress bars.
        most: Maximum size in bytes.
        progress: Called with file name, bytes so far, and total bytes.

    Raises:
        ModelNotFound: If the model does not exist or cannot be downloaded.
        UnsupportedModel: If there are no GGUF files, or the file is too large.
        CorruptModel: If a downloaded file has the wrong hash.
    """
    with _hub_errors(name, revision):
        files = _listing(name, revision, token)
    if not any(file.name.endswith(".gguf") for file in files):
        raise UnsupportedModel(
            f"the hub model {name} contains neither safetensors nor GGUF files",
            "Use another model, or set allow_pickle=True",
        )
    names = choose_model([file.name for file in files], quantization, name)
    chosen = [file for file in files if file.name in names]
    if (size := sum(file.size for file in chosen)) > most:
        raise UnsupportedModel(
            f"{names[0]} has {size / 1e9:.1f} GB, but at most {most / 1e9:.1f} GB are allowed", "Use a smaller model"
        )
    folder = _folder(name, revision)
    with _hub_errors(name, revision):
        for file in chosen:
            _download(name, file, folder, token, quiet, progress or (lambda *_: None))
    return folder / names[0]


def _folder(name: str, revision: str | None) -> Path:
    return store_folder() / (name if revision is None else f"{name}@{revision.replace('/', '-')}")


def _downloaded(name: str, quantization: str | None, revision: str | None) -> Path | None:
    """Return a GGUF file that Paceline or the hub's client has downloaded before, or None."""
    for folder in (_folder(name, revision), snapshot_of(name, revision)):
        if folder and (files := gguf_files(folder)):
            try:
                return folder / choose_model(files, quantization, name)[0]
            except ModelNotFound:
                continue
    return None


def client_cache() -> Path:
    """Return the cache folder of the hub's client."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def snapshot_of(name: str, revision: str | None) -> Path | None:
    """Return the folder of a model's revision in the cache of the hub's client, or None."""
    folder = client_cache() / f"models--{name.replace('/', '--')}"
    commit = revision or "main"
    with suppress(OSError, ValueError):
        commit = (folder / "refs" / commit).read_text().strip()
    found = folder / "snapshots" / commit
    return found if found.parent == folder / "snapshots" and found.is_dir() else None


class _HubFile(NamedTuple):
    """A file of a repository.

    Attributes:
        name: Path in the repository.
        size: Size in bytes.
        sha256: Hash of the content.
        commit: Commit of the repository.
    """

    name: str
    size: int
    sha256: str
    commit: str


def _listing(name: str, revision: str | None, token: str | Literal[False] | None) -> list[_HubFile]:
    """Return the large files of a repository."""
    from huggingface_hub import HfApi

    found = HfApi(token=token).model_info(name, revision=revision, files_metadata=True)
    return [
        _HubFile(one.rfilename, one.lfs.size, one.lfs.sha256, found.sha or "main")
        for one in found.siblings or ()
        if one.lfs and _is_safe(one.rfilename)
    ]


def _is_safe(name: str) -> bool:
    """Return True if a file's name cannot lead out of its folder, on any system."""
    parts = PurePosixPath(name).parts
    return bool(parts) and not any(part in ("..", "/") or set(part) & set("\\:\0") for part in parts)


class _ProgressWriter(BufferedWriter):
    """A file opened for appending. It calls `watch` with its size after every write."""

    def __init__(self, path: Path, watch: Callable[[int], None]) -> None:
        super().__init__(FileIO(path, "ab"))
        self._watch = watch

    def write(self, data: ReadableBuffer, /) -> int:
        written = super().write(data)
        self._watch(self.tell())
        return written


def _download(
    name: str, file: _HubFile, folder: Path, token: str | Literal[False] | None, quiet: bool, progress: Progress
) -> None:
    """Download a file unless the same file exists, continue an interrupted download, and check the SHA-256."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._fixes import WeakFileLock
    from huggingface_hub.utils._headers import build_hf_headers

    target = folder / file.name
    if target.exists() and target.stat().st_size == file.size and _sha256(target, quiet) == file.sha256:
        return
    target.parent.mkdir(parents=True, exist_ok=True)

    def watch(done: int) -> None:
        progress(target.name, done, file.size)

    # The name contains the hash, so that a download never continues the partial file of another version.
    part = target.with_name(f".{target.name}.{file.sha256[:16]}.incomplete")
    with WeakFileLock(part.with_suffix(".lock")), _ProgressWriter(part, watch) as out:
        begun = out.tell()
        missing = file.size - begun
        if shutil.disk_usage(target.parent).free < missing + _MIN_FREE_BYTES:
            raise ModelNotFound(
                f"the disk of {folder} has no room for the {missing / 1e9:.1f} GB of {target.name}",
                "Free space, or set PACELINE_CACHE to a folder on another disk",
            )
        url = hf_hub_url(name, file.name, revision=file.commit)
        with _progress_bars(quiet):
            http_get(
                url,
                out,
                resume_size=begun,
                headers=build_hf_headers(token=token),
                expected_size=file.size,
                displayed_filename=target.name,
            )
        out.flush()
        if (digest := _sha256(part, quiet)) != file.sha256:
            part.unlink()
            raise CorruptModel(
                f"the SHA-256 of {target.name} is {digest}, but the hub expects {file.sha256}",
                "Try again without a proxy or mirror in between; the download was discarded",
            )
        os.replace(part, target)
    part.with_suffix(".lock").unlink(missing_ok=True)


def _sha256(path: Path, quiet: bool) -> str:
    digest, size, done = hashlib.sha256(), path.stat().st_size, 0
    with path.open("rb") as file, progress_bar(f"checking {path.name}", not quiet) as advance:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
            done += len(data)
            advance(done, size)
    return digest.hexdigest()


def _snapshot(name: str, revision: str | None, token: str | None, quiet: bool, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    with _hub_errors(name, revision), _progress_bars(quiet):
        folder = snapshot_download(
            name, revision=revision, token=token, allow_patterns=patterns, ignore_patterns=_SKIPPED_PATTERNS
        )
    return Path(folder)


@contextmanager
def _hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Convert errors of the hub's client and its transports to `ModelNotFound`."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except PacelineError:
        raise
    except Exception as error:  # transports have their own error types; any other error is raised again
        known = isinstance(error, (OSError, HFValidationError))
        if not known and type(error).__module__.partition(".")[0] not in _TRANSPORTS:
            raise
        raise _download_error(name, revision, error) from error


@contextmanager
def _progress_bars(quiet: bool) -> Iterator[None]:
    """Turn off the progress bars of the hub's client if `quiet`, and restore them afterwards."""
    # These functions are documented, but missing in the module's __all__.
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
    fix = "Check the network and free disk space, or download it elsewhere and pass the folder"
    if isinstance(error, errors.GatedRepoError):
        cause = f"the hub model {name} is gated"
        fix = "Accept its terms on huggingface.co, then give token=... or run `hf auth login`"
    elif isinstance(error, errors.RepositoryNotFoundError):
        cause = f"the hub model {name} does not exist or is private, and there is no such folder on this machine"
        fix = "Check the name; a private model needs token=... or `hf auth login`"
    elif isinstance(error, errors.RevisionNotFoundError):
        cause, fix = f"the hub model {name} has no revision {revision!r}", "Use one of its branches, tags or commits"
    elif isinstance(error, errors.HFValidationError):
        cause, fix = f"{name!r} is not a hub id ({reason})", "Write it as 'owner/name'"
    elif isinstance(error, errors.OfflineModeIsEnabled):
        cause = f"the hub model {name} is not on this machine and offline mode is on"
        fix = "Unset HF_HUB_OFFLINE, or download it on a machine with a network and pass the folder"
    elif isinstance(error, errors.HfHubHTTPError):
        cause, fix = f"the hub refused {name} ({reason})", "Check the token and the name, or try again later"
    return ModelNotFound(cause, fix)
