"""Malformed bodies by the thousand against a running server: each is answered, as the client's error or as a reply.

A float64 toy behind the real HTTP layer, on 127.0.0.1, several connections at once; bodies come from
`tests/server/fuzz.py`, which makes them out of what is nearly right, and a fixed seed. Asked for: no status but 200,
400 and 404, every error in OpenAI's shape, no reply left running, and the same text at the end as at the beginning.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import hypothesis
import psutil
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import progress, provenance, report, write
from tests.server.fuzz import BODIES, PATHS, sound
from tests.server.running import Serving, serving
from tests.toys import toy_model

from paceline.drafters.suffix import Suffix
from paceline.llm import LLM

JSON = {"Content-Type": "application/json"}
SIGN = {"prompt": "hello", "temperature": 1.0, "seed": 1, "max_tokens": 40}

Case = tuple[str, bytes]


def cases(count: int, seed: int) -> list[Case]:
    """So many (path, body)."""
    found: list[Case] = []
    made = st.sampled_from([*PATHS, *PATHS[:2] * 4]).flatmap(lambda path: st.tuples(st.just(path), BODIES[path]))

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(made)
    def draw(case: Case) -> None:
        found.append(case)

    draw()
    return found


def mutated(known: list[Case], count: int, seed: int) -> Iterator[Case]:
    """Known bodies with bytes changed, cut out and doubled."""
    dice = random.Random(seed)
    for _ in range(count):
        path, data = dice.choice(known)
        for _ in range(dice.randint(1, 4)):
            at, length = dice.randrange(len(data) + 1), dice.randint(0, 6)
            data = (
                data[:at] + dice.choice((b"", dice.randbytes(length), data[at : at + length] * 2)) + data[at + length :]
            )
        yield path, data


def ask(it: Serving, client: httpx.Client, case: Case) -> tuple[int, str | None]:
    """(status, what was wrong with the answer)."""
    path, data = case
    try:
        answer = client.post(it.address + path, content=data, headers=JSON, timeout=120)
        sound(answer)
    except Exception as error:
        return 0, f"{path} {data[:400]!r}: {type(error).__name__} {str(error)[:400]}"
    return answer.status_code, None


def run(count: int, seed: int, clients: int) -> dict[str, Any]:
    drawn = cases(count // 2, seed)
    known = [*drawn, *mutated(drawn, count - len(drawn), seed)]
    with serving(LLM(toy_model(), {"suffix": Suffix()}), aliases=("other/name",)) as it, httpx.Client() as client:
        before, began = it.post("/v1/completions", SIGN).json()["choices"], time.monotonic()
        memory = [psutil.Process().memory_info().rss]
        answers: list[tuple[int, str | None]] = []
        with ThreadPoolExecutor(clients) as pool:
            for start in progress(range(0, len(known), 1000), "bodies"):
                part = known[start : start + 1000]
                answers += pool.map(lambda case: ask(it, client, case), part)
                memory.append(psutil.Process().memory_info().rss)
        seconds = time.monotonic() - began
        return {
            "bodies": len(known),
            "statuses": dict(sorted(Counter(str(status) for status, _ in answers).items())),
            "wrong": [wrong for _, wrong in answers if wrong],
            "left running": not it.idle(),
            "same text afterwards": it.post("/v1/completions", SIGN).json()["choices"] == before,
            "seconds": round(seconds, 1),
            "memory, MiB, per 1000": [round(bytes_ / 2**20) for bytes_ in memory],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=8)
    given = parser.parse_args()
    found = run(given.count, given.seed, given.clients)
    good = not found["wrong"] and not found["left running"] and found["same text afterwards"]
    lines = [
        f"{found['bodies']} malformed bodies against the server.",
        "",
        "A float64 toy behind the HTTP layer; half the bodies drawn by hypothesis from what is nearly right, half of",
        f"those again with bytes changed. {given.clients} connections at once, {found['seconds']} s.",
        "",
        f"- Answers by status: {', '.join(f'{status}: {n}' for status, n in found['statuses'].items())}",
        f"- Answers that are neither a reply nor the client's error in OpenAI's shape: {len(found['wrong'])}",
        f"- Replies left running: {'some' if found['left running'] else 'none'}",
        f"- The same text afterwards: {'yes' if found['same text afterwards'] else 'no'}",
        f"- Memory of the process (server and clients), MiB, after each 1000: {found['memory, MiB, per 1000']}",
    ]
    report([], lines)
    write("serve-fuzz", {"provenance": provenance(**vars(given)), **found}, lines=lines)
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
