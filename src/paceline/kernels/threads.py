"""How many threads are worth having. Torch's default is one for each physical core that the process may run on; a
container may have less processor time than that."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch


def cores() -> int:
    """Return the logical cores that this process may run on, or its quota if that is less."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(found, cpu_quota() or found)


@cache
def limit_threads() -> None:
    """Lower torch's threads to the quota, unless OMP_NUM_THREADS names a number. Once per process: what is set later
    stays.

    With more threads than a quota allows, the system stops all of them for the rest of each period.
    """
    quota = None if "OMP_NUM_THREADS" in os.environ else cpu_quota()
    if quota and quota < torch.get_num_threads():
        torch.set_num_threads(quota)


def cpu_quota(root: Path = Path("/")) -> int | None:
    """Return the cores' worth of time that Linux's control groups grant this process, rounded up (`docker --cpus`,
    Kubernetes' limits, systemd's CPUQuota); None if there is no limit."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    shares = [share for folder in _folders(root / "sys/fs/cgroup", lines) if (share := _share(folder))]
    return math.ceil(min(shares)) if shares else None


def _folders(mounts: Path, lines: list[str]) -> Iterator[Path]:
    """The process's groups that may limit time, and those around them. In a container its own group is the mount, and
    the path may be one of the host's."""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in (mounts / controllers, mounts / ("cpu" if controllers else "unified")):
            folder = mount / path.lstrip("/")
            yield from (one for one in (folder, *folder.parents) if one.is_relative_to(mount))


def _share(folder: Path) -> float | None:
    """The limit of one group, in cores: `cpu.max` of version 2, two files of version 1."""
    try:
        if (limit := folder / "cpu.max").exists():
            quota, period = limit.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return int(quota) / int(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
