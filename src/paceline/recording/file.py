"""Recording files: each reply is appended when it ends, and rows are read one at a time."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import overload

from paceline.checkpoints.head_fit import fingerprint, same_target
from paceline.checkpoints.loader import Loaded
from paceline.engine.request import Request
from paceline.errors import CannotWrite, InvalidData
from paceline.files.jsonl import MAX_LINE_BYTES, BoundedJournal, Journal, JsonlFile
from paceline.protocols import Closable, TargetWithHead
from paceline.recording.rows import (
    RECORDED_FINISH_REASONS,
    RecordedReply,
    RecordingHeader,
    parse_header,
    parse_reply,
    recorded_parameters,
)
from paceline.sampling.parameters import Sampling

_LOG = logging.getLogger("paceline")
_MAX_FILE_BYTES = 1 << 32
"""Maximum size of a recording in bytes."""
_ANOTHER = "Record into another file"


def header_of(model: Loaded) -> RecordingHeader:
    """Return the header for recordings of this model."""
    try:
        own = version("paceline")
    except PackageNotFoundError:
        own = "unknown"
    target = model.target
    # A model that runs through transformers does not expose its embedding, so only its tokenizer identifies it.
    of_model = fingerprint(model) if isinstance(target, TargetWithHead) else f"{model.tokenizer.digest}:0"
    return RecordingHeader(str(model.path), of_model, target.vocab_size, target.context_length, model.quantize, own)


class ReplyRecorder(Closable):
    """Appends every reply to a file when the reply ends by EOS, a stop condition or its length.

    Each row is written at once, so a killed process leaves a readable file. The file contains what users wrote and
    read, so only its owner may read a new file. Replies with a rule other than `match`, replies with custom logits
    processors, and replies to images are skipped, since their drafts could not be repeated.

    Attributes:
        count: Number of recorded replies.
        skipped: Number of skipped replies.
        error: The error that stopped recording, or None. A full disk does not end replies.
    """

    def __init__(self, path: Path, model: Loaded, limit: int | None = None) -> None:
        """Open a recording to append to, or begin a new one.

        Args:
            path: The file.
            model: The model.
            limit: Maximum bytes of the recording and of FILE.old, which holds the older replies. None for no limit.

        Raises:
            InvalidData: If the file is not a recording of this model, or if the model has adapters.
            OSError: If the file cannot be opened.
        """
        self.path, self.count, self.skipped = path, 0, 0
        self.error: OSError | None = None
        self._journal: Journal | None = None
        self._last = 0.0
        if model.adapters:
            raise InvalidData(
                "a model with adapters cannot be recorded", "Leave out the adapters, or merge one, or do not record"
            )
        header = header_of(model)
        known = _begun(path)
        if known and (known.quantize != header.quantize or not same_target(known.fingerprint, header.fingerprint)):
            raise InvalidData(f"{path} is a recording of another model, {known.model} {known.quantize or ''}", _ANOTHER)
        if limit is not None:
            self._journal = BoundedJournal(path, 0o600, limit, header.as_dict())
            return
        self._journal = Journal(path, 0o600)
        if not known:
            self._journal.append(header.as_dict())

    def watch(self, request: Request, sampling: Sampling, sample: int) -> None:
        """Record the reply of this request when it ends. `sample` is its number among the replies to a prompt."""
        self._last = max(time.time(), self._last + 1e-6)
        request.on_finish = partial(self._record, sampling, sample, self._last)

    def _record(self, sampling: Sampling, sample: int, started: float, request: Request) -> None:
        split = request.num_prompt_tokens
        prompt, reply = tuple(request.token_ids[:split]), tuple(request.token_ids[split:])
        repeatable = request.sampler.rule == "match" and not sampling.processors and not request.images
        if request.finish not in RECORDED_FINISH_REASONS or not repeatable or not reply:
            self.skipped += 1
        elif self._journal and self.error is None:
            how = recorded_parameters(sampling, request.sampler.noise.seed)
            row = RecordedReply(prompt, reply, request.finish, how, sample, round(started, 6))
            try:
                self._journal.append(row.as_dict())
                self.count += 1
            except OSError as error:
                self.error = error
                _LOG.warning("recording into %s stopped: %s", self.path, error.strerror or error)

    def close(self) -> None:
        journal, self._journal = self._journal, None
        if journal:
            journal.close()

    def check(self) -> None:
        """Raise `CannotWrite` if recording has stopped."""
        if self.error is not None:
            raise CannotWrite(
                f"{self.path} could not be written ({self.error})", "Free disk space, then record again"
            ) from self.error


def _begun(path: Path) -> RecordingHeader | None:
    """Return the header of a recording. Return None if the file does not exist, or if a kill cut off its header."""
    if not path.exists() or not path.stat().st_size:
        return None
    with path.open("rb") as file:
        line = file.readline(MAX_LINE_BYTES)
    if not line.endswith(b"\n") and line.startswith(b'{"paceline_recording"'):
        return None
    try:
        return parse_header(line)
    except ValueError as error:
        raise InvalidData(f"{path}, line 1: {error}", _ANOTHER) from None


class Recording(Sequence[RecordedReply]):
    """The replies of a recording, in the order of their beginning.

    Rows are read from disk at each access. A last line that a kill cut off is ignored.

    Attributes:
        tokens: Number of tokens in all replies.
    """

    def __init__(self, path: Path) -> None:
        """Open a recording and check every row.

        Raises:
            InvalidData: If a row is not valid. The message names file and line.
            OSError: If the file cannot be read.
        """
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InvalidData(
                f"{path} is larger than {_MAX_FILE_BYTES >> 30} GiB",
                "Remove replies from the file; each line holds one",
            )
        self.path, self.tokens = path, 0
        self._header: RecordingHeader | None = None
        self._began = array("d")
        self._lines = JsonlFile(path, self._visit)
        if len(self._lines) == 0:
            raise InvalidData(f"{path} is empty", "Record replies with paceline record")
        self._order = sorted(range(len(self._began)), key=self._began.__getitem__)

    @property
    def header(self) -> RecordingHeader:
        """The header, which describes the model."""
        assert self._header
        return self._header

    def _visit(self, line: bytes, number: int) -> None:
        if self._header is None:
            self._header = parse_header(line)
            return
        if line.endswith(b"\n"):  # otherwise a kill cut it off
            row = parse_reply(line, self._header)
            self._began.append(row.started)
            self.tokens += len(row.reply)

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> RecordedReply: ...
    @overload
    def __getitem__(self, index: slice) -> list[RecordedReply]: ...
    def __getitem__(self, index: int | slice) -> RecordedReply | list[RecordedReply]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        # Line 0 is the header.
        return parse_reply(self._lines[self._order[index] + 1], self.header)
