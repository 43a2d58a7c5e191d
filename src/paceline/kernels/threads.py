"""The number of threads to use. By default, torch starts one thread per physical core, but a container may be granted
less processor time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch


def cores() -> int:
    """Return the number of logical cores that this process may run on, or its CPU quota if that is lower."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(found, cpu_quota() or found)


@cache
def limit_threads() -> None:
    """Lower torch's number of threads to the CPU quota, unless OMP_NUM_THREADS is set.

    With more threads than the quota allows, the system stops all of them for the rest of each period. This runs once
    per process, so that a later `torch.set_num_threads` stays in effect.
    """
    quota = None if "OMP_NUM_THREADS" in os.environ else cpu_quota()
    if quota and quota < torch.get_num_threads():
        torch.set_num_threads(quota)


def cpu_quota(root: Path = Path("/")) -> int | None:
    """Return the CPU quota of this process in cores, rounded up, or None if there is no quota.

    The quota comes from Linux control groups (`docker --cpus`, Kubernetes limits, systemd's CPUQuota).
    """
    shares = [share for folder in control_groups("cpu", root) if (share := _share(folder))]
    return math.ceil(min(shares)) if shares else None


def control_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's Linux control groups that may limit a resource, and of their parents.

    Inside a container, the container's own group is mounted as the root, but the path that the system lists may be the
    path on the host.

    Args:
        controller: The resource, such as "cpu" or "memory".
        root: Root of the file system.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    return [*_folders(root / "sys/fs/cgroup", lines, controller)]


def _folders(mounts: Path, lines: list[str], controller: str) -> Iterator[Path]:
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for mount in (mounts / controllers, mounts / (controller if controllers else "unified")):
            folder = mount / path.lstrip("/")
            yield from (one for one in (folder, *folder.parents) if one.is_relative_to(mount))


def _share(folder: Path) -> float | None:
    """Return the limit of one group in cores: from `cpu.max` (version 2) or from two files (version 1)."""
    try:
        if (limit := folder / "cpu.max").exists():
            quota, period = limit.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return int(quota) / int(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
