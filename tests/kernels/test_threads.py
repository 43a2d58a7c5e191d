"""The default number of threads, in containers with a CPU quota below the number of cores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.cli.options import set_threads
from paceline.kernels import threads
from paceline.kernels.threads import cores, cpu_quota, limit_threads

UNIFIED = "0::/user.slice/one.scope\n"
SEPARATE = "4:memory:/docker/7f\n3:cpu,cpuacct:/docker/7f\n0::/docker/7f\n"


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Create a root folder with these control groups of the process, and these files below /sys/fs/cgroup."""
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{key}": x for key, x in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "25000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "none\n"}, None),
        ("0::/\n", {}, None),
        (UNIFIED, {"user.slice/one.scope/cpu.max": "max 100000", "user.slice/cpu.max": "300000 100000"}, 3),
        (UNIFIED, {"user.slice/one.scope/cpu.max": "200000 100000", "cpu.max": "300000 100000"}, 2),
        (UNIFIED, {"user.slice/two.scope/cpu.max": "100000 100000"}, None),
        # A container that sees its host's path, but only its own group's files.
        (SEPARATE, {"cpu,cpuacct/cpu.cfs_quota_us": "350000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 4),
        (SEPARATE, {"cpu/docker/7f/cpu.cfs_quota_us": "50000\n", "cpu/docker/7f/cpu.cfs_period_us": "50000\n"}, 1),
        (SEPARATE, {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, None),
        (SEPARATE, {"memory/cpu.cfs_quota_us": "50000\n", "memory/cpu.cfs_period_us": "50000\n"}, None),
    ],
)
def test_the_lowest_limit_of_a_group_and_its_parents_counts(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int | None
) -> None:
    assert cpu_quota(system(tmp_path, groups, files)) == expected


def test_a_system_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None


@pytest.fixture
def a_quota_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "cpu_quota", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    limit_threads.cache_clear()
    yield
    limit_threads.cache_clear()
    torch.set_num_threads(1)


@pytest.mark.usefixtures("a_quota_of_two")
def test_threads_are_lowered_to_the_quota_but_not_raised() -> None:
    for before, after in ((7, 2), (1, 1)):
        torch.set_num_threads(before)
        limit_threads.cache_clear()
        limit_threads()
        assert torch.get_num_threads() == after


@pytest.mark.usefixtures("a_quota_of_two")
def test_numbers_that_are_named_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    set_threads(5)
    limit_threads()
    assert torch.get_num_threads() == 5
    limit_threads.cache_clear()
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    limit_threads()
    assert torch.get_num_threads() == 5


@pytest.mark.usefixtures("a_quota_of_two")
def test_cores_beyond_the_quota_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores() <= 2
    monkeypatch.setattr(threads, "cpu_quota", lambda: None)
    assert cores() >= 1
