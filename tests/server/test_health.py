"""/health of a server with failing replies."""

from __future__ import annotations

from typing import Any

from paceline.drafters.suffix import Suffix
from tests.support.running import Serving, serving
from tests.support.toys import toy_llm

BODY: dict[str, Any] = {"model": "toy", "prompt": "hello", "max_tokens": 4}


def ask(it: Serving, **more: Any) -> int:
    status: int = it.post("/v1/completions", BODY | more).status_code
    return status


def health(it: Serving) -> tuple[int, str]:
    answer = it.get("/health")
    return answer.status_code, answer.json()["status"]


def test_health_fails_while_replies_die_of_internal_errors() -> None:
    with serving(toy_llm(Suffix())) as it:
        honest = it.llm.engine.step

        def broken(*args: Any) -> Any:
            raise ZeroDivisionError("a bug")

        it.llm.engine.step = broken  # type: ignore[method-assign]
        for told in ((200, "ok"), (200, "ok"), (503, "failing")):
            assert ask(it) == 500
            assert health(it) == told
        it.llm.engine.step = honest  # type: ignore[method-assign]
        assert ask(it) == 200
        assert health(it) == (200, "ok"), "one reply that succeeds ends it"


def test_health_does_not_fail_where_requests_are_at_fault() -> None:
    with serving(toy_llm(Suffix())) as it:
        for _ in range(4):
            assert ask(it, prompt="a" * 500) == 400
            assert ask(it, guided_regex="[ab]", prompt="a\nb\na\nb", no_repeat_ngram_size=1) == 400
        assert health(it) == (200, "ok")
        assert ask(it) == 200
