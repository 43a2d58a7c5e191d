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
"""A template that knows tools, and tells of them in few tokens."""


@pytest.fixture(scope="session")
def served() -> Iterator[Serving]:
    """A toy with two drafters; characters are its tokens."""
    with serving(LLM(toy_model(layers=2), {"suffix": Suffix(), "ngram": NGram()}), aliases=("other/name",)) as it:
        yield it


@pytest.fixture(scope="session")
def plain(served: Serving) -> LLM:
    """The same model without a server and without a drafter."""
    return LLM(served.llm.model)


@pytest.fixture(scope="session")
def talker() -> Iterator[Serving]:
    """A random toy whose tokens are bytes and syllables, so that it can write JSON where a grammar makes it."""
    words = byte_level()
    words.chat_template = TOOLS + "{% if tools %}{% endif %}{% if add_generation_prompt %}<assistant>{% endif %}"
    with serving(LLM(speaker(words, seed=3), {"suffix": Suffix(), "ngram": NGram()}), model="talker") as it:
        yield it
