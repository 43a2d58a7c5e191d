"""Loads vision towers, which are transformers' own modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.utils import logging

from paceline.errors import CorruptModel, UnsupportedModel, install_line
from paceline.files.reading import library_errors
from paceline.vision.family import Tower, VisionFamily

_FETCH_AGAIN = "Fetch the model again"


def load_tower(
    family: VisionFamily,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    settings: Path | Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> Tower:
    """Load a vision tower. `Vision` describes the arguments.

    Raises:
        UnsupportedModel: If the installed transformers does not have the model.
        CorruptModel: If config, settings and tensors do not fit each other.
    """
    with silence_transformers(), library_errors("the vision tower cannot be loaded", _FETCH_AGAIN):
        own = transformers.AutoConfig.for_model(**config)
        shape = own.get_text_config()
        # The language model runs elsewhere, so make transformers' language model as small as possible.
        shape.num_hidden_layers, shape.vocab_size, shape.pad_token_id = 0, 1, None
        if getattr(shape, "layer_types", None):
            shape.layer_types = []
        if getattr(own, "audio_config", None):
            own.audio_config = None
        names = [name for name in tensors if name.startswith(family.tensors)]
        model, report = _class(family.model).from_pretrained(
            None,
            config=own,
            state_dict={name: tensors[name] for name in names},
            dtype=dtype,
            output_loading_info=True,
        )
        missing = [name for name in report["missing_keys"] if not name.startswith(family.language)]
        if missing or report["unexpected_keys"]:
            one = min([*missing, *report["unexpected_keys"]])
            raise CorruptModel(
                f"the vision tower's tensor {one} is {'missing' if missing else 'unknown'}", _FETCH_AGAIN
            )
        setattr(model, family.language, None)
        processor = _processor(family, settings)
    return Tower(model.eval().to(device), processor, own)


def _processor(family: VisionFamily, settings: Path | Mapping[str, Any]) -> Any:
    if not isinstance(family.processor, str):
        return family.processor(settings)
    kind = _class(family.processor)
    return kind.from_pretrained(settings) if isinstance(settings, Path) else kind(**settings)


def _class(name: str) -> Any:
    """Return a class of transformers."""
    found = getattr(transformers, name, None)
    if found is None or getattr(found, "is_dummy", False):
        raise UnsupportedModel(f"transformers {transformers.__version__} has no {name} here", install_line("vision"))
    return found


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Suppress transformers' messages about the language model, which is missing on purpose."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
