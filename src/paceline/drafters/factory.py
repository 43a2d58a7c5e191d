"""Drafters by name:

none                          no drafter
auto                          the default: `AUTO`, then the model's own MTP layer if it has one
found                         `AUTO`, then the best drafter on this disk (see `discovery.py`)
suffix, suffix:remember       repetitions in this text, or also of earlier replies
ngram                         prompt lookup
model:REF                     a draft model, which may have another tokenizer
eagle3, medusa, block         the head of this kind that comes with Paceline for the target
mtp, mtp:REF                  the multi-token-prediction layer in the target's own files, or in other files
assistant:REF                 a Gemma 4 assistant, which reads the target's keys and values
eagle3:REF, ..., head:REF     a head checkpoint; `head` accepts any kind
early-exit                    the exit that comes with Paceline, or half of the target's layers
early-exit:LAYERS or REF      this number of the target's first layers, or a trained exit
early-exit@P, ...:LAYERS@P    the same, but a chain stops if the exit's highest probability is below P (default 0.5)
A+B+C                         the first of these that can draft; a reference must come last and may contain "+"
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.head_fit import as_host, fit_to_target, shipped_head, sizes_of, vocabulary_of
from paceline.checkpoints.load_arguments import LoadArguments
from paceline.checkpoints.loader import Loaded, load_model
from paceline.checkpoints.lora import split_adapter
from paceline.drafters.base import Drafter
from paceline.drafters.cross import cross_vocabulary_drafter
from paceline.drafters.discovery import discover_drafter
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import DrafterStack
from paceline.drafters.suffix import Suffix
from paceline.drafters.trimmed import DraftVocab, head_tokens
from paceline.errors import HeadMismatch, InvalidOption, PacelineError
from paceline.kernels.linear import takes_stored
from paceline.kernels.quantize import Precision, check_precision
from paceline.models.heads import EagleConfig, ExitConfig, HeadConfig, HeadFile, kind_of
from paceline.models.lazy import Quantised, mostly_codes
from paceline.types import DraftBudget

_LOG = logging.getLogger("paceline")

MadeT = TypeVar("MadeT")
DraftModelLoader = Callable[[str], Loaded]
HeadOpener = Callable[[str | Path], HeadFile]
Options = Mapping[str, float]
"""The options that a drafter's name can set. Only early exit has an option, `threshold`."""

_LOOKUPS: dict[str, Callable[[], Drafter]] = {
    "suffix": Suffix,
    "suffix:remember": partial(Suffix, remember=True),
    "ngram": NGram,
}
"""Name -> a function that makes a drafter without weights."""

AUTO = "suffix"
"""The drafter that "auto" asks first. It has no weights, and costs nothing if it has nothing to propose. Learned
drafters are faster on some texts and slower on others (benchmarks/results/2026-11-25-never-slower-zen4.md)."""

FOUND = "found"
"""The name of the best drafter on this disk (see `resolve_spec`)."""

_CLASSES = {
    "eagle": "paceline.drafters.eagle:Eagle",
    "eagle3": "paceline.drafters.eagle:Eagle",
    "mtp": "paceline.drafters.eagle:Eagle",
    "peagle": "paceline.drafters.parallel:ParallelEagle",
    "medusa": "paceline.drafters.medusa:Medusa",
    "block": "paceline.drafters.block:Block",
    "exit": "paceline.drafters.early_exit:EarlyExit",
    "assistant": "paceline.drafters.assistant:Assistant",
}
"""Kind of head (`heads.kind_of`) -> drafter class. Its arguments are config, tensors and target."""

_KINDS = {
    "eagle3": "eagle3",
    "mtp": "mtp",
    "medusa": "medusa",
    "block": "block",
    "assistant": "assistant",
    "early-exit": "exit",
}
"""Name -> the kind of head that it stands for."""

_REFERENCE = re.compile(
    r"(?:^|\+)\s*((?:model|eagle3|mtp|medusa|block|assistant|head|early-exit(?!:\d+(?:@[\d.]+)?\s*(?:\+|$))):)"
)
"""Matches a name that a reference follows. The reference extends to the end of the spec."""


