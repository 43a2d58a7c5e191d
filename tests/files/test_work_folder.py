"""Folders for unfinished files in the cache: what killed processes have left in it is removed."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.files.wheels import work_folder


def test_a_work_folder_removes_old_folders_of_its_own_kind(tmp_path: Path) -> None:
    for name in (".fetch-old", ".fetch-new", ".compile-old", "models"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").touch()
        if name != ".fetch-new":
            os.utime(tmp_path / name, (0, 0))
    with work_folder(tmp_path, ".fetch-") as folder:
        assert folder.parent == tmp_path
        (folder / "part").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".compile-old", ".fetch-new", "models"]


def test_a_work_folder_makes_the_cache(tmp_path: Path) -> None:
    with work_folder(tmp_path / "a" / "b", ".fetch-") as folder:
        assert folder.is_dir()
    assert not folder.exists()
