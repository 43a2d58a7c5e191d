"""The target for the arguments of `paceline.load`: a model loaded by name, or a model object."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.checkpoints.adapters import Adapter
from paceline.checkpoints.checkpoint import eos_token_ids
from paceline.checkpoints.load_arguments import LoadArguments
from paceline.checkpoints.loader import Loaded, load_model
from paceline.errors import InvalidOption
from paceline.files.progress import progress_bar
from paceline.models.decoder import Decoder
from paceline.models.runner_choice import runner_of, suggest_codes, warn_of
from paceline.text.tokenizer import Tokenizer


def load_target(arguments: LoadArguments, adapters: Mapping[str, Adapter]) -> Loaded:
    """Load the target that `arguments` describe. Each request may use one of `adapters`. Raise the same errors as
    `load`."""
    model = arguments.model
    if isinstance(model, (str, Path)):
        if arguments.tokenizer is not None:
            raise InvalidOption(f"{model} brings its own tokenizer", "Give tokenizer=... with a model object only")
        loaded = load_model(
            model,
            adapter=arguments.adapter,
            adapters=adapters,
            dtype=arguments.dtype,
            device=arguments.device,
            device_map=arguments.device_map,
            quantize=arguments.quantize,
            kv_type=arguments.kv_type,
            revision=arguments.revision,
            token=arguments.token,
            allow_pickle=arguments.allow_pickle,
            progress=arguments.progress,
            exact=arguments.exact,
            tensor_parallel=arguments.tensor_parallel,
            mmproj=arguments.mmproj,
        )
        _advise(loaded, floats_chosen=(arguments.quantize, arguments.dtype) != ("auto", "auto"))
        return loaded
    placed = (arguments.dtype, arguments.device, arguments.revision, arguments.device_map, arguments.tensor_parallel)
    adapted = arguments.adapter is not None or bool(adapters)
    if arguments.kv_type != "auto":
        raise InvalidOption(
            "a model object keeps keys and values in its own dtype", "Leave kv_type out, or load the model by name"
        )
    _check_held(placed != ("auto", "auto", None, None, False), arguments.quantize not in ("auto", "none"), adapted)
    return _wrap(model, arguments.tokenizer, arguments.progress)


def _advise(loaded: Loaded, floats_chosen: bool) -> None:
    """Log, once, how the model could be made faster."""
    if isinstance(target := loaded.target, Decoder):
        warn_of(runner_of(target.device, target.dtype))
        if not floats_chosen:
            suggest_codes(loaded.path, target.device)


def _check_held(moved: bool, quantized: bool, adapted: bool) -> None:
    """Raise `InvalidOption` for options that work only with a model that is loaded by name, not with a model object."""
    if moved:
        raise InvalidOption("a model object keeps its dtype and device", "Convert the model object before loading it")
    if quantized:
        raise InvalidOption("a model object keeps its weights as they are", "Load the model by name to quantise it")
    if adapted:
        raise InvalidOption("an adapter cannot be added to a model object", "Give a PeftModel that has the adapter")


def _wrap(model: Any, tokenizer: Any, progress: bool) -> Loaded:
    """Wrap a model object of transformers or PEFT, and its tokenizer. See `paceline.load`."""
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
            f"model must be a name, a path or a model object, got {type(model).__name__}",
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
