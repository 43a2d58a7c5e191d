"""The replies that callers receive: completions, streams and batches."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from paceline.engine.detokenizer import Chunk, Logprobs
from paceline.engine.engine import Engine
from paceline.engine.request import Request
from paceline.engine.scheduler import Scheduler, Task
from paceline.engine.stats import Stats
from paceline.errors import PacelineError
from paceline.protocols import Closable
from paceline.types import FinishReason

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished reply.

    Attributes:
        text: The text, without the stop string and anything after it.
        token_ids: The reply's token ids, including EOS.
        finish_reason: Why the reply ended.
        stats: Counts and times of the reply.
        prompt_tokens: Length of the prompt, in tokens.
        logprobs: Log-probabilities, one entry per token id. None if they were not requested.
    """

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


class _Replies(Closable, Iterator[Item]):
    """Replies that are generated while the caller iterates over them. Base class of `Batch` and `Stream`."""

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

    def __next__(self) -> Item:
        try:
            while not self._ready:
                if not self._scheduler or not self._scheduler.busy:
                    errors = [] if self._raised else [task.error for task in self._tasks if task.error]
                    raise errors[0] if errors else StopIteration
                for task, chunks in self._scheduler.turn():
                    self._ready.extend((self._index[task], chunk) for chunk in chunks)
        except BaseException as error:
            self._raised = True
            self.close()
            if isinstance(error, PacelineError):
                error.partial = self._partial()
            raise
        index, chunk = self._ready.popleft()
        self._shown[index].append(chunk)
        return self._item(index, chunk)

    def close(self) -> None:
        """Stop all replies and free their slots. A second call does nothing."""
        if self._scheduler:
            self._scheduler.close()
            self._ready.clear()

    @abstractmethod
    def _item(self, index: int, chunk: Chunk) -> Item:
        """Return the item that the iteration yields for this chunk."""

    @abstractmethod
    def _partial(self) -> object:
        """Return what has been generated so far, for `PacelineError.partial`."""


class Batch(_Replies[tuple[int, Chunk]]):
    """Several replies generated together. Iterate over it to get pairs of a reply's index and a chunk.

    Up to `width` requests share a pass, and each accepts its own number of tokens per round. When a request ends, the
    next one takes its slot. Replies to the same prompt share its prefill if they run at the same time. If a request
    fails, the others run to their end before the error is raised. A `PacelineError` then holds all completions in
    `partial`.
    """

    def _item(self, index: int, chunk: Chunk) -> tuple[int, Chunk]:
        return index, chunk

    def _partial(self) -> list[Completion]:
        return self.completions

    def stop(self, index: int) -> None:
        """Cancel one reply. The iteration yields no further chunks of this reply, and the other replies continue."""
        self._tasks[index].cancelled = True
        self._ready = deque(entry for entry in self._ready if entry[0] != index)

    @property
    def errors(self) -> dict[int, Exception]:
        """The errors of the replies that have failed so far, by the reply's index."""
        return {index: task.error for index, task in enumerate(self._tasks) if task.error}

    def completion(self, index: int) -> Completion:
        """Return one reply, with the chunks that the iteration has yielded so far.

        Raises:
            KeyError: If the reply has not begun.
        """
        if (request := self._tasks[index].request) is None:
            raise KeyError(f"reply {index} has not begun")
        return _completion(request, self._shown[index])

    @property
    def completions(self) -> list[Completion]:
        """The replies that have begun, in order, each with the chunks that the iteration has yielded so far."""
        return [self.completion(index) for index, task in enumerate(self._tasks) if task.request]


class Stream(_Replies[Chunk]):
    """One reply as it is generated. Iterate over it to get its chunks. To stop early, close it or leave its `with`
    block.

    If the reply fails, the stream first yields the tokens of the last complete round, and then raises the error. A
    `PacelineError` holds the completion so far in `partial`.
    """

    def __init__(self, engine: Engine, request: Request) -> None:
        self._request, self._task = request, Task(request=request, unread=len(request.token_ids) - 1)
        super().__init__(engine, [self._task], 1)

    def _item(self, index: int, chunk: Chunk) -> Chunk:
        return chunk

    def _partial(self) -> Completion:
        return self.completion

    @property
    def prompt_progress(self) -> tuple[int, int]:
        """The number of prompt tokens processed so far, and the number of all prompt tokens. Any thread may read
        this."""
        total = self._request.num_prompt_tokens
        return total - self._task.unread, total

    @property
    def completion(self) -> Completion:
        """The reply, with the chunks that the iteration has yielded so far."""
        return _completion(self._request, self._shown[0])


def _completion(request: Request, shown: Sequence[Chunk]) -> Completion:
    """Return a request's completion, built from the chunks that the caller has seen."""
    failed: FinishReason = "error" if request.error else "length" if request.stream.empty else "cancelled"
    return Completion(
        "".join(chunk.text for chunk in shown),
        [chunk.token_id for chunk in shown],
        (shown[-1].finish_reason if shown else None) or failed,
        request.stats,
        request.num_prompt_tokens,
        None if request.stream.logprobs is None else [chunk.logprobs for chunk in shown if chunk.logprobs],
    )