def make_drafter(
    spec: str | Drafter | None, target: Loaded, load: DraftModelLoader, read: HeadOpener = open_head
) -> Drafter | None:
    """Make a drafter by name.

    Args:
        spec: A name (see the module's docstring), a drafter, which is returned as it is, or None.
        target: The target.
        load: Loads a draft model.
        read: Opens a head checkpoint.

    Returns:
        The drafter. None for None and "none".

    Raises:
        InvalidOption: If the name is unknown or does not apply to this target.
        TokenizerMismatch: If the tokenizers differ and one of them has no tokens that stand for text.
        HeadMismatch: If the head has another kind or belongs to another target.
    """
    if spec is None or spec == "none":
        return None
    if isinstance(spec, Drafter):
        return spec

    def make(name: str) -> Drafter:
        parts = [_make(part, target, load, read) for part in _split(name)]
        return parts[0] if len(parts) == 1 else DrafterStack(parts)

    return _resolve_and_make(spec, target, make)[1]


def _resolve_and_make(spec: str, target: Loaded, make: Callable[[str], MadeT]) -> tuple[str, MadeT]:
    """Return the full name of a drafter (see `resolve_spec`), and the drafter that `make` builds for that name.

    For "auto", an MTP layer that does not work is skipped with a warning.
    """
    name = resolve_spec(spec, target)
    try:
        return name, make(name)
    except PacelineError as error:
        if spec != "auto" or name == AUTO:
            raise
        _LOG.warning("%s: the model's own MTP layer is not used for drafting: %s", target.path, error)
        return AUTO, make(AUTO)


def resolve_spec(spec: str, target: Loaded) -> str:
    """Return the full name of the drafter that "auto" or "found" stands for. Return other names unchanged.

    Both stand for `AUTO`, followed by a learned drafter if there is one: the target's own MTP layer, or, for "found"
    only, a drafter on this disk.
    """
    if spec not in (FOUND, "auto"):
        return spec
    reference = "mtp" if shipped_head("mtp", target) else discover_drafter(target) if spec == FOUND else None
    return f"{AUTO}+{reference}" if reference else AUTO


def open_drafter(
    spec: str | Drafter | None,
    target: Loaded,
    quantize: Precision = "auto",
    read: Callable[..., Loaded] | None = None,
    head: HeadOpener = open_head,
    draft_vocab: DraftVocab = "auto",
) -> Drafter | None:
    """Make a drafter by name, with options for its weights.

    Args:
        spec: See `make_drafter`.
        target: The target.
        quantize: Precision of the drafter's weights.
        read: Loads a draft model. None to use `load_model` with the target's device.
        head: Opens a head checkpoint.
        draft_vocab: Tokens that output heads score (see `DraftVocab`).

    Returns:
        The drafter. None for None and "none".

    Raises:
        PacelineError: See `make_drafter`, `load_model` and `open_head`.
    """
    device: Any = target.target.device.type
    open_model = read or partial(load_model, device=device)

    choose = partial(head_tokens, draft_vocab, target)

    def load_draft(reference: str) -> Loaded:
        base, merged = split_adapter(reference)
        return open_model(base, adapter=merged, quantize=quantize, head_tokens=choose)

    def read_head(reference: str | Path) -> HeadFile:
        found = head(reference)
        if isinstance(found.config, EagleConfig) and "d2t" not in found.tensors:
            kept = choose(target.tokenizer, target.target.vocab_size)
            found = replace(found, config=replace(found.config, head_tokens=kept))
        mode = "int4" if quantize == "auto" and _takes_codes(found, target) else quantize
        return replace(found, tensors=Quantised(found.tensors, mode)) if mode in ("int8", "int4") else found

    return make_drafter(spec, target, load_draft, read_head)


def _takes_codes(head: HeadFile, target: Loaded) -> bool:
    """Return True if a head's weights are quantised by default.

    This is the case if its file stores them quantised, or if it is an EAGLE head or MTP layer of a quantised target.
    The device must have kernels for quantised weights.
    """
    host = as_host(target)
    coded = mostly_codes(head.tensors) or (target.quantize is not None and isinstance(head.config, EagleConfig))
    return coded and host.dtype != torch.float64 and takes_stored(host.dtype, True, host.device)


