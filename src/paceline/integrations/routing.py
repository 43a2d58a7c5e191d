"""Choosing the replica for a request: the one that has already processed the beginning of its prompt."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import nlargest
from math import ceil
from typing import Any

from paceline.server.bodies import parse
from paceline.server.errors import ApiError

SESSION = "x-session-id"
"""Header for sessions. All requests of a session go to the same replica."""

_BLOCKS = 512, 4096
"""Lengths, in characters, of the beginnings to compare. The shorter beginning covers a shared system prompt, the longer
beginning covers a conversation."""
_FIELDS = ("model", "tools", "system", "instructions", "messages", "input", "prompt")
"""Fields of a body that form its prompt, in approximately the order of the prompt."""
_SLACK = 1.25
"""A replica is busy if its load exceeds the mean load by this factor (benchmarks/replicas.py)."""


@dataclass(frozen=True, slots=True)
class Route:
    """The destination of a request.

    Attributes:
        keys: Hashes of beginnings of the prompt, shortest first.
        pinned: True if only the owner of the first key may answer.
    """

    keys: tuple[bytes, ...] = ()
    pinned: bool = False


def route_of(headers: Mapping[str, str], body: bytes) -> Route:
    """Return the route of a request. A request with an invalid body may go to any replica."""
    if session := headers.get(SESSION):
        return Route((_digest(session),), pinned=True)
    try:
        opening = _opening(parse(body)[0])
    except ApiError:
        return Route()
    return Route(tuple(_digest(opening[:length]) for length in _BLOCKS)) if opening else Route()


def rank_replicas(route: Route, names: Sequence[str], load: Callable[[int], int]) -> list[list[int]]:
    """Rank the replicas for a request.

    The owner of a key is the replica with the highest hash of key and name (rendezvous hashing: Thaler and Ravishankar,
    1998). So a replica that is added or removed changes only the owner of its own share of the keys. If the owner of
    the shortest beginning is overloaded (bounded loads: Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350), the less
    loaded of two replicas is used (power of two choices). These are the first two for the longest beginning, so that a
    conversation stays with its replicas. The last resort is two random replicas.

    Args:
        route: Route of the request.
        names: Names of the replicas.
        load: Returns the load of a replica by its index.

    Returns:
        Groups of indices, the preferred group first. In a group, the replica with the lowest load is used.
    """
    everyone = range(len(names))
    if not route.keys:
        return [random.sample(everyone, min(2, len(names)))]
    owners = _first(route.keys[0], names, 1)
    if route.pinned:
        return [owners]
    share = ceil(_SLACK * (sum(map(load, everyone)) + 1) / max(1, len(names)))
    others = [_first(route.keys[-1], names, 2), random.sample(everyone, min(2, len(names)))]
    return others if any(load(owner) > share for owner in owners) else [owners, *others]


def _first(key: bytes, names: Sequence[str], count: int) -> list[int]:
    return nlargest(count, range(len(names)), lambda i: blake2b(names[i].encode(), key=key, digest_size=8).digest())


def _digest(text: str) -> bytes:
    return blake2b(text.encode(errors="replace"), digest_size=16).digest()


def _opening(body: Mapping[str, Any]) -> str:
    """Return the beginning of the prompt. A chat is cut after the user's first message, so all its turns begin
    alike."""
    parts = []
    for name in _FIELDS:
        value = body.get(name)
        if isinstance(value, list):
            users = (i for i, item in enumerate(value) if isinstance(item, dict) and item.get("role") == "user")
            value = value[: next(users, len(value)) + 1]
        if value:
            parts.append(json.dumps(value, ensure_ascii=False))
    return "\n".join(parts)
