from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.drafters.ngram import NGram
from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from tests.support.running import Serving, serving
from tests.support.toys import toy_model
from tests.support.vocabularies import byte_level, speaker

TOOLS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}<tool_call>{% endif %}\n{% endfor %}"
"""A template with tools, which it describes in a few tokens."""


@pytest.fixture(scope="session")
def served() -> Iterator[Serving]:
    """Serve a toy with two drafters. Its tokens are characters."""
    with serving(LLM(toy_model(layers=2), {"suffix": Suffix(), "ngram": NGram()}), aliases=("other/name",)) as it:
        yield it


@pytest.fixture(scope="session")
def plain(served: Serving) -> LLM:
    """Return the same model without a server and without a drafter."""
    return LLM(served.llm.model)


@pytest.fixture(scope="session")
def talker() -> Iterator[Serving]:
    """Serve a random toy with bytes and syllables as tokens, so that it can write JSON with a grammar."""
    words = byte_level()
    words.chat_template = TOOLS + "{% if tools %}{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
    with serving(LLM(speaker(words, seed=3), {"suffix": Suffix(), "ngram": NGram()}), model="talker") as it:
        yield it
