from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.drafters.ngram import NGram
from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from tests.server.running import Serving, serving
from tests.toys import toy_model


@pytest.fixture(scope="session")
def served() -> Iterator[Serving]:
    """A float64 toy with two drafters; characters are its tokens."""
    with serving(LLM(toy_model(), {"suffix": Suffix(), "ngram": NGram()}), aliases=("other/name",)) as it:
        yield it


@pytest.fixture(scope="session")
def plain(served: Serving) -> LLM:
    """The same model by itself, without a drafter."""
    return LLM(served.llm.model)
