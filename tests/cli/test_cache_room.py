"""Free memory of machines and containers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.cli.cache_room import free_memory, prefix_room

GIB = 2**30


def group(root: Path, line: str, folder: str, **files: object) -> Path:
    """Create a root folder with one control group. Its files have these names after `memory.`."""
    for name, text in {"proc/self/cgroup": line, **{f"{folder}/memory.{key}": x for key, x in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


@pytest.fixture(autouse=True)
def a_machine_with_64_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 * GIB))


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    stat = f"anon 5\ninactive_file {GIB}"
    limited = group(tmp_path / "2", "0::/", "sys/fs/cgroup", max=8 * GIB, current=3 * GIB, stat=stat)
    assert free_memory(limited) == 6 * GIB
    stat, line = f"inactive_file 7\ntotal_inactive_file {GIB}", "4:memory:/docker/7f"
    sizes = {"limit_in_bytes": 8 * GIB, "usage_in_bytes": 3 * GIB}
    assert free_memory(group(tmp_path / "1", line, "sys/fs/cgroup/memory", **sizes, stat=stat)) == 6 * GIB


def test_a_machine_without_limits_has_its_own_memory(tmp_path: Path) -> None:
    assert free_memory(tmp_path) == 64 * GIB
    free = group(tmp_path, "0::/", "sys/fs/cgroup", max="max", current=3 * GIB, stat="inactive_file 0")
    assert free_memory(free) == 64 * GIB


def test_the_prefix_cache_takes_an_eighth_and_at_least_a_gibibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.cache_room.free_memory", lambda: 24 * GIB)
    assert prefix_room(None) == 3 * GIB
    monkeypatch.setattr("paceline.cli.cache_room.free_memory", lambda: 2 * GIB)
    assert prefix_room(None) == GIB
    assert prefix_room(0.5) == GIB // 2
