"""The placement of a model's layers on several devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import prod

import torch
from torch import Tensor

from paceline.errors import InvalidOption, OutOfMemory, install_line
from paceline.models.lazy import shape_of

DeviceMap = str | Mapping[str, int | None]
"""Device -> number of layers, in the order of the layers. None stands for all remaining layers. "auto" fills the GPUs
first, and then the CPU. A map may also be a string, such as "cuda:0=20,cuda:1=10,cpu"."""

Devices = tuple[torch.device, ...]
"""The device of each layer. The device of the first layer also holds the embedding, the final norm and the output
head."""

_SHARE = 0.8
"""Fraction of a device's free memory that weights may take. The KV cache and activations need the rest."""


def parse_map(given: DeviceMap) -> dict[str, int | None]:
    """Parse a device map.

    Returns:
        The number of layers of each device (None for all remaining layers). Empty for "auto".

    Raises:
        InvalidOption: If the map is malformed.
    """
    if isinstance(given, Mapping):
        pairs = list(given.items())
    elif given == "auto":
        return {}
    else:
        split = [part.strip().partition("=") for part in given.split(",")]
        pairs = [(name, None if not number else _number(number, given)) for name, _, number in split]
    found = {"cuda:0" if name == "cuda" else name: number for name, number in pairs}
    if len(found) < len(pairs):
        raise InvalidOption(f"device_map {given!r} names a device twice", "Name each device once")
    if "auto" in found:
        raise InvalidOption(f'device_map {given!r} has "auto" as a device', _EXAMPLE)
    if not found or any(n is not None and (type(n) is not int or n < 1) for n in found.values()):
        raise InvalidOption(f"device_map {given!r} must give each device one layer or more", _EXAMPLE)
    if None in list(found.values())[:-1]:
        raise InvalidOption(f"in device_map {given!r} only the last device can take the rest", _EXAMPLE)
    return found


_EXAMPLE = 'Write "auto", or for example "cuda:0=20,cpu"'


def _number(text: str, given: DeviceMap) -> int:
    if not text.isdecimal() or len(text) > 6:
        raise InvalidOption(f"device_map {given!r} must give whole numbers of layers, got {text!r}", _EXAMPLE)
    return int(text)


def place(given: Mapping[str, int | None], layers: int) -> Devices:
    """Return the device of each layer. Raise `InvalidOption` unless the map's numbers add up to `layers`."""
    known = sum(number or 0 for number in given.values())
    rest = layers - known if None in given.values() else 0
    if known + rest != layers or (None in given.values() and rest < 1):
        raise InvalidOption(f"device_map places {known} layers, but the model has {layers}", "Place each layer once")
    counts = {name: rest if number is None else number for name, number in given.items()}
    return tuple(torch.device(name) for name, count in counts.items() for _ in range(count))


def plan(sizes: Sequence[int], others: int, memory: Mapping[str, int]) -> Devices:
    """Fill the devices with layers, in order.

    Args:
        sizes: Size of each layer, in bytes.
        others: Size of all other weights, in bytes. They go to the device of the first layer.
        memory: Free memory of each device, in bytes.

    Returns:
        The device of each layer.

    Raises:
        OutOfMemory: If the layers do not fit.
    """
    found: list[str] = []
    for name, free in memory.items():
        left = _SHARE * free - (0 if found else others)
        while len(found) < len(sizes) and sizes[len(found)] <= left:
            left -= sizes[len(found)]
            found.append(name)
    if len(found) < len(sizes):
        total, all_free = (sum(sizes) + others) / 2**30, sum(memory.values()) / 2**30
        raise OutOfMemory(
            f"the model takes {total:.1f} GiB, and its layers do not fit into {_SHARE:.0%} of {all_free:.1f} GiB free",
            "Use quantize='int4', or a smaller model",
        )
    return tuple(map(torch.device, found))


def sizes(tensors: Mapping[str, Tensor], layers: int, matrix: float, vector: int) -> tuple[list[int], int]:
    """Return the size of each layer and of all other weights, in bytes, given the bytes per element of matrices and of
    vectors."""
    of_layers, others = [0.0] * layers, 0.0
    for name in tensors:
        shape, number = shape_of(tensors, name), name.removeprefix("model.layers.").partition(".")[0]
        size = prod(shape) * (matrix if len(shape) > 1 else vector)
        if number.isdecimal() and int(number) < layers:
            of_layers[int(number)] += size
        else:
            others += size
    return [int(size) for size in of_layers], int(others)


def free_memory() -> dict[str, int]:
    """Return the free memory of each GPU, and then of the CPU, in bytes, as accelerate reports it.

    Raises:
        InvalidOption: If accelerate is not installed.
    """
    if not find_spec("accelerate"):
        raise InvalidOption('device_map="auto" needs accelerate', f"Install it: {install_line('devices')}")
    from accelerate.utils import get_max_memory

    found = get_max_memory()
    gpus = {f"cuda:{number}": size for number, size in found.items() if isinstance(number, int)}
    return gpus | {"cpu": found["cpu"]}
