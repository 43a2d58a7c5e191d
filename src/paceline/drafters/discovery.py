"""Search for a drafter among the models on this disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from paceline.checkpoints.checkpoint import open_checkpoint
from paceline.checkpoints.gguf_file import gguf_vocab_size
from paceline.checkpoints.head_files import holds_head, open_head, verifier_of
from paceline.checkpoints.head_fit import fingerprint, fit_to_target, same_target, vocabulary_of
from paceline.checkpoints.loader import Loaded
from paceline.checkpoints.registry import text_config
from paceline.errors import PacelineError
from paceline.files.reading import read_json
from paceline.files.schema import HEAD, IDENTITY
from paceline.files.stores import StoredModel, models_in, stored_models
from paceline.protocols import TargetWithHead

_LOG = logging.getLogger("paceline")
_MAX_SIZES_READ, _MAX_VOCABULARIES_READ = 1000, 32
"""Maximum number of models whose vocabulary size is read (1 ms each), and maximum number of models whose tokens are
compared (up to 0.5 s each)."""
_MAX_PADDING = 1 / 200
"""Relative difference between vocabulary sizes that padding may cause in models with the same tokenizer."""


def discover_drafter(target: Loaded) -> str | None:
    """Search this disk for the best learned drafter for a target. Return its name, or None if there is none.

    The first choice is a head that was trained for the target, in the folder that contains the target or in the cache
    of huggingface_hub. The second is the smallest model with the same vocabulary and at most half the target's size, in
    that folder or in a model store. For example, a 0.5B model made a 1.5B model write code 1.2 to 1.35 times as fast
    (benchmarks/results/2026-11-23-drafts.md).
    """
    nearby, stored = _models_nearby(target.path), stored_models(everything=True)
    reference = next(_heads(target, nearby, stored), None) or next(_smaller_models(target, [*nearby, *stored]), None)
    _LOG.debug("%s: found %s", target.path, reference or "no drafter with weights")
    return reference


def _models_nearby(path: Path) -> list[StoredModel]:
    try:
        return models_in(path.parent, subfolders=False)  # the parent may be a home directory
    except (PacelineError, OSError):
        return []


def _heads(target: Loaded, nearby: list[StoredModel], stored: list[StoredModel]) -> Iterator[str]:
    if not isinstance(target.target, TargetWithHead):
        return
    ours, names = "", {model.name for model in stored if model.path == target.path}
    for model in (*nearby, *(model for model in stored if model.store == "huggingface")):
        try:
            if not (model.path.is_dir() and holds_head(model.path)):
                continue
            config = read_json(model.path / "config.json", HEAD)
            if theirs := (config.get("paceline") or {}).get("fingerprint"):
                ours = ours or fingerprint(target)
                if same_target(ours, theirs):
                    yield f"head:{model.path}"
            elif verifier_of(config) in names:
                fit_to_target(open_head(model.path), target)
                yield f"head:{model.path}"
        except Exception:  # this search is optional, so a bad file in a store must not stop the target
            _LOG.debug("%s is not a drafter for this model", model.path, exc_info=True)


def _smaller_models(target: Loaded, models: list[StoredModel]) -> Iterator[str]:
    size = max((model.size for model in models if model.path == target.path), default=0) or _bytes_of(target.path)
    smaller = {model.path: model for model in models if 2 * model.size <= size}.values()
    rows, ours = target.target.vocab_size, None
    seen = islice(sorted(smaller, key=lambda model: model.size), _MAX_SIZES_READ)
    for model in islice((model for model in seen if _may_share_vocabulary(model.path, rows)), _MAX_VOCABULARIES_READ):
        try:
            tokenizer = open_checkpoint(model.path).tokenizer
        except Exception:  # a head, an unsupported model or a damaged file
            _LOG.debug("%s cannot be a draft model", model.path, exc_info=True)
            continue
        ours = ours or vocabulary_of(target.tokenizer)
        if vocabulary_of(tokenizer) == ours:
            yield f"model:{model.path}"


def _may_share_vocabulary(path: Path, rows: int) -> bool:
    """Return True if a model's vocabulary size allows that it has the same vocabulary as a target with `rows` rows.

    The result is also True if `config.json` does not state the size.
    """
    try:
        if path.is_file():
            found = gguf_vocab_size(path)
        else:
            found = text_config(read_json(path / "config.json", IDENTITY)).get("vocab_size") or rows
        return bool(abs(found - rows) <= _MAX_PADDING * rows)
    except Exception:  # a damaged file
        _LOG.debug("the vocabulary size of %s is unknown", path, exc_info=True)
        return False


def _bytes_of(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files if file.is_file())
