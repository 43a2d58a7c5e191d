"""The folder of `--learn`: one subfolder for each API key, with traffic, a trained head and a status."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import InvalidOption, PacelineError
from paceline.files.folder_lock import lock_folder
from paceline.files.jsonl import older_file, replace_with
from paceline.recording.file import Recording
from paceline.recording.rows import RecordedReply

_LOG = logging.getLogger("paceline.learn")
_MARK = "paceline-learn"
"""File with the secret of the folder. It also marks folders that `delete_folder` may delete."""

MIN_HELD_OUT = 16
"""Minimum number of held-out replies to compare drafters. With fewer replies, the interval is not reliable."""


@dataclass(frozen=True, slots=True)
class KeyFolder:
    """The folder of one API key.

    Attributes:
        path: The folder. Only its owner can read it.
    """

    path: Path

    @property
    def traffic(self) -> Path:
        """Recording of the latest replies. The older half is in `older_file(traffic)`."""
        return self.path / "traffic.jsonl"

    @property
    def _training_folder(self) -> Path:
        """Folder of the training run in progress. It holds all files that the run writes, or leaves after a kill."""
        return self.path / "lesson"

    @property
    def training_data(self) -> Path:
        """Recording that the head in training is trained on. It exists only until that head is finished."""
        return self._training_folder / "traffic.jsonl"

    @property
    def head(self) -> Path:
        """The trained head that requests use, if there is one."""
        return self.path / "head"

    @property
    def new_head(self) -> Path:
        """The head in training."""
        return self._training_folder / "head"

    @property
    def _old_head(self) -> Path:
        """The head before `head`. It exists only while `use_new_head` runs."""
        return self.path / "head.old"

    def use_new_head(self) -> None:
        """Replace the head with the head in training. If this is interrupted, call `recover_head`."""
        self.recover_head()
        if self.head.exists():
            self.head.rename(self._old_head)
        self.new_head.rename(self.head)
        shutil.rmtree(self._old_head, ignore_errors=True)

    def recover_head(self) -> None:
        """Finish or undo an interrupted switch. If a head was in use before, a head is in use afterwards."""
        if self._old_head.exists() and not self.head.exists():
            self._old_head.rename(self.head)
        shutil.rmtree(self._old_head, ignore_errors=True)

    def status(self) -> dict[str, Any]:
        """Return the result of the latest training run, or {} if there is none or the file is damaged."""
        try:
            found = json.loads((self.path / "status.json").read_text())
            return found if isinstance(found, dict) else {}
        except (OSError, ValueError, RecursionError):
            return {}

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Replace the result of the latest training run."""
        replace_with(self.path / "status.json", lambda new: new.write_text(json.dumps(status) + "\n"))

    def replies(self) -> list[RecordedReply]:
        """Return the recorded replies, oldest first. Skip a damaged file."""
        return [*_replies(older_file(self.traffic)), *_replies(self.traffic)]

    def discard_training(self) -> None:
        """Delete the files of a training run."""
        self.training_data.unlink(missing_ok=True)  # first, so that a partly deleted run is never continued
        shutil.rmtree(self._training_folder, ignore_errors=True)


def _replies(path: Path) -> list[RecordedReply]:
    try:
        return Recording(path)[:] if path.exists() and path.stat().st_size else []
    except (PacelineError, OSError) as error:
        _LOG.warning("%s is left out: %s", path, error)
        return []


def open_folder(folder: Path) -> Path:
    """Create a folder for learning, or check an existing one. Return the folder.

    Raises:
        InvalidOption: If the folder contains anything else.
        OSError: If the folder cannot be created.
    """
    folder = folder.expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mark = folder / _MARK
    if not mark.exists():
        if any(path.name != ".lock" for path in folder.iterdir()):
            raise InvalidOption(f"{folder} is neither empty nor a folder of --learn", "Name a new folder")
        with os.fdopen(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(os.urandom(16))
    return folder


def open_key_folder(folder: Path, key: str | None) -> KeyFolder:
    """Return the subfolder of an API key, or of None for a server without keys. Create it if it is missing.

    Its name is a keyed hash, so that it does not show the API key.
    """
    secret = (folder / _MARK).read_bytes()
    name = "all" if key is None else hashlib.blake2b(key.encode(), key=secret[:64], digest_size=8).hexdigest()
    made = folder / name
    made.mkdir(mode=0o700, exist_ok=True)
    key_folder = KeyFolder(made)
    key_folder.recover_head()
    return key_folder


def key_folders(folder: Path) -> list[KeyFolder]:
    """Return the subfolders of a folder.

    Raises:
        InvalidOption: If the folder is not a folder of --learn.
    """
    folder = folder.expanduser()
    if not (folder / _MARK).is_file():
        raise InvalidOption(
            f"{folder} is not a folder of --learn", "Name the folder that `paceline serve --learn` uses"
        )
    return [KeyFolder(path) for path in sorted(folder.iterdir()) if path.is_dir()]


def delete_folder(folder: Path) -> None:
    """Delete a folder of --learn with everything in it.

    Raises:
        InvalidOption: If the folder is not a folder of --learn, or a server is using it.
        OSError: If something cannot be deleted.
    """
    folder = folder.expanduser()
    key_folders(folder)
    with lock_folder(folder):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != _MARK:
                path.unlink()
        (folder / _MARK).unlink()  # last, so that a second try finds the folder after an error
    with suppress(OSError):
        folder.rmdir()


def describe_status(status: Mapping[str, Any]) -> str:
    """Describe the result of a training run (`KeyFolder.status`) in words."""
    if not status:
        return "no head yet"
    gain = status.get("gain")
    if not isinstance(gain, dict) or not all(isinstance(gain.get(x), float) for x in ("value", "low", "high")):
        return f"the last head was not compared: fewer than {MIN_HELD_OUT} held-out replies"
    figures = f"{gain['value']:.2f} times as fast ({gain['low']:.2f} to {gain['high']:.2f})"
    return f"last head: {figures} as before, {'in use' if status.get('switched') else 'not used'}"
