"""Two processes in one folder would write over each other's work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.errors import InvalidOption
from paceline.files.folder_lock import lock_folder


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")
def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    refused = pytest.raises(InvalidOption, match="another process is using")
    for _ in range(2):
        with lock_folder(tmp_path), refused, lock_folder(tmp_path):
            pass
