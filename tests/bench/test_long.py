"""Tables of the benchmarks of long contexts, from invented measurements."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
long, agent_turns = import_module("long"), import_module("agent_turns")


def test_reading_is_summed_over_depths_and_passes_are_compared_in_pairs() -> None:
    found = [
        long.Measured("paceline", 100, seconds=1.0, peak_mb=10.0),
        long.Measured("llama.cpp:fa", 100, seconds=2.0, peak_mb=20.0),
        *(long.Measured("paceline", 100, passes={"1": [ms]}) for ms in (99.0, 10.0, 20.0)),
        *(long.Measured("llama.cpp:fa", 100, passes={"1": [ms]}) for ms in (99.0, 30.0, 20.0)),
        long.Measured("paceline", 300, seconds=3.0, peak_mb=11.0),
        long.Measured("llama.cpp:fa", 300, seconds=10.0, peak_mb=21.0),
        long.Measured("paceline", 300, passes={"1": [5.0]}),
        long.Measured("llama.cpp:fa", 300, passes={"1": [8.0]}),
    ]
    args = Namespace(systems=["paceline", "llama.cpp:fa"], depths=[100, 300], rows=[1])
    passes, ratios, reading = (grid.rows for grid in long.Results(found, args).grids())
    assert passes[0] == ["paceline", "100", "15.0"], "the first pass only warms up"
    assert ratios == [["llama.cpp:fa", "100", "2.00"], ["llama.cpp:fa", "300", "1.60"]]
    assert reading[2:] == [["paceline", "300", "75", "11"], ["llama.cpp:fa", "300", "25", "21"]]


@pytest.mark.parametrize(
    ("name", "before", "token"),
    [
        ("claude code", 'data: {"type": "ping"}', 'data: {"type": "content_block_delta", "index": 0}'),
        ("codex", '{"type":"response.created"}', '{"type":"response.output_text.delta","delta":"a"}'),
        ("opencode", '{"delta":{"role":"assistant","content":""}}', '{"delta":{"content":"a"}}'),
    ],
)
def test_the_first_token_is_not_a_heartbeat(name: str, before: str, token: str) -> None:
    first = agent_turns.AGENTS[name].first
    assert not re.search(first, before.encode())
    assert re.search(first, token.encode())


@pytest.mark.parametrize("name", agent_turns.AGENTS)
def test_turn_two_begins_with_turn_one(name: str) -> None:
    messages = [("user", "One."), ("assistant", "Two."), ("user", "Three.")]
    first, second = (agent_turns.AGENTS[name].body(" Long.", messages[:count]) for count in (1, 3))
    key = "input" if name == "codex" else "messages"
    assert second[key][: len(first[key])] == first[key]
    assert "Long." in json.dumps(first)
