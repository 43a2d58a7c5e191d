"""Training a head on recorded traffic. The head is used if it makes held-out traffic faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.bench.figures import ratio_of_sums
from paceline.bench.replay.predict import Candidate, Predictor, measure_prices
from paceline.checkpoints.head_files import holds_head, open_head
from paceline.checkpoints.head_fit import fit_to_target
from paceline.errors import PacelineError
from paceline.files.jsonl import Journal, replace_with
from paceline.learn.folder import MIN_HELD_OUT, KeyFolder
from paceline.llm import LLM
from paceline.recording.file import Recording, header_of
from paceline.recording.rows import RecordedReply
from paceline.train.kinds import TrainJob
from paceline.train.loop import TrainPlan
from paceline.train.recorded import is_held
from paceline.train.run import train

MAX_HELD_OUT = 100
"""Maximum number of held-out replies to replay."""
_MAX_VOCABULARY = 16384
"""Maximum vocabulary of a head, in tokens."""

Compare = Callable[[LLM, Sequence[RecordedReply], str, str], dict[str, float]]
"""(model, held-out replies, drafter in use, new drafter) -> speed of the new drafter relative to the drafter in use,
with its 95% interval: {"value", "low", "high"}."""


def train_on_traffic(
    llm: LLM, key_folder: KeyFolder, drafter: str, job: TrainJob, compare: Compare | None = None
) -> dict[str, Any]:
    """Train a head on a key's traffic, and use it if it is faster. After an interruption, the same call continues.

    Args:
        llm: The target.
        key_folder: The folder with the traffic.
        drafter: Name of the drafter in use.
        job: Settings of the training. `train_on_traffic` sets its files and the head to start from.
        compare: Compares two drafters. None for `compare_by_replay`.

    Returns:
        The status, which is also written to the folder.

    Raises:
        PacelineError: If the traffic or the training fails.
    """
    key_folder.recover_head()
    if not key_folder.training_data.exists():
        key_folder.discard_training()
        _snapshot(llm, key_folder)
    recording = Recording(key_folder.training_data)
    if not holds_head(key_folder.new_head):
        train(
            llm,
            replace(job, out=key_folder.new_head, recording=key_folder.training_data, start=_start(llm, key_folder)),
        )
    held_out = [reply for reply in recording if is_held(reply)][-MAX_HELD_OUT:]
    gain = None
    if len(held_out) >= MIN_HELD_OUT:
        gain = (compare or compare_by_replay)(llm, held_out, drafter, f"suffix:remember+head:{key_folder.new_head}")
    switched = gain is not None and gain["low"] > 1.0
    if switched:
        key_folder.use_new_head()
    status = {
        "time": time.time(),
        "until": max(reply.started for reply in recording),
        "replies": len(recording),
        "tokens": recording.tokens,
        "held": len(held_out),
        "gain": gain,
        "switched": switched,
    }
    key_folder.write_status(status)
    key_folder.discard_training()
    return status


def _start(llm: LLM, key_folder: KeyFolder) -> Path | None:
    """Return the head to begin with. None if there is none, or it is damaged or belongs to another model."""
    if not holds_head(key_folder.head):
        return None
    try:
        fit_to_target(open_head(key_folder.head), llm.model)
    except (PacelineError, OSError):
        return None
    return key_folder.head


def _snapshot(llm: LLM, key_folder: KeyFolder) -> None:
    """Copy the traffic, so that training continues with the same replies after an interruption."""
    header, replies = header_of(llm.model), key_folder.replies()

    def write(path: Any) -> None:
        with Journal(path, 0o600) as journal:
            journal.append(header.as_dict())
            for reply in replies:
                journal.append(reply.as_dict())

    replace_with(key_folder.training_data, write)


def train_job(target: str, vocab_size: int, disk: int) -> TrainJob:
    """Return settings of a training run that a machine with a few cores can finish.

    Args:
        target: Name of the target.
        vocab_size: Size of its vocabulary.
        disk: Maximum bytes of hidden states.
    """
    vocabulary = _MAX_VOCABULARY if vocab_size > 2 * _MAX_VOCABULARY else None
    plan = TrainPlan(epochs=3.0, every=30.0)
    unused: Any = None
    return TrainJob(target, "eagle3", unused, vocabulary=vocabulary, cache=disk / 2**30, bits=4, plan=plan)


def compare_by_replay(llm: LLM, held_out: Sequence[RecordedReply], drafter: str, other: str) -> dict[str, float]:
    """Compare two drafters over recorded replies (see `Compare`), with prices measured on this machine."""
    predictor = Predictor(llm.model, measure_prices(llm.model, held_out[0], 1))
    old, new = (predictor.predict(Candidate(name), held_out).replay.reply_seconds for name in (drafter, other))
    return ratio_of_sums(old, new)
