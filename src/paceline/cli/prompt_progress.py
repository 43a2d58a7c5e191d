"""A line on stderr that shows how much of a long prompt has been read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from paceline.engine.detokenizer import Chunk
    from paceline.engine.results import Stream

_FIRST, _NEXT = 1.0, 0.3
"""Seconds until the line appears, and between updates."""


def with_progress(stream: Stream, wanted: bool) -> Iterator[Chunk]:
    """Yield the chunks of a reply. If `wanted`, show the progress of its prompt until the first one."""
    line = _Line(stream) if wanted else None
    try:
        for chunk in stream:
            if line:
                line.end()
            yield chunk
    finally:
        if line:
            line.end()


class _Line:
    """The line, which a thread rewrites while the prompt is read."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._ended = stream, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Remove the line. A second call does nothing."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()

    def _run(self) -> None:
        if self._ended.wait(_FIRST):
            return
        while True:
            read, total = self._stream.prompt_progress
            typer.echo(f"\r\x1b[2KReading the prompt: {read:,} of {total:,} tokens", nl=False, err=True)
            if self._ended.wait(_NEXT):
                break
        typer.echo("\r\x1b[2K", nl=False, err=True)
