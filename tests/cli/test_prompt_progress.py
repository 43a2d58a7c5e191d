"""The progress line for a long prompt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.cli import prompt_progress
from paceline.cli.prompt_progress import with_progress
from paceline.sampling.parameters import Sampling
from tests.support.toys import toy_llm


class SlowStream:
    """A stream that yields its first chunk after two reads of its progress."""

    def __init__(self, error: bool = False) -> None:
        self._read, self._error = threading.Semaphore(0), error
        self._reads = 0

    @property
    def prompt_progress(self) -> tuple[int, int]:
        self._reads += 1
        self._read.release()
        return 1000 * self._reads, 12_034

    def __iter__(self) -> Iterator[str]:
        for _ in range(2):
            assert self._read.acquire(timeout=30)
        if self._error:
            raise KeyboardInterrupt
        yield "first"
        yield "second"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_progress, "_FIRST", 0.0)
    monkeypatch.setattr(prompt_progress, "_NEXT", 0.001)


def test_the_line_shows_progress_and_vanishes_before_the_first_chunk(capfd: pytest.CaptureFixture[str]) -> None:
    stream: Any = SlowStream()
    chunks = with_progress(stream, wanted=True)
    assert next(chunks) == "first"
    shown = capfd.readouterr().err
    assert "Reading the prompt: 1,000 of 12,034 tokens" in shown
    assert "Reading the prompt: 2,000 of 12,034 tokens" in shown
    assert shown.endswith("\r")
    assert list(chunks) == ["second"]
    assert not capfd.readouterr().err


def test_an_interrupt_removes_the_line(capfd: pytest.CaptureFixture[str]) -> None:
    stream: Any = SlowStream(error=True)
    with pytest.raises(KeyboardInterrupt):
        list(with_progress(stream, wanted=True))
    assert capfd.readouterr().err.endswith("\r")


def test_a_stream_counts_the_tokens_of_its_prompt() -> None:
    with toy_llm().stream("some words of a prompt", Sampling(max_new_tokens=2), raw=True) as stream:
        unread, total = stream.prompt_progress
        assert unread <= 1 < total
        next(stream)
        assert stream.prompt_progress == (total, total)
