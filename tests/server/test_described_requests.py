"""Thousands of requests generated from the OpenAPI document: none causes a server error."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

from paceline.drafters.ngram import NGram
from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from tests.support.described import EXAMPLES, Document, FuzzRequest
from tests.support.running import Serving, serving
from tests.support.toys import toy_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(LLM(toy_model(), {"suffix": Suffix(), "ngram": NGram()}), aliases=("other/name",)) as it:
        yield it


def test_no_documented_request_makes_the_server_fail(served: Serving) -> None:
    requests = Document(served.get("/openapi.json").json()).requests()

    @hypothesis.settings(max_examples=50 * EXAMPLES, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(requests)
    def check(asked: FuzzRequest) -> None:
        asked.check(served)

    check()
    assert served.idle()
    assert served.post("/v1/completions", {"prompt": "hello"}).status_code == 200
