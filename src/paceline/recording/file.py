"""Recordings as files: appended to reply by reply, read row by row."""

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
from paceline.files.jsonl import LONGEST, Journal, JsonlFile
from paceline.protocols import Adaptable, Closable, TargetWithHead
from paceline.recording.rows import ENDS, RecordedReply, RecordingHeader, parse_header, parse_reply, seeded
from paceline.sampling.parameters import Sampling

_LOG = logging.getLogger("paceline")
_LARGEST = 1 << 32
"""Bytes of a recording that is read at most."""
_ANOTHER = "Record into another file"


def header_of(model: Loaded) -> RecordingHeader:
    """Return the header of recordings of this model."""
    try:
        own = version("paceline")
    except PackageNotFoundError:
        own = "unknown"
    target = model.target
    # Targets without ends run through transformers: their tokenizer must do.
    of_model = fingerprint(model) if isinstance(target, TargetWithHead) else f"{model.tokenizer.digest}:0"
    return RecordingHeader(str(model.path), of_model, target.vocab_size, target.context_length, model.quantize, own)


class ReplyRecorder(Closable):
    """Appends every reply to a file when it has ended, by EOS, a stop condition or its length.

    Each row is written at once, so a killed process leaves a readable file. The file holds what users wrote and got:
    a new one can be read by its owner alone. Replies of other rules than `match`, and of processors of your own, are
    left out, since their drafts could not be repeated. `count`, `skipped`: replies recorded, and left out. `error`: why
    recording stopped; a full disk must not end a reply.
    """

    def __init__(self, path: Path, model: Loaded) -> None:
        """Raises `InvalidData` for a file that is no recording, or one of another model, or for a model with adapters
        beside it, and `OSError`."""
        self.path, self.count, self.skipped = path, 0, 0
        self.error: OSError | None = None
        self._journal: Journal | None = None
        self._last = 0.0
        if isinstance(model.target, Adaptable) and model.target.adapters:
            raise InvalidData("a recording is of one model, without adapters beside it", "Leave out one of them")
        header = header_of(model)
        known = _begun(path)
        if known and (known.quantize != header.quantize or not same_target(known.fingerprint, header.fingerprint)):
            raise InvalidData(f"{path} is a recording of another model, {known.model} {known.quantize or ''}", _ANOTHER)
        self._journal = Journal(path, 0o600)
        if not known:
            self._journal.append(header.as_dict())

    def watch(self, request: Request, sampling: Sampling, sample: int) -> None:
        """Record a request's reply when it ends."""
        self._last = max(time.time(), self._last + 1e-6)
        request.on_finish = partial(self._record, sampling, sample, self._last)

    def _record(self, sampling: Sampling, sample: int, started: float, request: Request) -> None:
        split = request.num_prompt_tokens
        prompt, reply = tuple(request.token_ids[:split]), tuple(request.token_ids[split:])
        if request.finish not in ENDS or request.sampler.rule != "match" or sampling.processors or not reply:
            self.skipped += 1
        elif self._journal and self.error is None:
            how = seeded(sampling, request.sampler.noise.seed)
            row = RecordedReply(prompt, reply, request.finish, how, sample, round(started, 6))
            try:
                self._journal.append(row.as_dict())
                self.count += 1
            except OSError as error:
                self.error = error
                _LOG.warning("%s: recording stopped: %s", self.path, error.strerror or error)

    def close(self) -> None:
        journal, self._journal = self._journal, None
        if journal:
            journal.close()

    def check(self) -> None:
        """Raise `CannotWrite` if recording stopped."""
        if self.error is not None:
            raise CannotWrite(f"{self.path} could not be written ({self.error})", "Make room") from self.error


def _begun(path: Path) -> RecordingHeader | None:
    """Return the header of a file that exists; None where there is none yet, or a kill tore it."""
    if not path.exists() or not path.stat().st_size:
        return None
    with path.open("rb") as file:
        line = file.readline(LONGEST)
    if not line.endswith(b"\n") and line.startswith(b'{"paceline_recording"'):
        return None
    try:
        return parse_header(line)
    except ValueError as error:
        raise InvalidData(f"{path}, line 1: {error}", _ANOTHER) from None


class Recording(Sequence[RecordedReply]):
    """The replies of a recording in the order in which they began, read from disk at each access.

    Every row is checked when the file is opened; a last line that a kill tore is left out. `tokens`: those of all
    replies.
    """

    def __init__(self, path: Path) -> None:
        """Raises `InvalidData` that names file and line, and `OSError`."""
        if path.stat().st_size > _LARGEST:
            raise InvalidData(f"{path} has more than {_LARGEST >> 30} GiB", "Keep fewer replies: one per line")
        self.path, self.tokens = path, 0
        self._header: RecordingHeader | None = None
        self._began = array("d")
        self._lines = JsonlFile(path, self._visit)
        if len(self._lines) == 0:
            raise InvalidData(f"{path} is empty", "Record replies: paceline record")
        self._order = sorted(range(len(self._began)), key=self._began.__getitem__)

    @property
    def header(self) -> RecordingHeader:
        """About the model."""
        assert self._header
        return self._header

    def _visit(self, line: bytes, number: int) -> None:
        if self._header is None:
            self._header = parse_header(line)
            return
        if line.endswith(b"\n"):  # else a kill tore it
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
