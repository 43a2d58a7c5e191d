"""Room that texts may take in a server's memory: positions, whose keys and values are cached, and states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.cli.options import processes

if TYPE_CHECKING:
    from paceline.llm import LLM


def cache_positions(llm: LLM, memory: float | None) -> int:
    """Return the positions whose keys and values fit into `memory` GiB, or into a quarter of each device's free one."""
    import psutil
    import torch

    from paceline.models.decoder import Decoder

    target = llm.model.target
    if not isinstance(target, Decoder):
        return 1 << 20
    if memory is not None:
        return max(1, int(memory * 2**30 / position_bytes(llm)))

    def free(device: torch.device) -> float:
        on_gpu = device.type == "cuda"
        return torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available / processes()

    return max(1, int(min(free(device) / 4 / max(1, own) for device, own in target.position_bytes().items())))


def position_bytes(llm: LLM) -> int:
    """Return the bytes that the cache holds for one position, 0 where they are not known."""
    from paceline.models.decoder import Decoder

    target = llm.model.target
    if not isinstance(target, Decoder):
        return 0
    return max(1, target.config.cache_bytes(1, target.dtype.itemsize))  # a model may have nothing but states


def state_positions(llm: LLM) -> float:
    """Return the positions that take as much memory as one state of a text."""
    from paceline.models.decoder import Decoder

    target = llm.model.target
    return target.config.state_bytes / position_bytes(llm) if isinstance(target, Decoder) else 0.0
