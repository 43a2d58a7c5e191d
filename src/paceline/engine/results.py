"""The replies that callers get: completions, streams, batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.engine.detokenizer import Chunk, Logprobs
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler, Task
from paceline.engine.stats import Stats
from paceline.errors import PacelineError
from paceline.protocols import Closable
from paceline.types import FinishReason


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished reply. `text`: its text, up to a stop string. `token_ids`: its tokens, EOS included. `prompt_tokens`:
    the length of the prompt. `logprobs`: one per token id, if requested."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    prompt_tokens: int
    logprobs: list[Logprobs] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        logprobs = {} if self.logprobs is None else {"logprobs": [asdict(token) for token in self.logprobs]}
        return {
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            **logprobs,
            "stats": self.stats.as_dict(),
        }


class Batch(Closable, Iterator[tuple[int, Chunk]]):
    """Several replies written together: iterate over (index of the reply, chunk).

    Up to `width` requests share a pass. Each accepts its own number of tokens per round; when one ends, the next
    waiting one takes its slot. Replies to one prompt that run together share its prefill. If a request fails, the error
    is raised when all others are done; a `PacelineError` has every completion as its `partial`.
    """

    _scheduler: Scheduler | None = None
    """None only if an interrupt ended the constructor."""

    def __init__(self, engine: Engine, tasks: Sequence[Task], width: int) -> None:
        self._tasks = list(tasks)
        self._index = {task: index for index, task in enumerate(self._tasks)}
        self._shown: list[list[Chunk]] = [[] for _ in self._tasks]
        self._ready: deque[tuple[int, Chunk]] = deque()
        self._raised = False
        self._scheduler = Scheduler(engine, width)
        for task in self._tasks:
            self._scheduler.add(task)

    def __next__(self) -> tuple[int, Chunk]:
        try:
            while not self._ready:
                if not self._scheduler or not self._scheduler.busy:
                    errors = [] if self._raised else [*self.errors.values()]
                    raise errors[0] if errors else StopIteration
                for task, chunks in self._scheduler.turn():
                    self._ready.extend((self._index[task], chunk) for chunk in chunks)
        except BaseException as error:
            self._raised = True
            self.close()
            if isinstance(error, PacelineError):
                error.partial = self.completions
            raise
        index, chunk = self._ready.popleft()
        self._shown[index].append(chunk)
        return index, chunk

    def close(self) -> None:
        """Stop all replies and free their slots; closing twice does nothing."""
        if self._scheduler:
            self._scheduler.close()
            self._ready.clear()

    def stop(self, index: int) -> None:
        """End one reply here, as if cancelled: nothing more of it is handed out, and the others go on."""
        self._tasks[index].cancelled = True
        self._ready = deque(entry for entry in self._ready if entry[0] != index)

    @property
    def errors(self) -> dict[int, Exception]:
        """The errors of the replies that failed so far, by index."""
        return {index: task.error for index, task in enumerate(self._tasks) if task.error}

    def completion(self, index: int) -> Completion:
        """Return one reply as far as it has been handed out. Raises `KeyError` for one that has not begun."""
        request, shown = self._tasks[index].request, self._shown[index]
        if request is None:
            raise KeyError(f"reply {index} has not begun")
        failed: FinishReason = "error" if request.error else "length" if request.stream.empty else "cancelled"
        return Completion(
            "".join(chunk.text for chunk in shown),
            [chunk.token_id for chunk in shown],
            (shown[-1].finish_reason if shown else None) or failed,
            request.stats,
            request.num_prompt_tokens,
            None if request.stream.logprobs is None else [chunk.logprobs for chunk in shown if chunk.logprobs],
        )

    @property
    def completions(self) -> list[Completion]:
        """The replies that have begun, in order, as far as handed out; all replies once the iteration has ended."""
        return [self.completion(index) for index, task in enumerate(self._tasks) if task.request]


class Stream(Closable, Iterator[Chunk]):
    """One reply as it is written: iterate over its chunks; close it, or leave its `with` block, to stop early.

    If the reply fails, the stream first hands out the tokens of its last complete round, then raises. A `PacelineError`
    has the completion so far as its `partial`.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._batch = Batch(engine, [Task(request=request)], 1)

    def __next__(self) -> Chunk:
        try:
            return next(self._batch)[1]
        except PacelineError as error:
            error.partial = self.completion
            raise

    def close(self) -> None:
        """Stop the reply and free its slot; closing twice does nothing."""
        if batch := vars(self).get("_batch"):  # an interrupt may have ended the constructor
            batch.close()

    @property
    def completion(self) -> Completion:
        """The reply as far as it has been handed out; complete once the iteration has ended."""
        return self._batch.completion(0)
