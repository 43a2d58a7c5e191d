"""Replies as the user holds them: finished, growing, several at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.engine.closing import Closable
from paceline.engine.detokenizer import Chunk, Logprobs
from paceline.engine.engine import Engine, Request
from paceline.engine.scheduler import Begin, Scheduler, Task
from paceline.engine.stats import Stats
from paceline.errors import PacelineError
from paceline.types import FinishReason


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished reply. `token_ids`: the reply's own, EOS included. `text`: theirs, up to a stop string.
    `logprobs`: one per token id, if asked for."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    prompt_tokens: int
    logprobs: list[Logprobs] | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        logprobs = {} if self.logprobs is None else {"logprobs": [asdict(token) for token in self.logprobs]}
        return {
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            **logprobs,
            "stats": self.stats.as_dict(),
        }


class GrowingReply:
    """A request and what has been shown of it."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self.request = engine, request
        self._shown: list[Chunk] = []

    def show(self, chunk: Chunk) -> Chunk:
        """The chunk is out now, and part of the completion."""
        self._shown.append(chunk)
        return chunk

    def close(self) -> None:
        """Give back what the request holds; closing twice does nothing."""
        if self.request.active:
            self._engine.finish(self.request)
            self.request.stats.close()

    @property
    def completion(self) -> Completion:
        """What has been shown so far, as a completion."""
        request = self.request
        ended = self._shown[-1].finish_reason if self._shown else None
        failed: FinishReason | None = "error" if request.error else None
        logprobs = [chunk.logprobs for chunk in self._shown if chunk.logprobs]
        return Completion(
            "".join(chunk.text for chunk in self._shown),
            [chunk.token_id for chunk in self._shown],
            ended or failed or "cancelled",
            request.stats,
            request.num_prompt_tokens,
            None if request.stream.logprobs is None else logprobs,
        )


class Stream(Closable, Iterator[Chunk]):
    """A reply as it grows: iterate over its chunks; close it, or leave its `with` block, to stop early.

    `completion` is the reply so far, whole once the iteration has ended.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self._reply = engine, GrowingReply(engine, request)
        self._ready: deque[Chunk] = deque()
        self._prefilled = False

    def __next__(self) -> Chunk:
        try:
            while not self._ready:
                if self._reply.request.finish:
                    self.close()
                    raise StopIteration
                self._advance()
        except BaseException as error:
            self.close()
            if isinstance(error, PacelineError):
                error.partial = self.completion
            raise
        return self._reply.show(self._ready.popleft())

    def _advance(self) -> None:
        request = self._reply.request
        if not self._prefilled:
            self._engine.prefill(request)
            self._prefilled = True
        self._ready.extend(self._engine.step([request])[0])
        if request.error:
            raise request.error

    def close(self) -> None:
        """End the reply here. The model is ready for the next prompt; closing twice does nothing."""
        self._reply.close()
        self._ready.clear()

    @property
    def completion(self) -> Completion:
        """What has been handed out so far, as a completion."""
        return self._reply.completion


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One reply of a batch that has not begun. `prompt`: the number of its prompt, whose prefill replies share."""

    prompt: int
    begin: Begin


class Batch(Closable, Iterator[tuple[int, Chunk]]):
    """Several replies at once, in ragged rounds: iterate over (index of the reply, chunk).

    Up to `width` requests share a pass. Each accepts its own number of tokens; one that ends makes room for the next
    that waits. Replies to one prompt that run together share its prefill. A request that fails ends alone, and the
    error is raised when all others are done; a `PacelineError` brings every completion as its `partial`.
    """

    def __init__(self, engine: Engine, jobs: Sequence[BatchItem], width: int) -> None:
        self._engine, self._scheduler = engine, Scheduler(engine, width)
        self._tasks = [Task(job.begin, group=job.prompt) for job in jobs]
        self._index = {task: index for index, task in enumerate(self._tasks)}
        self._replies: dict[int, GrowingReply] = {}
        self._ready: deque[tuple[int, Chunk]] = deque()
        for task in self._tasks:
            self._scheduler.add(task)

    def __next__(self) -> tuple[int, Chunk]:
        try:
            while not self._ready:
                if not self._scheduler.busy:
                    self._end()
                self._turn()
        except BaseException as error:
            self.close()
            if isinstance(error, PacelineError):
                error.partial = self.completions
            raise
        index, chunk = self._ready.popleft()
        return index, self._replies[index].show(chunk)

    def _turn(self) -> None:
        for task, chunks in self._scheduler.turn():
            index = self._index[task]
            if task.request and index not in self._replies:
                self._replies[index] = GrowingReply(self._engine, task.request)
            self._ready.extend((index, chunk) for chunk in chunks)

    def _end(self) -> None:
        """All is done: stop, or raise the first error there was."""
        for error in self.errors.values():
            raise error
        raise StopIteration

    def close(self) -> None:
        """End all replies here; closing twice does nothing."""
        self._scheduler.close()
        self._ready.clear()

    @property
    def errors(self) -> dict[int, Exception]:
        """The replies that failed so far, and why."""
        return {index: task.error for index, task in enumerate(self._tasks) if task.error}

    def completion(self, index: int) -> Completion:
        """One reply, as far as it has been handed out."""
        return self._replies[index].completion

    @property
    def completions(self) -> list[Completion]:
        """What has been handed out of each reply that has begun, in order; all of them once the iteration has ended."""
        return [self._replies[i].completion for i in sorted(self._replies)]
