"""Thousands of malformed bodies. Each is answered with a client error or a reply.

PACELINE_FUZZ_BODIES sets their number (4000): a quarter is nearly valid, a quarter is nearly valid with changed bytes,
and half are conversations in the dialect of each API with changed JSON values.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import pytest
from hypothesis import strategies as st

from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from tests.support.dialects import OTHERS, altered, bodies
from tests.support.fuzz import BODIES, PATHS, check_response
from tests.support.running import serving
from tests.support.toys import toy_model

pytestmark = pytest.mark.slow

COUNT = int(os.environ.get("PACELINE_FUZZ_BODIES", "4000"))
CLIENTS = 8
PROBE = {"prompt": "hello", "temperature": 1.0, "seed": 1, "max_tokens": 40}

Case = tuple[str, bytes]


def draw_cases(count: int, seed: int) -> list[Case]:
    """Return `count` pairs of path and body."""
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
    """Yield known bodies with bytes changed, removed and duplicated."""
    dice = random.Random(seed)
    for _ in range(count):
        path, data = dice.choice(cases)
        for _ in range(dice.randint(1, 4)):
            at, length = dice.randrange(len(data) + 1), dice.randint(0, 6)
            replacement = dice.choice((b"", dice.randbytes(length), data[at : at + length] * 2))
            data = data[:at] + replacement + data[at + length :]
        yield path, data


def alter(count: int, seed: int) -> Iterator[Case]:
    """Yield bodies of all APIs with changed JSON values."""
    dice = random.Random(seed)
    whole = {**bodies("ab"), **OTHERS}
    for _ in range(count):
        path = dice.choice(sorted(whole))
        yield path, json.dumps(altered(whole[path], dice)).encode()


def test_malformed_bodies_are_answered() -> None:
    drawn = draw_cases(COUNT // 4, seed=0)
    cases = [*drawn, *mutate(drawn, COUNT // 4, seed=0), *alter(COUNT // 2, seed=0)]
    random.Random(0).shuffle(cases)
    with serving(LLM(toy_model(context_length=2048), {"suffix": Suffix()}), aliases=("other/name",)) as served:

        def send(numbered: tuple[int, Case]) -> str | None:
            number, (path, data) = numbered
            try:
                headers = {"Content-Type": "application/json"}
                check_response(served.post(path, content=data, headers=headers, timeout=120))
                if number % 20 == 0:
                    assert served.post("/v1/completions", PROBE).json()["choices"] == before
            except Exception as error:
                return f"{path} {data[:400]!r}: {type(error).__name__} {str(error)[:300]} ... {str(error)[-700:]}"
            return None

        before = served.post("/v1/completions", PROBE).json()["choices"]
        with ThreadPoolExecutor(CLIENTS) as pool:
            wrong = [error for error in pool.map(send, enumerate(cases)) if error]
        assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)}", *wrong[:5]])
        assert served.idle(), "a reply is left running"
        assert served.post("/v1/completions", PROBE).json()["choices"] == before
