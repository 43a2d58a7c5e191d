"""The learning side of a server: records traffic, remembers replies, and trains while the machine is idle."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoints.head_files import holds_head
from paceline.drafters.base import Drafter
from paceline.drafters.factory import open_drafter
from paceline.drafters.stack import DrafterStack
from paceline.drafters.suffix import Suffix
from paceline.engine.draft_policy import Speculation
from paceline.engine.request import Request
from paceline.errors import InvalidData, PacelineError
from paceline.files.folder_lock import lock_folder
from paceline.files.jsonl import older_file
from paceline.learn.folder import KeyFolder, open_folder, open_key_folder
from paceline.llm import LLM
from paceline.models.held import held_bytes
from paceline.protocols import Closable
from paceline.recording.file import ReplyRecorder
from paceline.recording.rows import RecordedReply
from paceline.sampling.parameters import Sampling

_LOG = logging.getLogger("paceline.learn")
TRAIN_COMMAND = (sys.executable, "-m", "paceline.learn")
"""Command of the process that trains a head. The settings of the run are its last argument."""
_MAX_MEMORY = 64 << 20
"""Maximum bytes of the suffix memories of all keys together."""
_BYTES_PER_TOKEN = 1024
"""Maximum bytes of a remembered token."""
_MAX_TRAFFIC = 64 << 20
"""Maximum bytes of the recorded traffic of all keys together. It is read at the start."""


@dataclass(frozen=True, slots=True)
class LearningPlan:
    """Settings of `--learn`.

    Attributes:
        folder: The folder.
        disk: Maximum bytes of recorded traffic and hidden states.
        load: Arguments of `paceline.load` that loaded the server's model.
        idle: Seconds without a request before a training run begins.
        min_traffic_tokens: Tokens of new replies that make another training run worthwhile.
        free_memory: Returns the free memory in bytes. A training run loads the model again.
    """

    folder: Path
    disk: int = 2 << 30
    load: Mapping[str, Any] = field(default_factory=dict)
    idle: float = 180.0
    min_traffic_tokens: int = 20_000
    free_memory: Callable[[], int] = lambda: 1 << 62


class _Key:
    """The drafters learned from the clients of one API key. Clients with other keys do not use them."""

    def __init__(self, number: int, key_folder: KeyFolder, llm: LLM, plan: LearningPlan, keys: int) -> None:
        self.number, self.key_folder, self.llm = number, key_folder, llm
        limit = max(2, _MAX_MEMORY // _BYTES_PER_TOKEN // keys)
        self.memory = Suffix(remember=True, memory=limit)
        self.recorder = _recorder(key_folder, llm, min(_MAX_TRAFFIC, plan.disk // 4) // keys)
        replies = key_folder.replies()
        for reply in _latest(replies, limit):
            self.memory.learn(reply.reply)
        until = key_folder.status().get("until")
        known = until if isinstance(until, (int, float)) else 0.0
        self.new_tokens = sum(len(reply.reply) for reply in replies if reply.started > known)
        self.secrets: list[str] = []
        self.name, others = _server_drafters(llm)
        self.use_drafter(DrafterStack([self.memory, *others]) if others else self.memory)

    def use_drafter(self, drafter: Drafter) -> None:
        """Use this drafter for all later requests."""
        policies = self.llm.engine.policies
        drafter.bind(self.llm.engine.cache)
        self.secrets.append(policies.add_private(f"learned-{self.number}-{len(self.secrets)}", drafter))
        self.speculation = Speculation(self.secrets[-1])
        for secret in self.secrets[:-2]:  # requests may still use the last two
            policies.remove_private(secret)

    def use_head(self) -> bool:
        """Draft with the trained head. Return False if there is none, or it is damaged or belongs to another model."""
        try:
            if not holds_head(self.key_folder.head):
                return False
            head = open_drafter(f"head:{self.key_folder.head}", self.llm.model)
            assert head is not None
            self.use_drafter(DrafterStack([self.memory, head]))
            self.name = f"suffix:remember+head:{self.key_folder.head}"
            return True
        except (PacelineError, OSError) as error:
            _LOG.warning("%s is not used: %s", self.key_folder.head, error)
            return False

    def watch(self, request: Request, sampling: Sampling, sample: int) -> None:
        """Record the reply of this request when it ends."""
        if self.recorder is None:
            return
        self.recorder.watch(request, sampling, sample)
        record, count = request.on_finish, len(request.token_ids)

        def finished(request: Request) -> None:
            assert record
            record(request)
            self.new_tokens += len(request.token_ids) - count

        request.on_finish = finished


def _latest(replies: Sequence[RecordedReply], limit: int) -> list[RecordedReply]:
    """Return the latest replies, in order, as many as a memory of `limit` tokens holds."""
    found: list[RecordedReply] = []
    for reply in reversed(replies):
        limit -= len(reply.reply) + 1
        if limit < 0:
            break
        found.append(reply)
    return found[::-1]


def _server_drafters(llm: LLM) -> tuple[str, list[Drafter]]:
    """Return the server's drafter with a memory, as a name for `replay`, and its parts that do not look up text.

    The parts can be shared, because their state belongs to a slot, and a slot belongs to one request.
    """
    policies = llm.engine.policies
    default = policies[policies.default.drafter]
    if default is None:
        return "suffix:remember", []
    drafters = default.drafter.drafters if isinstance(default.drafter, DrafterStack) else (default.drafter,)
    others = [drafter for drafter in drafters if not isinstance(drafter, Suffix)]
    name = policies.given_name(default)
    rest = [part for part in name.split("+", 1) if part not in ("suffix", "suffix:remember")]
    return "+".join(["suffix:remember", *rest]), others


def _recorder(key_folder: KeyFolder, llm: LLM, limit: int) -> ReplyRecorder | None:
    """Open the recording of a key. Replace a file that is damaged or belongs to another model."""
    try:
        try:
            return ReplyRecorder(key_folder.traffic, llm.model, limit)
        except InvalidData as error:
            _LOG.warning("the recorded traffic is dropped: %s", error)
            key_folder.discard_training()
            for path in (key_folder.traffic, older_file(key_folder.traffic)):
                path.unlink(missing_ok=True)
            return ReplyRecorder(key_folder.traffic, llm.model, limit)
    except (InvalidData, OSError) as error:
        _LOG.warning("%s is not written: %s", key_folder.traffic, error)
        return None


class Learner(Closable):
    """Learns from the traffic of a server, separately for each API key.

    A key's clients draft from the replies to that key, and from a head that was trained on them. Sharing either between
    keys would let a client find out by timing what others have written.
    """

    def __init__(self, llm: LLM, keys: Sequence[str], plan: LearningPlan) -> None:
        """Open the folder.

        Args:
            llm: The target. The private drafters are added to its engine.
            keys: API keys of the server. If there are none, all clients count as one.
            plan: Settings.

        Raises:
            InvalidOption: If the folder contains anything else, or another server is using it.
            OSError: If the folder cannot be used.
        """
        self._llm, self._plan = llm, plan
        self._keys: list[_Key] = []
        self._child: subprocess.Popen[bytes] | None = None
        self._last_request, self._closed = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-learner", daemon=True)
        folder = open_folder(plan.folder)
        self._resources = ExitStack()
        self._resources.enter_context(lock_folder(folder))
        named: Sequence[str | None] = keys or [None]
        self._keys = [_Key(i, open_key_folder(folder, key), llm, plan, len(named)) for i, key in enumerate(named)]
        for key in self._keys:
            key.use_head()
        self._is_busy: Callable[[], bool] = lambda: False

    def start(self, is_busy: Callable[[], bool]) -> None:
        """Start training in the background. `is_busy` returns True while replies are being written."""
        self._is_busy = is_busy
        self._thread.start()

    def speculation(self, key: int) -> Speculation:
        """Return the speculation of requests with this API key, counted from 0."""
        return self._keys[key].speculation

    def watch(self, key: int, request: Request, sampling: Sampling, sample: int) -> None:
        """Record the reply of a request with this API key when it ends."""
        self._keys[key].watch(request, sampling, sample)

    def interrupt(self) -> None:
        """Stop a training run, because a request has arrived. The run continues when the server is idle again."""
        self._last_request = time.monotonic()
        if (child := self._child) is not None:
            child.kill()

    def close(self) -> None:
        self._closed.set()
        self.interrupt()  # ends a training run
        if self._thread.is_alive():
            self._thread.join()
        for key in self._keys:
            if key.recorder:
                key.recorder.close()
        self._resources.close()

    def _run(self) -> None:
        while not self._closed.wait(min(1.0, self._plan.idle)):
            if self._is_busy():
                self._last_request = time.monotonic()
            try:
                number, last_request = self._next_key(), self._last_request
                if number is not None and time.monotonic() - last_request >= self._plan.idle:
                    self._train(number, last_request)
            except Exception:
                _LOG.exception("a training run failed")
                self._closed.wait(self._plan.idle)

    def _next_key(self) -> int | None:
        """Return the key to train for next: a key with an interrupted run, or the key with the most new replies."""
        interrupted = [number for number, key in enumerate(self._keys) if key.key_folder.training_data.exists()]
        ready = [number for number, key in enumerate(self._keys) if key.new_tokens >= self._plan.min_traffic_tokens]
        return next(iter(interrupted), max(ready, key=lambda number: self._keys[number].new_tokens, default=None))

    def _train(self, number: int, last_request: float) -> None:
        """Train in a process of its own, and use the new head. `last_request`: the time of the latest request."""
        key = self._keys[number]
        if self._plan.free_memory() < _memory_needed(self._llm):
            _LOG.warning("no training run: there is not enough memory to load the model again")
            self._closed.wait(self._plan.idle)
            return
        new_tokens, key.new_tokens = key.new_tokens, 0
        command = [*TRAIN_COMMAND, json.dumps(self._settings(number))]
        quiet: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
        # A new session has its own priority, and Ctrl-C does not reach it.
        self._child = child = subprocess.Popen(command, start_new_session=True, **quiet)
        # A request may have arrived before `interrupt` could see the process.
        if self._last_request != last_request or self._closed.is_set():
            child.kill()
        code = child.wait()
        self._child = None
        assert child.stdin
        child.stdin.close()
        if code != 0:
            key.new_tokens += new_tokens
            if self._last_request == last_request:  # not interrupted by a request
                _LOG.warning("a training run failed with exit code %d", code)
                key.key_folder.discard_training()
                key.new_tokens = 0
        elif key.key_folder.status().get("switched") and key.use_head():
            _LOG.info("the head that was trained on the traffic is in use")

    def _settings(self, number: int) -> dict[str, Any]:
        return {
            "model": str(self._llm.model.path),
            "load": dict(self._plan.load),
            "folder": str(self._keys[number].key_folder.path.absolute()),
            "drafter": self._keys[number].name,
            "disk": self._plan.disk // 2,
        }


def _memory_needed(llm: LLM) -> int:
    """Return the bytes that a training run takes: the size of the model, and the same again for training."""
    return 2 * held_bytes(llm.model.target)