def open_drafters(
    given: str | Drafter | Sequence[str] | None,
    more: Sequence[str],
    target: Loaded,
    opened: Callable[[str], Drafter | None],
) -> Drafter | dict[str, Drafter] | None:
    """Open one or several drafters.

    Args:
        given: Names of drafters, or one drafter.
        more: Names of additional drafters.
        target: The target.
        opened: Opens a drafter by name.

    Returns:
        Name -> drafter, in the given order, without "none". If `given` is a drafter and `more` is empty, the drafter
        itself.
    """
    specs = [given] if isinstance(given, str) else [] if given is None or isinstance(given, Drafter) else given
    chosen = [_resolve_and_make(spec, target, opened) for spec in dict.fromkeys((*specs, *more))]
    found = {spec_name(name): drafter for name, drafter in chosen if drafter}
    if isinstance(given, Drafter):
        return {type(given).__name__: given, **found} if found else given
    return found


def load_drafters(arguments: LoadArguments, more: Sequence[str], target: Loaded) -> Drafter | dict[str, Drafter] | None:
    """Load the drafters named in `arguments.drafter`, and additional drafters named in `more` (see `open_drafters`)."""
    read = partial(
        load_model,
        dtype=arguments.dtype,
        device=arguments.device,
        device_map=arguments.draft_device_map,
        revision=arguments.draft_revision,
        token=arguments.token,
        allow_pickle=arguments.allow_pickle,
        progress=arguments.progress,
    )
    head = partial(
        open_head,
        revision=arguments.draft_revision,
        token=arguments.token,
        allow_pickle=arguments.allow_pickle,
        quiet=not arguments.progress,
    )
    opened = partial(
        open_drafter,
        target=target,
        quantize=arguments.draft_quantize,
        read=read,
        head=head,
        draft_vocab=arguments.draft_vocab,
    )
    return open_drafters(arguments.drafter, more, target, opened)


def spec_name(spec: str) -> str:
    """Return the name of a drafter in statistics: `spec`, with "auto" replaced by `AUTO`."""
    return "+".join(AUTO if part == "auto" else part for part in _split(spec))


def check_spec(spec: str | Drafter | None) -> None:
    """Check the name of a drafter before anything is loaded.

    Raises:
        InvalidOption: If `spec` is neither the name of a drafter, nor a drafter, nor None.
    """
    if not isinstance(spec, (str, Drafter, type(None))):
        raise InvalidOption(
            f"drafter={spec!r:.80} is a {type(spec).__name__}",
            "Pass a name, a paceline.Drafter (an object, not its class) or None",
        )
    if isinstance(spec, str) and spec not in ("none", FOUND):
        for part in _split(spec):
            _check_name(part)


def check_specs(spec: str | Drafter | list[str] | None, mode: str) -> None:
    """Check the names of one or several drafters, and their precision, before anything is loaded.

    Args:
        spec: See `check_spec`.
        mode: The option `draft_quantize`.

    Raises:
        InvalidOption: If a name or the mode is unknown, or if the mode needs weights and no drafter has weights.
    """
    specs = spec if isinstance(spec, list) else [spec]
    for one in specs:
        check_spec(one)
    check_precision(mode, "draft_quantize")
    named = [part for one in specs if isinstance(one, str) for part in _split(one)]
    if mode in ("int8", "int4") and all(part in (*_LOOKUPS, "auto", "none") for part in named):
        shown = "+".join(one if isinstance(one, str) else type(one).__name__ for one in specs)
        raise InvalidOption(
            f"the drafter {shown} has no weights to read as {mode}",
            "Omit draft_quantize. To quantise the target, use quantize",
        )


def _check_name(part: str) -> None:
    part, _ = _split_threshold(part)
    name, _, reference = part.partition(":")
    named = bool(reference) and (name in _KINDS or name in ("model", "head"))
    if part != "auto" and part not in _LOOKUPS and part not in _KINDS and not named:
        learned = [*_KINDS, *(f"{name}:REF" for name in _KINDS), "early-exit:LAYERS", "head:REF"]
        known = ", ".join(["none", "auto", FOUND, *_LOOKUPS, "model:REF", *learned])
        raise InvalidOption(f"no drafter is called {part!r}", f"Available: {known}. Combine drafters with '+'")


def _split(spec: str) -> list[str]:
    """Split a spec at each "+" that is not part of a reference."""
    found = _REFERENCE.search(spec)
    if not found:
        return [part.strip() for part in spec.split("+")]
    before = spec[: found.start()].split("+") if found.start() else []
    return [*(part.strip() for part in before), spec[found.start(1) :]]


