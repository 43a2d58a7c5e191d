"""The drafter for a target among the models on this disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from paceline.checkpoints.checkpoint import open_checkpoint
from paceline.checkpoints.head_files import holds_head
from paceline.checkpoints.head_fit import fingerprint, same_target, vocabulary_of
from paceline.checkpoints.loader import Loaded
from paceline.errors import PacelineError
from paceline.files.reading import read_json
from paceline.files.schema import HEAD
from paceline.files.stores import StoredModel, models_in, stored_models
from paceline.protocols import TargetWithHead

_MOST = 8
"""Models whose vocabulary is compared: reading one takes up to half a second."""


def found_reference(target: Loaded) -> str | None:
    """Return the name of the best drafter with weights for a target that is on this disk, or None.

    A head that was trained for it and lies in the folder of the target; else the smallest model, at most half its size,
    with the same vocabulary, in that folder or in a store (a 0.5B model made a 1.5B model write code 1.2 to 1.35 times
    as fast: benchmarks/results/2026-11-23-drafts.md).
    """
    beside = _beside(target.path)
    reference = next(_heads(target, beside), None) or next(_siblings(target, beside), None)
    logging.getLogger("paceline").debug("%s: found %s", target.path, reference or "no drafter with weights")
    return reference


def _beside(path: Path) -> list[StoredModel]:
    try:
        return models_in(path.parent, subfolders=False)  # that may be a whole home
    except (PacelineError, OSError):
        return []


def _heads(target: Loaded, beside: list[StoredModel]) -> Iterator[str]:
    ours = ""
    for model in beside:
        try:
            if not (isinstance(target.target, TargetWithHead) and model.path.is_dir() and holds_head(model.path)):
                continue
            theirs = (read_json(model.path / "config.json", HEAD).get("paceline") or {}).get("fingerprint")
            ours = ours or fingerprint(target)
            if theirs and same_target(ours, theirs):
                yield f"head:{model.path}"
        except (PacelineError, ValueError, OSError):
            continue


def _siblings(target: Loaded, beside: list[StoredModel]) -> Iterator[str]:
    size = sum(model.size for model in beside if model.path == target.path) or _bytes_of(target.path)
    smaller = {model.path: model for model in (*beside, *stored_models(everything=True)) if 2 * model.size <= size}
    ours = None
    for model in islice(sorted(smaller.values(), key=lambda model: model.size), _MOST):
        try:
            tokenizer = open_checkpoint(model.path).tokenizer
        except (PacelineError, OSError):
            continue  # a head, or a model that does not run here
        ours = ours or vocabulary_of(target.tokenizer)
        if vocabulary_of(tokenizer) == ours:
            yield f"model:{model.path}"


def _bytes_of(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files if file.is_file())
