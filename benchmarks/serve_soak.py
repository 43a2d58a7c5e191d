"""Does the server keep its promises for hours? Mixed load for some minutes: long and short prompts, streams and not,
clients that leave or stall, garbage, structured output, several samples, every speculation setting.

Asked for: memory flat after the warm-up, nothing left running or waiting, no slot lost, no request stuck, garbage
refused and everything else answered, and a fixed set of requests answered alike from the first minute to the last.
Exit code 1 unless all of it holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import PROMPTS, RESULTS, Grid, load_prompts, median, pick, provenance, report, write
from serve_client import Client, Exchange, read
from serve_figures import goal_grid
from serve_requests import Wish, Wishes, largest, probes
from serve_servers import Server, ours
from serve_systems import model_name

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
RUNNING, WAITING, CACHE = GAUGES
FLAT = 1.02


@dataclass(slots=True)
class Soak:
    """What happened. `done`: requests by kind and outcome. `samples`: of memory and gauges over time. `quiet`: of
    memory in the breaks, when nothing runs."""

    server: Server
    done: Counter[tuple[str, str]] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    quiet: list[dict[str, float]] = field(default_factory=list)
    first: dict[str, Any] = field(default_factory=dict)
    probed: int = 0
    differ: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @property
    def age(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    def note(self, kind: str, outcome: str, detail: str = "") -> None:
        self.done[kind, outcome] += 1
        if detail and len(self.odd) < 20:
            self.odd.append(f"{self.age:.0f} s, {kind}, {outcome}: {detail}")


def main() -> None:
    args = _arguments()
    questions = [q.text for q in pick([q for q in load_prompts(args.questions) if len(q.text) < 2000], 64)]
    with Server(
        "paceline serve", shlex.split(args.command or "") or ours(f"--model {args.model} {args.serve}")
    ) as server:
        soak = Soak(server)
        left, seats = asyncio.run(_soak(soak, questions, args))
        code = server.stop()
    asked = _goals(soak, left, seats, code, args)
    grids = [goal_grid(asked), _requests(soak), _memory(soak)]
    report(grids, soak.odd)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    result: dict[str, Any] = {"provenance": provenance(**settings)}
    result |= {"goals": [{"goal": g, "found": f, "held": h} for g, f, h in asked]}
    result |= {"requests": [[*key, count] for key, count in sorted(soak.done.items())]}
    result |= {"odd": soak.odd, "differ": soak.differ, "samples": soak.samples, "quiet": soak.quiet}
    write("serve-soak", result, grids, soak.odd, args.out)
    sys.exit(not all(held for _, _, held in asked))


async def _soak(
    soak: Soak, questions: Sequence[str], args: argparse.Namespace
) -> tuple[dict[str, float], tuple[int, int]]:
    """Load, probes and samples until the time is up; gauges left afterwards; slots that were used at once under load,
    and afterwards."""
    port = soak.server.port
    model = await asyncio.to_thread(model_name, port)
    fixed = probes(model, questions, args.drafters)
    await _probe(soak, fixed, args.patience)
    wishes = [Wishes(model, questions, args.drafters, args.tokens, args.seed + i) for i in range(args.clients)]
    sampler = asyncio.create_task(_sample(soak, args.every))
    await _full_house(soak, model, questions, args)
    start = time.monotonic()
    for leg in range(args.legs):
        end = start + 60 * args.minutes * (leg + 1) / args.legs
        work = [_work(soak, drawn, end, args.patience) for drawn in wishes]
        await asyncio.gather(*work, _probes(soak, fixed, end, args))
        left = await _settle(port, args.patience)
        await _probe(soak, fixed, args.patience)
        await asyncio.sleep(3)  # after one second without work the server gives back what it does not need
        soak.quiet.append({"age": soak.age, "resident": float(soak.server.resident)})
    most = int(max(s[RUNNING] for s in soak.samples))
    seats = await _seats(port, model, most)
    sampler.cancel()
    return left, (most, seats)


async def _full_house(soak: Soak, model: str, questions: Sequence[str], args: argparse.Namespace) -> None:
    """The most that the load may ask for at once, first: what the server holds must not wait for chance to come up."""
    wishes = [largest(model, questions, i) for i in range(args.clients)]
    clients = [Client(soak.server.port, 5 * args.patience) for _ in wishes]
    await asyncio.gather(*(_carry_out(soak, w, c) for w, c in zip(wishes, clients, strict=True)))
    for client in clients:
        client.close()


async def _work(soak: Soak, wishes: Wishes, end: float, patience: float) -> None:
    """One client: request after request."""
    while time.monotonic() < end:
        wish = wishes.draw()
        client = Client(soak.server.port, patience)
        try:
            await _carry_out(soak, wish, client)
        finally:
            client.close()


async def _carry_out(soak: Soak, wish: Wish, client: Client) -> None:
    async def watch(found: Exchange) -> bool:
        if wish.manner == "stall" and len(found.parts) == 2:
            await asyncio.sleep(wish.texts / 10)
        return wish.manner == "leave" and len(found.parts) > wish.texts

    found = await client.ask(wish.path, wish.body, watch=watch)
    if wish.manner == "leave" and found.left:
        soak.note(wish.kind, "left")
    elif found.status == 429:
        soak.note(wish.kind, "busy (429)" if "retry-after" in found.headers else "429 without Retry-After", "")
    elif not wish.good:
        ok = 400 <= found.status < 500 and is_error(found)
        soak.note(wish.kind, "refused" if ok else "not refused", "" if ok else _say(found))
    else:
        error = read(found).error
        soak.note(wish.kind, _outcome(error), error)


def _outcome(error: str) -> str:
    return "answered" if not error else ("stuck" if error.startswith("no end within") else "failed")


def is_error(found: Exchange) -> bool:
    """Whether a body has OpenAI's error shape."""
    try:
        error = found.json()["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(error, dict) and isinstance(error.get("message"), str) and "type" in error


def _say(found: Exchange) -> str:
    return f"{found.status} {found.body[:150]!r} {found.error}"


async def _probes(soak: Soak, fixed: Mapping[str, Wish], end: float, args: argparse.Namespace) -> None:
    while time.monotonic() + args.probe_every < end:
        await asyncio.sleep(args.probe_every)
        await _probe(soak, fixed, args.patience)


async def _probe(soak: Soak, fixed: Mapping[str, Wish], patience: float) -> None:
    """Ask all fixed requests, one after the other, and compare with what they got first."""
    for name, wish in fixed.items():
        client = Client(soak.server.port, patience)
        found = await client.ask(wish.path, wish.body)
        client.close()
        if found.status == 429:
            continue
        said = _essence(found) if found.status == 200 and not found.error else _say(found)
        soak.probed += 1
        if said != soak.first.setdefault(name, said) or found.status != 200:
            soak.differ.append(f"{soak.age:.0f} s, {name}: {str(said)[:300]}")


def _essence(found: Exchange) -> list[Any]:
    """A reply without what may change: ids, times, what was drafted."""
    keys = ("index", "text", "message", "finish_reason", "logprobs")
    return [{key: c[key] for key in keys if key in c} for c in found.json()["choices"]]


async def _sample(soak: Soak, every: float) -> None:
    while True:
        try:
            gauges = await read_gauges(soak.server.port)
        except OSError as error:
            soak.note("metrics", "failed", str(error))
        else:
            memory = {"resident": float(soak.server.resident), "descriptors": float(soak.server.descriptors)}
            soak.samples.append({"age": round(soak.age, 1), **memory, **gauges})
        await asyncio.sleep(every)


async def read_gauges(port: int) -> dict[str, float]:
    """Of /metrics, summed over labels. Raises `OSError` where there are none."""
    client = Client(port, timeout=60.0)
    found = await client.ask("/metrics")
    client.close()
    if found.status != 200:
        raise OSError(f"/metrics: {_say(found)}")
    totals = dict.fromkeys(GAUGES, 0.0)
    for line in found.body.decode().splitlines():
        name, _, value = line.rpartition(" ")
        if (name := name.partition("{")[0]) in totals:
            totals[name] += float(value)
    return totals


async def _settle(port: int, patience: float) -> dict[str, float]:
    """Gauges once nothing runs or waits any more, or `patience` seconds after."""
    end = time.monotonic() + patience
    while True:
        gauges = await read_gauges(port)
        if not gauges[RUNNING] + gauges[WAITING] or time.monotonic() > end:
            return gauges
        await asyncio.sleep(0.2)


async def _seats(port: int, model: str, most: int) -> int:
    """How many of `most` requests run at once now: a lost slot would be missing."""
    body = {"model": model, "messages": [{"role": "user", "content": "Count to a hundred."}], "max_tokens": 96}
    clients = [Client(port, 600.0) for _ in range(most)]
    asking = asyncio.gather(*(c.ask("/v1/chat/completions", json.dumps(body).encode()) for c in clients))
    seen = 0.0
    while not asking.done():
        seen = max(seen, (await read_gauges(port))[RUNNING])
        await asyncio.sleep(0.02)
    await asking
    for client in clients:
        client.close()
    return int(seen)


def _goals(
    soak: Soak, left: Mapping[str, float], seats: tuple[int, int], code: int | None, args: argparse.Namespace
) -> list[tuple[str, str, bool]]:
    bad = {
        key: count for key, count in soak.done.items() if key[1] in ("failed", "not refused", "429 without Retry-After")
    }
    stuck = sum(count for (_, outcome), count in soak.done.items() if outcome == "stuck")
    early, late = (soak.quiet[i]["resident"] for i in (args.warm - 1, -1))
    left_over = f"{left[RUNNING]:.0f} running, {left[WAITING]:.0f} waiting"
    return [
        (
            "every good request answered, all garbage refused",
            f"{sum(bad.values())} of {sum(soak.done.values())} not",
            not bad,
        ),
        (f"no request stuck for {args.patience:g} s", f"{stuck} stuck", not stuck),
        (
            "a fixed set of requests answered alike all the time",
            f"{len(soak.differ)} of {soak.probed} differ",
            not soak.differ,
        ),
        (
            "memory at rest grows less than 2 % after the warm-up",
            f"{100 * (late / early - 1):+.2f} %",
            late < FLAT * early,
        ),
        ("nothing is left running or waiting", left_over, not left[RUNNING] + left[WAITING]),
        ("no slot is lost", f"{seats[1]} run at once, {seats[0]} under load", seats[1] >= seats[0] > 0),
        ("SIGTERM ends it with code 0", f"code {code}", code == 0),
    ]


def _requests(soak: Soak) -> Grid:
    outcomes = sorted({outcome for _, outcome in soak.done})
    kinds = sorted({kind for kind, _ in soak.done})
    rows = [[kind, *(str(soak.done[kind, outcome] or "") for outcome in outcomes)] for kind in kinds]
    return Grid("Requests", ["kind", *outcomes], rows)


def _memory(soak: Soak) -> Grid:
    """By leg: memory in the break after it, and under its load."""
    rows, begin = [], 0.0
    for leg, quiet in enumerate(soak.quiet, 1):
        load = [x for x in soak.samples if begin <= x["age"] < quiet["age"]]
        begin = quiet["age"]
        held = [x["resident"] / 2**20 for x in load]
        most = [f"{max(x[key] for x in load):.0f}" for key in ("descriptors", RUNNING, WAITING)]
        memory = [f"{quiet['resident'] / 2**20:.1f}", f"{median(held):.0f}", f"{max(held):.0f}"]
        rows.append([f"{leg}, {begin / 60:.1f} min", *memory, *most, f"{100 * max(x[CACHE] for x in load):.0f} %"])
    columns = [
        "leg",
        "MiB after it",
        "median under load",
        "most",
        "descriptors, most",
        "running",
        "waiting",
        "cache used",
    ]
    return Grid("Memory", columns, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument(
        "--serve", default="--quantize int8 --prefix-memory 0.05", help="further words for `paceline serve`"
    )
    parser.add_argument("--command", help="another server's command instead")
    parser.add_argument("--questions", type=Path, default=PROMPTS)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=96, help="limit of a reply, at most")
    parser.add_argument("--drafters", nargs="*", default=["suffix", "ngram"], help="names for the field `speculation`")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds after which a request counts as stuck")
    parser.add_argument("--probe-every", type=float, default=20.0, help="seconds between two rounds of fixed requests")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two samples of memory")
    parser.add_argument("--legs", type=int, default=10, help="parts of the time, with a break after each")
    parser.add_argument("--warm", type=int, default=2, help="legs that are warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
