"""From what a user writes to a drafter."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from paceline.checkpoints.head_files import open_head
from paceline.checkpoints.head_fit import fits, host_of, shipped, sizes_of, words_of
from paceline.checkpoints.loader import Loaded, load_model
from paceline.checkpoints.lora import split_adapter
from paceline.drafters.cross import cross
from paceline.drafters.model import DraftModel
from paceline.drafters.ngram import NGram
from paceline.drafters.stack import DrafterStack
from paceline.drafters.suffix import Suffix
from paceline.errors import HeadMismatch, InvalidOption
from paceline.kernels.quantize import Mode, check_mode
from paceline.models.heads import ExitConfig, HeadConfig, HeadFile, kind_of
from paceline.models.lazy import Quantised
from paceline.protocols import Drafter
from paceline.types import DraftBudget

DraftModelLoader = Callable[[str], Loaded]
HeadOpener = Callable[[str | Path], HeadFile]

_BARE: dict[str, Callable[[], Drafter]] = {
    "suffix": Suffix,
    "suffix:remember": lambda: Suffix(remember=True),
    "ngram": NGram,
}

AUTO = "suffix"
"""What "auto" means: it has no weights to fetch, and costs nothing while it has nothing to propose. Learned drafters
gain more on some texts and lose on others (LOG.md, benchmarks/results/2026-11-22-never-slower.md)."""

_LEARNED = {
    "eagle": "paceline.drafters.eagle:Eagle",
    "eagle3": "paceline.drafters.eagle:Eagle",
    "medusa": "paceline.drafters.medusa:Medusa",
    "block": "paceline.drafters.block:Block",
    "exit": "paceline.drafters.early_exit:EarlyExit",
}
"""Kind of head (`heads.kind_of`) -> the drafter that runs it, as (config, tensors, host)."""

_HEADS = {"eagle3": "eagle3", "medusa": "medusa", "block": "block", "early-exit": "exit"}
"""Name -> kind of head. Alone it means the one that comes with Paceline, with a reference the one that is there."""

_REFERENCE = re.compile(r"(?:^|\+)\s*((?:model|eagle3|medusa|block|head|early-exit(?!:\d+\s*(?:\+|$))):)")
"""What a reference follows, which goes on to the end."""


def make_drafter(
    spec: str | Drafter | None, target: Loaded, load: DraftModelLoader, read: HeadOpener = open_head
) -> Drafter | None:
    """`spec` as in `paceline.load`; `load` reads draft models, `read` heads.

    Raises `InvalidOption` for an unknown one, `TokenizerMismatch`, `HeadMismatch`, and what reading raises.
    """
    if spec is None or spec == "none":
        return None
    if isinstance(spec, Drafter):
        return spec
    parts = [_make(part, target, load, read) for part in _split(spec)]
    return parts[0] if len(parts) == 1 else DrafterStack(parts)


def open_drafter(
    spec: str | Drafter | None,
    target: Loaded,
    quantize: Mode | None = None,
    read: Callable[..., Loaded] | None = None,
    head: HeadOpener = open_head,
) -> Drafter | None:
    """`make_drafter`, with all weights read by `read` (as `load_model`; without it onto the target's device) and by
    `head`, and held as `quantize` says."""
    onto: Any = target.target.device.type
    open_model = read or partial(load_model, device=onto)

    def load_draft(reference: str) -> Loaded:
        base, merged = split_adapter(reference)
        return open_model(base, adapter=merged, quantize=quantize)

    def read_head(reference: str | Path) -> HeadFile:
        found = head(reference)
        return replace(found, tensors=Quantised(found.tensors, quantize)) if quantize else found

    return make_drafter(spec, target, load_draft, read_head)


def spec_name(spec: str) -> str:
    """What a drafter is called in statistics: as it was asked for, with the drafter that "auto" stands for."""
    return "+".join(AUTO if part == "auto" else part for part in _split(spec))


def check_spec(spec: str | Drafter | None) -> None:
    """Raises `InvalidOption` for what means no drafter, before anything is loaded."""
    if not isinstance(spec, (str, Drafter, type(None))):
        raise InvalidOption(
            f"drafter={spec!r:.80} is a {type(spec).__name__}",
            "Give a name, a paceline.Drafter (an object, not its class) or None",
        )
    if isinstance(spec, str) and spec != "none":
        for part in _split(spec):
            _check_name(part)


def check_specs(spec: str | Drafter | list[str] | None, mode: str | None) -> None:
    """`check_spec` of one or of several, and `check_draft_mode` of all of them."""
    if isinstance(spec, list):
        for one in spec:
            check_spec(one)
        spec = "+".join(spec)
    check_spec(spec)
    check_draft_mode(mode, spec)


def check_draft_mode(mode: str | None, spec: str | Drafter | None) -> None:
    """Raises `InvalidOption` for an unknown `draft_quantize`, and for a drafter without weights to read."""
    check_mode(mode, "draft_quantize")
    bare = spec is None or isinstance(spec, Drafter) or all(part in (*_BARE, "auto", "none") for part in _split(spec))
    if mode and bare:
        raise InvalidOption(
            f"the drafter {spec if isinstance(spec, str) else type(spec).__name__} has no weights to read as {mode}",
            "Leave draft_quantize out; `quantize` is the target's",
        )


def _check_name(part: str) -> None:
    name, _, reference = part.partition(":")
    named = bool(reference) and (name in _HEADS or name in ("model", "head"))
    if part != "auto" and part not in _BARE and part not in _HEADS and not named:
        learned = [*_HEADS, *(f"{name}:REF" for name in _HEADS), "early-exit:LAYERS", "head:REF"]
        known = ", ".join(["none", "auto", *_BARE, "model:REF", *learned])
        raise InvalidOption(f"no drafter is called {part!r}", f"There are {known}, and several joined by '+'")


def _split(spec: str) -> list[str]:
    """At "+", but not inside a reference, which may hold one: it comes last."""
    found = _REFERENCE.search(spec)
    if not found:
        return [part.strip() for part in spec.split("+")]
    before = spec[: found.start()].split("+") if found.start() else []
    return [*(part.strip() for part in before), spec[found.start(1) :]]


def _make(part: str, target: Loaded, load: DraftModelLoader, read: HeadOpener) -> Drafter:
    _check_name(part)
    if part == "auto":
        part = AUTO
    if part in _BARE:
        return _BARE[part]()
    name, _, reference = part.partition(":")
    if name == "model":
        loaded = load(reference)
        # Tokenizers are compared by their tokens, not by how many there are.
        if words_of(target) != words_of(loaded):
            return cross(target, loaded, part)
        return DraftModel(loaded.target, target.target.vocab_size)
    if name == "early-exit" and (reference.isdecimal() or not reference):
        return _early_exit(reference, target, read)
    head = read(reference or _shipped(name, target))
    kind = kind_of(head.config)
    if name != "head" and _HEADS[name] != kind:
        raise HeadMismatch(f"{reference} holds a head of kind {kind}, not {_HEADS[name]}", f"Write head:{reference}")
    return _learned(fits(head, target), target)


def _learned(head: HeadFile, target: Loaded) -> Drafter:
    return _drafter(head.config, head.tensors, target)


def _drafter(config: HeadConfig, tensors: Any, target: Loaded) -> Drafter:
    module, _, name = _LEARNED[kind_of(config)].partition(":")
    made: Drafter = getattr(import_module(module), name)(config, tensors, host_of(target))
    return made


def _early_exit(layers: str, target: Loaded, read: HeadOpener) -> Drafter:
    """After so many layers, through the target's own norm and head; "" means the adapter that comes with Paceline, or
    half of the target."""
    if not layers and (path := shipped("exit", target)):
        return _learned(fits(read(path), target), target)
    sizes = sizes_of(target)
    count = int(layers) if layers else max(1, sizes.layers // 2)
    if not 0 < count < sizes.layers:
        raise InvalidOption(
            f"early-exit:{count} is not possible in a model of {sizes.layers} layers",
            f"Give 1 to {sizes.layers - 1}",
        )
    return _drafter(ExitConfig(sizes.hidden, count), {}, target)


def _shipped(name: str, target: Loaded) -> Path:
    path = shipped(_HEADS[name], target)
    if path is None:
        raise InvalidOption(
            f"no {name} head for {target.path} comes with Paceline", f"Name one that you have: {name}:FOLDER"
        )
    return path


def to_tree(draft: int | DraftBudget | Literal["auto"]) -> DraftBudget | None:
    """A draft length, a tree, or None for "auto". Raises `InvalidOption`."""
    if isinstance(draft, DraftBudget):
        return draft
    if draft == "auto":
        return None
    if isinstance(draft, bool) or not isinstance(draft, int):
        raise InvalidOption(f"draft={draft!r} is not possible", 'Give a length, a paceline.DraftBudget or "auto"')
    return DraftBudget.chain(draft)
