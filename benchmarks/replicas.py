"""Simulate the routing of requests to 10 to 1,000 replicas, and measure the costs of replicas on Ray.

`--parts FILE` reuses the measured costs of an earlier result. All replies on a replica share its processor: together, b
replies are b / (1 + SHARING (b - 1)) times as fast as a single one. A request takes prefill of the tokens that are not
in the replica's prefix cache, and then decoding. Conversations begin at random times with one of a few hundred system
prompts (Zipf distribution), and their turns follow later. The simulation calls `paceline.integrations.routing` itself.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common import RESULTS, Grid, median, provenance, report, write

from paceline.integrations import routing

PREFILL, DECODE, SHARING = 150.0, 29.1, 0.27
"""Tokens per second of prefill and of decoding a single reply, for the 1.5B model on two cores
(results/2026-11-23-real-models.md), and the relative cost of each additional reply in a round
(results/2026-11-22-serve.md: 16 clients have 3 times the throughput of one)."""
CACHE, SLOTS = 37_000, 16
"""Tokens in 1 GiB of prefix cache (28 KiB per token), and concurrent replies per replica."""
SYSTEMS, TURNS, QUESTION, ANSWER, THINK = 300, 4, 60, 120, 20.0
LOAD = 0.6
"""Offered load as a share of the capacity, if half of all prompt tokens are cached."""
_FIRST = routing._first
Policy = Callable[[routing.Route, Sequence[str], Callable[[int], int]], list[list[int]]]


def owner_until_full(route: routing.Route, names: Sequence[str], load: Callable[[int], int]) -> list[list[int]]:
    """Prefer the owner of the shortest prefix while it has a free slot, and then one of two random replicas."""
    return [routing._first(route.keys[0], names, 1), routing.rank_replicas(routing.Route(), names, load)[0]]


POLICIES: dict[str, Policy] = {
    "two at random": lambda _, names, load: routing.rank_replicas(routing.Route(), names, load),
    "owner until full": owner_until_full,
    "paceline": routing.rank_replicas,
}


@dataclass(eq=False)
class Replica:
    """One replica. `clock` is the seconds of work that each reply has received since the start."""

    clock: float = 0.0
    seen: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    cached: OrderedDict[int, tuple[int, int]] = field(default_factory=OrderedDict)
    held: int = 0

    def advance(self, now: float) -> None:
        count = len(self.ends)
        self.clock += (now - self.seen) / (1 + SHARING * (count - 1)) if count else 0.0
        self.seen = now

    def next_end(self) -> float:
        return self.seen + (self.ends[0][0] - self.clock) * (1 + SHARING * (len(self.ends) - 1))

    def found(self, talk: int, system: int, system_tokens: int, length: int) -> int:
        """Return the number of cached tokens of a prompt, and add the prompt to the cache."""
        own = self.cached.pop(talk, (system, 0))[1]
        self.held += length - own
        shared = max((system_tokens for other, _ in self.cached.values() if other == system), default=0)
        self.cached[talk] = system, length
        while self.held > CACHE:
            self.held -= self.cached.popitem(last=False)[1][1]
        return max(own, shared)


@dataclass
class Conversation:
    """A conversation: system prompt, tokens in the system prompt, tokens so far, remaining turns, and route."""

    system: int
    system_tokens: int
    length: int
    left: int
    route: routing.Route


def begin(number: int, draw: random.Random, lengths: Sequence[int], weights: Sequence[float]) -> Conversation:
    (system,) = draw.choices(range(SYSTEMS), weights)
    said = [{"role": "system", "content": f"{system} " * 300}, {"role": "user", "content": str(number)}]
    route = routing.route_of({}, json.dumps({"messages": said}).encode())
    return Conversation(system, lengths[system], lengths[system], 1 + int(draw.expovariate(1 / (TURNS - 1))), route)


class Simulation:
    """Event-driven simulation of conversations and replicas. Each of `fronts` routers knows only its own requests."""

    def __init__(self, policy: Policy, count: int, fronts: int, seed: int = 0) -> None:
        self._draw, self._policy = random.Random(seed), policy
        random.seed(seed)
        self._lengths = [self._draw.randrange(200, 1800) for _ in range(SYSTEMS)]
        self._weights = [1 / (i + 1) for i in range(SYSTEMS)]
        self.names, self.replicas = [f"r{i}" for i in range(count)], [Replica() for _ in range(count)]
        self._sent = [[0] * count for _ in range(fronts)]
        work = 0.5 * (1000 + TURNS / 2 * (QUESTION + ANSWER)) / PREFILL + ANSWER / DECODE
        self._rate = LOAD * count * (SLOTS / (1 + SHARING * (SLOTS - 1))) / work / TURNS
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = self._talks = 0
        self._running: list[tuple[Conversation, int]] = []
        self.firsts: list[float] = []
        self.prompts: list[tuple[int, int]] = []
        """Cached tokens and total tokens of each prompt."""

    def run(self, requests: int) -> None:
        """Simulate until this many requests have been sent."""
        self._at(0.0, self._talk)
        while len(self.firsts) < requests:
            now, _, event, arguments = heapq.heappop(self._events)
            event(now, *arguments)

    def _at(self, when: float, event: Callable[..., None], *arguments: Any) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, event, arguments))

    def _talk(self, now: float) -> None:
        self._talks += 1
        self._turn(now, begin(self._talks, self._draw, self._lengths, self._weights))
        self._at(now + self._draw.expovariate(self._rate), self._talk)

    def _turn(self, now: float, talk: Conversation) -> None:
        front = self._draw.randrange(len(self._sent))
        chosen = self._choose(talk.route, self._sent[front])
        replica = self.replicas[chosen]
        replica.advance(now)
        self._sent[front][chosen] += 1
        length = talk.length + QUESTION
        hit = replica.found(id(talk), talk.system, talk.system_tokens, length + ANSWER)
        prefill = (length - hit) / PREFILL
        heapq.heappush(replica.ends, (replica.clock + prefill + ANSWER / DECODE, len(self._running)))
        self._running.append((talk, front))
        self.firsts.append(prefill * (1 + SHARING * (len(replica.ends) - 1)))
        self.prompts.append((hit, length))
        self._at(replica.next_end(), self._end, chosen)

    def _choose(self, route: routing.Route, sent: list[int]) -> int:
        groups = self._policy(route, self.names, sent.__getitem__)
        free = [group for group in groups if any(len(self.replicas[i].ends) < SLOTS for i in group)]
        return min((free or groups[-1:])[0], key=sent.__getitem__)

    def _end(self, now: float, chosen: int) -> None:
        """End a reply. If other replies have joined and slowed it down, check again later."""
        replica = self.replicas[chosen]
        if not replica.ends:
            return
        if replica.next_end() > now + 1e-9:
            self._at(replica.next_end(), self._end, chosen)
            return
        replica.advance(now)
        talk, front = self._running[heapq.heappop(replica.ends)[1]]
        self._sent[front][chosen] -= 1
        talk.length += QUESTION + ANSWER
        talk.left -= 1
        if talk.left > 0:
            self._at(now + self._draw.expovariate(1 / THINK), self._turn, talk)
        if replica.ends:
            self._at(replica.next_end(), self._end, chosen)


def simulate(policy: Policy, count: int, per_replica: int, fronts: int, seed: int = 0) -> dict[str, float]:
    """Simulate `per_replica` requests per replica. Return figures without the first third of the requests."""
    simulation, total = Simulation(policy, count, fronts, seed), count * per_replica
    # Keys repeat often. Caching their owners makes it possible to simulate thousands of requests per minute.
    first = lru_cache(None)(lambda key, few: _FIRST(key, simulation.names, few))
    with patch.object(routing, "_first", lambda key, _, few: first(key, few)):
        simulation.run(total)
    late, prompts = sorted(simulation.firsts[total // 3 :]), simulation.prompts[total // 3 :]
    loads = [len(replica.ends) for replica in simulation.replicas]
    return {
        "hit rate": sum(hit for hit, _ in prompts) / sum(length for _, length in prompts),
        "first token s": late[len(late) // 2],
        "p99": late[len(late) * 99 // 100],
        "mean load": sum(loads) / count,
        "highest load": max(loads),
    }


def router_times() -> dict[int, float]:
    """Return CPU milliseconds per routing decision, by number of replicas."""
    found = {}
    for count in (10, 100, 1000, 4000):
        names, loads = [f"replica-{i:08x}" for i in range(count)], [1] * count
        times = []
        for i in range(15):
            route = routing.route_of({}, json.dumps({"prompt": str(i)}).encode())
            began = time.thread_time()
            routing.rank_replicas(route, names, loads.__getitem__)
            times.append((time.thread_time() - began) * 1e3)
        found[count] = median(times)
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--replicas", type=int, nargs="+", default=[10, 100, 1000], help="numbers of replicas (10 100 1000)"
    )
    parser.add_argument("--requests", type=int, default=30, help="requests per replica (30)")
    parser.add_argument("--parts", type=Path, help="earlier result file with measured costs to reuse")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    args = parser.parse_args(arguments)
    times = router_times()
    if args.parts:
        parts = json.loads(args.parts.read_text())["parts"]
    else:
        from replicas_parts import measure

        parts = measure()
        print(json.dumps({"parts": parts}), flush=True)
    figures: dict[str, Any] = {}
    for count in args.replicas:
        for fronts in (1, 8) if count > 10 else (1,):
            for name, policy in POLICIES.items():
                figures[f"{count} replicas, {fronts} fronts, {name}"] = simulate(policy, count, args.requests, fronts)
    columns = list(next(iter(figures.values())))
    grids = [
        Grid(
            "Simulated routing",
            ["routing", *columns],
            [[name, *(f"{x[c]:.2f}" for c in columns)] for name, x in figures.items()],
        ),
        Grid(
            "Routing decision", ["replicas", "CPU ms per request"], [[str(n), f"{ms:.2f}"] for n, ms in times.items()]
        ),
        Grid("Measured costs", ["cost", "value"], [[name, f"{value:.3g}"] for name, value in parts.items()]),
    ]
    report(grids)
    result = {"provenance": provenance(**vars(args)), "parts": parts, "router ms": times, "simulated": figures}
    write("replicas", result, grids, folder=args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
