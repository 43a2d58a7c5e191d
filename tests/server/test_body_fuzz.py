"""Malformed bodies by the thousand: each is answered, as the client's error or as a reply.

PACELINE_FUZZ_BODIES sets their number (4000): half are drawn from what is nearly valid, half are those with bytes
changed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import pytest
from hypothesis import strategies as st

from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from tests.support.fuzz import BODIES, PATHS, check_response
from tests.support.running import serving
from tests.support.toys import toy_model

pytestmark = pytest.mark.slow

COUNT = int(os.environ.get("PACELINE_FUZZ_BODIES", "4000"))
CLIENTS = 8
PROBE = {"prompt": "hello", "temperature": 1.0, "seed": 1, "max_tokens": 40}

Case = tuple[str, bytes]


def draw_cases(count: int, seed: int) -> list[Case]:
    """`count` pairs of path and body."""
    drawn: list[Case] = []
    paths = st.sampled_from([*PATHS, *PATHS[:2] * 4])

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(paths.flatmap(lambda path: st.tuples(st.just(path), BODIES[path])))
    def draw(case: Case) -> None:
        drawn.append(case)

    draw()
    return drawn


def mutate(cases: list[Case], count: int, seed: int) -> Iterator[Case]:
    """Known bodies with bytes changed, cut out and doubled."""
    dice = random.Random(seed)
    for _ in range(count):
        path, data = dice.choice(cases)
        for _ in range(dice.randint(1, 4)):
            at, length = dice.randrange(len(data) + 1), dice.randint(0, 6)
            replacement = dice.choice((b"", dice.randbytes(length), data[at : at + length] * 2))
            data = data[:at] + replacement + data[at + length :]
        yield path, data


def test_malformed_bodies_are_answered() -> None:
    drawn = draw_cases(COUNT // 2, seed=0)
    cases = [*drawn, *mutate(drawn, COUNT - len(drawn), seed=0)]
    with serving(LLM(toy_model(), {"suffix": Suffix()}), aliases=("other/name",)) as served:

        def send(case: Case) -> str | None:
            path, data = case
            try:
                headers = {"Content-Type": "application/json"}
                check_response(served.post(path, content=data, headers=headers, timeout=120))
            except Exception as error:
                return f"{path} {data[:400]!r}: {type(error).__name__} {str(error)[:400]}"
            return None

        before = served.post("/v1/completions", PROBE).json()["choices"]
        with ThreadPoolExecutor(CLIENTS) as pool:
            wrong = [error for error in pool.map(send, cases) if error]
        assert not wrong, wrong[:5]
        assert served.idle(), "a reply is left running"
        assert served.post("/v1/completions", PROBE).json()["choices"] == before
