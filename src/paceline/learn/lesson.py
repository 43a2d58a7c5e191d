"""A lesson: a head is trained on recorded traffic, and kept if it makes held-out traffic faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.bench.figures import ratio_of_sums
from paceline.bench.replay.predict import Candidate, Predictor, measure_prices
from paceline.checkpoints.head_files import holds_head, open_head
from paceline.checkpoints.head_fit import fits
from paceline.errors import PacelineError
from paceline.files.jsonl import Journal, replace_with
from paceline.learn.folder import LEAST_HELD, Pupil
from paceline.llm import LLM
from paceline.recording.file import Recording, header_of
from paceline.recording.rows import RecordedReply
from paceline.train.kinds import TrainJob
from paceline.train.loop import TrainPlan
from paceline.train.recorded import is_held
from paceline.train.run import train

MOST_HELD = 100
"""Maximum number of held-out replies to replay."""
_VOCABULARY = 16384
"""Maximum vocabulary of a head, in tokens."""

Compare = Callable[[LLM, Sequence[RecordedReply], str, str], dict[str, float]]
"""(model, held-out replies, drafter in use, new drafter) -> speed of the new drafter relative to the drafter in use,
with its 95 % interval: {"value", "low", "high"}."""


def teach(llm: LLM, pupil: Pupil, drafter: str, job: TrainJob, compare: Compare | None = None) -> dict[str, Any]:
    """Give one lesson. After an interruption, the same call continues it.

    Args:
        llm: The target.
        pupil: The folder with the traffic.
        drafter: Name of the drafter in use.
        job: Settings of the training. `teach` sets its files and the head to start from.
        compare: Compares two drafters. None for `replayed`.

    Returns:
        The status, which is also written to the folder.

    Raises:
        PacelineError: If the traffic or the training fails.
    """
    pupil.recover()
    if not pupil.lesson.exists():
        pupil.drop_lesson()
        _snapshot(llm, pupil)
    recording = Recording(pupil.lesson)
    if not holds_head(pupil.candidate):
        train(llm, replace(job, out=pupil.candidate, recording=pupil.lesson, start=_start(llm, pupil)))
    held = [reply for reply in recording if is_held(reply)][-MOST_HELD:]
    gain = None
    if len(held) >= LEAST_HELD:
        gain = (compare or replayed)(llm, held, drafter, f"suffix:remember+head:{pupil.candidate}")
    switched = gain is not None and gain["low"] > 1.0
    if switched:
        pupil.switch()
    status = {
        "time": time.time(),
        "until": max(reply.started for reply in recording),
        "replies": len(recording),
        "tokens": recording.tokens,
        "held": len(held),
        "gain": gain,
        "switched": switched,
    }
    pupil.write_status(status)
    pupil.drop_lesson()
    return status


def _start(llm: LLM, pupil: Pupil) -> Path | None:
    """Return the head to begin with. None if there is none, or it is damaged or belongs to another model."""
    if not holds_head(pupil.head):
        return None
    try:
        fits(open_head(pupil.head), llm.model)
    except (PacelineError, OSError):
        return None
    return pupil.head


def _snapshot(llm: LLM, pupil: Pupil) -> None:
    """Copy the traffic, so that training continues with the same replies after an interruption."""
    header, replies = header_of(llm.model), pupil.replies()

    def write(path: Any) -> None:
        with Journal(path, 0o600) as journal:
            journal.append(header.as_dict())
            for reply in replies:
                journal.append(reply.as_dict())

    replace_with(pupil.lesson, write)


def job_for(target: str, vocab_size: int, disk: int) -> TrainJob:
    """Return settings of a training run that a machine with a few cores can finish.

    Args:
        target: Name of the target.
        vocab_size: Size of its vocabulary.
        disk: Maximum bytes of hidden states.
    """
    vocabulary = _VOCABULARY if vocab_size > 2 * _VOCABULARY else None
    plan = TrainPlan(epochs=3.0, every=30.0)
    unused: Any = None
    return TrainJob(target, "eagle3", unused, vocabulary=vocabulary, cache=disk / 2**30, bits=4, plan=plan)


def replayed(llm: LLM, held: Sequence[RecordedReply], drafter: str, other: str) -> dict[str, float]:
    """Compare two drafters over recorded replies (see `Compare`), with prices measured on this machine."""
    predictor = Predictor(llm.model, measure_prices(llm.model, held[0], 1))
    old, new = (predictor.predict(Candidate(name), held).replayed.reply_seconds for name in (drafter, other))
    return ratio_of_sums(old, new)