def _split_threshold(part: str) -> tuple[str, dict[str, float]]:
    """Split `early-exit...@P` into the name and its threshold, if it has one. Raise `InvalidOption` if the threshold is
    not valid."""
    found = re.fullmatch(r"(early-exit(?::.+)?)@(\d+(?:\.\d*)?|\.\d+)", part)
    if not found:
        return part, {}
    if (threshold := float(found[2])) > 1:
        raise InvalidOption(f"the threshold of {part!r} must be 0 to 1", "Write, for example, early-exit:8@0.7")
    return found[1], {"threshold": threshold}


def _make(part: str, target: Loaded, load: DraftModelLoader, read: HeadOpener) -> Drafter:
    _check_name(part)
    part, options = _split_threshold(part)
    if part == "auto":
        part = AUTO
    if part in _LOOKUPS:
        return _LOOKUPS[part]()
    name, _, reference = part.partition(":")
    if name == "model":
        loaded = load(reference)
        # Compare the tokens themselves, because different tokenizers may have the same number of tokens.
        if vocabulary_of(target.tokenizer) != vocabulary_of(loaded.tokenizer):
            return cross_vocabulary_drafter(target, loaded, part)
        return DraftModel(loaded.target, target.target.vocab_size, loaded.head_tokens)
    if name == "early-exit" and (reference.isdecimal() or not reference):
        return _early_exit(reference, target, read, options)
    path = reference or shipped_head(_KINDS[name], target)
    if path is None:
        missing = (
            "the files of {} hold no MTP layer" if name == "mtp" else f"no {name} head for {{}} comes with Paceline"
        )
        raise InvalidOption(missing.format(target.path), f"Name a folder that holds one: {name}:FOLDER")
    head = read(path)
    kind = kind_of(head.config)
    if name != "head" and _KINDS[name] != kind:
        raise HeadMismatch(f"{reference} holds a head of kind {kind}, not {_KINDS[name]}", f"Use head:{reference}")
    fitted = fit_to_target(head, target)
    return _with_head(fitted.config, fitted.tensors, target, options)


def _with_head(config: HeadConfig, tensors: Mapping[str, Tensor], target: Loaded, options: Options) -> Drafter:
    module, _, name = _CLASSES[kind_of(config)].partition(":")
    made: Drafter = getattr(import_module(module), name)(config, tensors, as_host(target), **options)
    return made


def _early_exit(layers: str, target: Loaded, read: HeadOpener, options: Options) -> Drafter:
    """Return a drafter that exits after `layers` layers. If `layers` is "", use the exit that comes with Paceline, or
    half of the layers."""
    if not layers and (path := shipped_head("exit", target)):
        head = fit_to_target(read(path), target)
        return _with_head(head.config, head.tensors, target, options)
    sizes = sizes_of(target)
    count = int(layers) if layers else max(1, sizes.layers // 2)
    if not 0 < count < sizes.layers:
        raise InvalidOption(
            f"early-exit:{count} is not possible in a model of {sizes.layers} layers",
            f"Use 1 to {sizes.layers - 1}" if sizes.layers > 1 else "Use another drafter",
        )
    return _with_head(ExitConfig(sizes.hidden, count), {}, target, options)


def parse_budget(text: str) -> DraftBudget | None:
    """Parse a draft size, LENGTH or NODESxDEPTHxBRANCH.

    Returns:
        The budget, or None if the text has another form.

    Raises:
        InvalidOption: If a number is out of range.
    """
    if not re.fullmatch(r"[0-9]{1,9}(x[0-9]{1,9}x[0-9]{1,9})?", text):
        return None
    length, *tree = map(int, text.split("x"))
    return DraftBudget(length, *tree) if tree else DraftBudget.chain(length)


def to_tree(draft: int | DraftBudget | Literal["auto"]) -> DraftBudget | None:
    """Convert the option `draft` to a budget.

    Args:
        draft: A draft length, a budget, or "auto".

    Returns:
        The budget, or None for "auto".

    Raises:
        InvalidOption: If `draft` is anything else, or if the length is out of range.
    """
    if isinstance(draft, DraftBudget):
        return draft
    if draft == "auto":
        return None
    if isinstance(draft, bool) or not isinstance(draft, int):
        raise InvalidOption(f"draft={draft!r} is not possible", 'Use a length, a paceline.DraftBudget or "auto"')
    return DraftBudget.chain(draft)
