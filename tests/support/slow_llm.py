"""A toy with slow replies, and a request for an endless reply."""

from __future__ import annotations

import time
from typing import Any

import pytest

from paceline.drafters.suffix import Suffix
from paceline.llm import LLM
from tests.support.toys import toy_model

CHAT: Any = [{"role": "user", "content": "abc abc abc"}]
ENDLESS: dict[str, Any] = {"messages": CHAT, "ignore_eos": True, "max_tokens": 100_000, "stream": True}


def slow_llm(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.01, context_length: int = 4096) -> LLM:
    """Return a toy with slow replies."""
    llm = LLM(toy_model(context_length=context_length), Suffix())
    honest = llm.model.target.forward

    def forward(*args: Any) -> Any:
        time.sleep(seconds)
        return honest(*args)

    monkeypatch.setattr(llm.model.target, "forward", forward)
    return llm
