"""The target that the arguments of `paceline.load` describe: by name, or a model object."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from inspect import Signature
from pathlib import Path
from typing import Any

from paceline.checkpoints.adapters import Adapter
from paceline.checkpoints.checkpoint import eos_token_ids
from paceline.checkpoints.loader import Loaded, load_model
from paceline.errors import InvalidOption
from paceline.files.progress import progress_bar
from paceline.models.decoder import Decoder
from paceline.models.runner_choice import runner_of, suggest_codes, warn_of
from paceline.text.tokenizer import Tokenizer

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "fast": {"quantize": "int4"},
    "low-memory": {"quantize": "int4", "drafter": "suffix"},
    "exact": {"quantize": "none", "exact": True},
}
"""Name -> what `load` takes instead of its defaults."""


def with_preset(name: str, given: Mapping[str, Any], of: Signature) -> dict[str, Any]:
    """Return the arguments of `load`, with a preset's where the default of its signature was left. Raises
    `InvalidOption`."""
    if name not in PRESETS:
        raise InvalidOption(f"preset {name!r} is unknown", f"Choose from {', '.join(PRESETS)}")
    defaults = {key: option.default for key, option in of.parameters.items()}
    preset = {key: value for key, value in PRESETS[name].items() if given[key] == defaults[key]}
    return {**given, **preset, "preset": None}


def load_target(given: Mapping[str, Any], adapters: Mapping[str, Adapter]) -> Loaded:
    """Load the target that all arguments of `paceline.load` describe, with `adapters` beside it; raises as `load`."""
    model, tokenizer, quantize = given["model"], given["tokenizer"], given["quantize"]
    if isinstance(model, (str, Path)):
        if tokenizer is not None:
            raise InvalidOption(f"{model} brings its own tokenizer", "Give tokenizer=... with a model object only")
        loaded = load_model(model, adapters=adapters, **{name: given[name] for name in _NAMED_ONLY})
        _advise(loaded, floats_chosen=(quantize, given["dtype"]) != ("auto", "auto"))
        return loaded
    placed = [given[name] for name in ("dtype", "device", "revision", "device_map", "tensor_parallel")]
    adapted = given["adapter"] is not None or bool(adapters)
    _check_held(placed != ["auto", "auto", None, None, False], quantize not in ("auto", "none"), adapted)
    return _wrap(model, tokenizer, given["progress"])


_NAMED_ONLY = (
    *("adapter", "device", "device_map", "dtype", "exact", "quantize", "revision", "tensor_parallel"),
    *("allow_pickle", "progress", "token"),
)
"""Arguments that are of no use to a model object, or are refused."""


def _advise(loaded: Loaded, floats_chosen: bool) -> None:
    """Say once what would make the model faster."""
    if isinstance(target := loaded.target, Decoder):
        warn_of(runner_of(target.device, target.dtype))
        if not floats_chosen:
            suggest_codes(loaded.path, target.device)


def _check_held(moved: bool, quantized: bool, adapted: bool) -> None:
    """Raise `InvalidOption` for what is asked of a model object and only a model loaded by name can do."""
    if moved:
        raise InvalidOption("a model object keeps its dtype and device", "Convert it before you hand it over")
    if quantized:
        raise InvalidOption("a model object keeps its weights as they are", "Quantise models loaded by name only")
    if adapted:
        raise InvalidOption("an adapter cannot be added to a model object", "Give a PeftModel with its adapters")


def _wrap(model: Any, tokenizer: Any, progress: bool) -> Loaded:
    """Wrap a model object of transformers, or of PEFT around one, and its tokenizer; see `paceline.load`."""
    wrappable, wrapper = False, None
    if type(model).__module__.startswith("peft."):
        from peft import PeftModel

        if isinstance(model, PeftModel):
            wrapper, model = model, model.get_base_model()
    if find_spec("transformers"):
        from transformers import PreTrainedModel
        from transformers.generation import GenerationMixin

        wrappable = isinstance(model, PreTrainedModel) and isinstance(model, GenerationMixin)
    if not wrappable:
        raise InvalidOption(
            f"model is a {type(model).__name__}",
            "Give the name or path of a model, or a PreTrainedModel of transformers with a causal head, or one of PEFT",
        )
    if tokenizer is None:
        raise InvalidOption(
            f"{type(model).__name__} comes without a tokenizer",
            "Give tokenizer=transformers.AutoTokenizer.from_pretrained(...)",
        )
    from paceline.models.transformers import CausalLM

    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.from_transformers(tokenizer)
    generation = {key: value for key, value in model.generation_config.to_dict().items() if value is not None}
    eos = eos_token_ids(model.config.to_dict(), generation, tokenizer)
    with progress_bar(f"checking how {type(model).__name__} verifies drafts", progress):
        target = CausalLM(model, wrapper)
    return Loaded(target, tokenizer, eos, generation, Path(model.name_or_path))
