"""Which replica should answer a request: the one that has read the beginning of its prompt before."""

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
"""Header of requests that must reach the replica that answered the others of their session."""

_BLOCKS = 512, 4096
"""Characters of the beginnings that are compared: requests that share a system prompt, those of one conversation."""
_FIELDS = ("model", "tools", "system", "instructions", "messages", "input", "prompt")
"""Fields of a body that its prompt is made of, in about the order of the prompt."""
_SLACK = 1.25
"""Load of a replica, relative to the mean, from which it is busy (benchmarks/replicas.py)."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request should go. `keys`: hashes of longer and longer beginnings. `pinned`: nowhere but to the first
    key's owner."""

    keys: tuple[bytes, ...] = ()
    pinned: bool = False


def route_of(headers: Mapping[str, str], body: bytes) -> Route:
    """Return the route of a request. One whose body no server would accept may go anywhere."""
    if session := headers.get(SESSION):
        return Route((_digest(session),), pinned=True)
    try:
        opening = _opening(parse(body)[0])
    except ApiError:
        return Route()
    return Route(tuple(_digest(opening[:length]) for length in _BLOCKS)) if opening else Route()


def ranks(route: Route, names: Sequence[str], load: Callable[[int], int]) -> list[list[int]]:
    """Return groups of indices of `names`, the preferred group first; of a group, the one with the least load is taken.

    The owner of a key has the highest hash of key and name (rendezvous hashing: Thaler and Ravishankar, 1998), so that
    a replica that comes or goes changes the owner of its own share of the keys alone. If the owner of the shortest
    beginning has more than its share of the load (bounded loads: Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350),
    two follow (power of two choices): the first two in the order of the longest beginning, so that a conversation keeps
    its replicas. Two at random are the last resort.
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
    """Return what the prompt begins with: of a chat, up to the first message of the user, so that every turn of it has
    the same."""
    parts = []
    for name in _FIELDS:
        value = body.get(name)
        if isinstance(value, list):
            users = (i for i, item in enumerate(value) if isinstance(item, dict) and item.get("role") == "user")
            value = value[: next(users, len(value)) + 1]
        if value:
            parts.append(json.dumps(value, ensure_ascii=False))
    return "\n".join(parts)
