"""Memory that a server uses for texts: the number of cached positions, and the size of recurrent states."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.options import processes

if TYPE_CHECKING:
    from paceline.llm import LLM


def cache_positions(llm: LLM, memory: float | None) -> int:
    """Return the number of positions with keys and values that fit into `memory` GiB.

    Without `memory`, use a quarter of the free memory of each device.
    """
    import torch

    from paceline.models.decoder import Decoder

    target = llm.model.target
    if not isinstance(target, Decoder):
        return 1 << 20
    if memory is not None:
        return max(1, int(memory * 2**30 / position_bytes(llm)))

    def free(device: torch.device) -> float:
        on_gpu = device.type == "cuda"
        return torch.cuda.mem_get_info(device)[0] if on_gpu else free_memory() / processes()

    return max(1, int(min(free(device) / 4 / max(1, own) for device, own in target.position_bytes().items())))


def prefix_room(memory: float | None) -> int:
    """Return the size of the prefix cache in bytes. `memory`: Its size in GiB, None for the default.

    The default grows with the machine, since an agent's prompt of 20,000 tokens takes 2.6 GB with a model of 8 billion
    parameters.
    """
    if memory is not None:
        return int(memory * 2**30)
    return int(max(2**30, free_memory() / processes() / 8))


def free_memory(root: Path = Path("/")) -> int:
    """Return the free memory of the machine, or of the container if that has less, in bytes. `root`: Root of the file
    system."""
    import psutil

    from paceline.kernels.threads import control_groups

    rooms = [room for folder in control_groups("memory", root) if (room := _room(folder)) is not None]
    return min([int(psutil.virtual_memory().available), *rooms])


def _room(folder: Path) -> int | None:
    """Return the free memory of a control group of version 2 or 1, in bytes. None if it has no limit."""
    own = ("memory.max", "memory.current", "inactive_file")
    if not (folder / own[0]).exists():
        own = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    try:
        limit, used = ((folder / name).read_text().strip() for name in own[:2])
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        # File pages that were not used recently are freed when memory is needed.
        return max(0, int(limit) - int(used) + int(counts[own[2]])) if limit != "max" else None
    except (OSError, ValueError, KeyError):
        return None


def position_bytes(llm: LLM) -> int:
    """Return the bytes of one position in the cache, or 0 if they are not known."""
    from paceline.models.decoder import Decoder

    target = llm.model.target
    if not isinstance(target, Decoder):
        return 0
    return max(1, target.cache_bytes(1))  # a model may have only recurrent states


def state_positions(llm: LLM) -> float:
    """Return the size of a text's recurrent state, as a number of positions."""
    from paceline.models.decoder import Decoder

    target = llm.model.target
    return target.config.state_bytes / position_bytes(llm) if isinstance(target, Decoder) else 0.0
