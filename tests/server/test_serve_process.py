"""`paceline serve` as a process: it loads a model, listens, streams, and ends after SIGTERM."""

from __future__ import annotations

from pathlib import Path

from tests.support import faults
from tests.support.server_process import paceline_serve
from tests.support.tiny_model import write_tiny


def test_streams_are_written_to_their_end_after_sigterm(tmp_path: Path) -> None:
    command = paceline_serve(f"{write_tiny(tmp_path / 'tiny')} --drafter suffix --served-model-name tiny")
    assert faults.terminated(command, 200, 60.0) == 4
