"""Replays of the demo model's replies have the same counts as real replies, with every drafter of the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.bench.replay.prices import ReplyLogits
from paceline.bench.replay.run import Replayer
from paceline.checkpoints.loader import Loaded
from paceline.drafters.factory import open_drafter
from paceline.llm import LLM
from paceline.recording.file import Recording
from paceline.recording.rows import RecordedReply
from paceline.sampling.parameters import Sampling
from paceline.types import DraftBudget, Prompt
from tests.conftest import packaged_model
from tests.support.cover import some

pytestmark = pytest.mark.model
PROMPTS: list[Prompt] = [
    "List the planets with their moons.",
    "Repeat: one two three, one two three, one two",
    "Write a poem about a lighthouse, in three lines.",
]
HOW = [
    Sampling(max_new_tokens=24, seed=0),
    Sampling(max_new_tokens=24, temperature=0.7, top_p=0.9, seed=1, stop=["three, one"]),
    Sampling(max_new_tokens=24, temperature=1.0, top_p=0.95, repetition_penalty=1.1, seed=2),
]


@pytest.fixture(scope="module")
def demo() -> Iterator[Loaded]:
    with packaged_model("demo") as model:
        yield model


@pytest.fixture(scope="module")
def replies(demo: Loaded, tmp_path_factory: pytest.TempPathFactory) -> list[RecordedReply]:
    path, llm = tmp_path_factory.mktemp("replay") / "r.jsonl", LLM(demo)
    with llm.record(path):
        llm.generate(PROMPTS, HOW)
    return Recording(path)[:]


SIZES = {"chain": DraftBudget.chain(4), "tree": DraftBudget(12, 4, 3)}
NAMES = ("suffix", "ngram", "eagle3", "medusa", "model:demo", "suffix+eagle3")
CASES = {f"{name}-{size}-{width}": (name, size, width) for name in NAMES for size in SIZES for width in (1, 3)}


@some("case", CASES, fast=[])
def test_counts_are_equal(case: tuple[str, str, int], demo: Loaded, replies: list[RecordedReply]) -> None:
    name, shape, width = case
    size = SIZES[shape]
    llm = LLM(demo, open_drafter(name, demo), size)
    real = [c.stats for c in llm.generate(PROMPTS, HOW, width=width)]
    found = Replayer(demo, width=width).run(replies, open_drafter(name, demo), size).stats
    counts = [[(s.rounds, s.tokens, s.drafted, s.accepted_at) for s in stats] for stats in (real, found)]
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_the_model_writes_what_was_recorded(demo: Loaded, replies: list[RecordedReply], tmp_path: Path) -> None:
    for reply in replies:
        assert ReplyLogits.of(demo, reply).reproduced_share(demo) == 1.0
    hot = replies[2]
    other = replace(hot, sampling=replace(hot.sampling, seed=77))
    assert ReplyLogits.of(demo, other).reproduced_share(demo) < 0.9, "another seed is another text"
