"""PEFT's LoRA adapters, merged into the tensors of their base model when those are read.

W' = W + s B A with s = alpha / r (Hu et al. 2021), alpha / sqrt(r) where rank-stabilised (Kalajdzievski 2023). DoRA
(Liu et al. 2024) then scales each output of W' to a norm of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.checkpoint import EMBEDDING, HEAD, Checkpoint, open_checkpoint, open_weights
from paceline.checkpoints.registry import family_of, ties_head
from paceline.checkpoints.tensor_names import module_name
from paceline.errors import AdapterMismatch, CorruptModel, InvalidOption, ModelNotFound, UnsupportedModel
from paceline.files.locate import ADAPTER_CONFIG, is_adapter, resolve
from paceline.files.reading import library_errors, read_json
from paceline.files.schema import ADAPTER, shown
from paceline.kernels.quantize import Codes
from paceline.kernels.stored import Stored
from paceline.models.lazy import LazyTensors, codes_of, shape_of, stored_of
from paceline.text.tokenizer import Tokenizer

_PREFIX = "base_model.model."
_AGAIN = "Fetch the adapter again"

_PART = re.compile(r"(.+)\.(lora_(?:embedding_)?[AB]|lora_magnitude_vector)((?:\.[^.]+){0,2})")
"""Module, part, and rest: an adapter's name ("default") in some files, "weight" or "bias" in most."""

_MAX_COSTS, _LONGEST_PATTERN = 3, 256
"""Limits on groups and repetitions in a pattern, and on its length: the time to match grows with powers of these."""

_WRAPPED = re.compile(r"\.(?:base_layer|modules_to_save(?:\.default)?)(?=\.[^.]+$)")
"""Names that PEFT inserts between a wrapped module and its tensors."""

_VARIANTS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)
"""Entries of adapter_config.json that, when set, make the merge differ from W + s B A."""

_REBASED = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Initialisations that also change the base model's weights, which the adapter's file does not hold."""

Patterns = tuple[tuple[re.Pattern[str], float], ...]
"""Patterns of module names with their values; the first match counts."""


class MergeRules:
    """Merge settings of the adapter_config.json in a folder."""

    def __init__(self, path: Path) -> None:
        """Raises `UnsupportedModel` for other kinds of adapter, `CorruptModel` for a damaged config."""
        raw = read_json(path / ADAPTER_CONFIG, ADAPTER)
        _refuse_other_kinds(path, raw)
        if missing := [key for key in ("r", "lora_alpha") if key not in raw]:
            raise CorruptModel(f"{path / ADAPTER_CONFIG} lacks {missing[0]}", _AGAIN)
        self._rank, self._alpha, self._rank_stabilised = raw["r"], raw["lora_alpha"], raw.get("use_rslora")
        self._ranks = _patterns(path, raw.get("rank_pattern"))
        self._alphas = _patterns(path, raw.get("alpha_pattern"))
        self.transposed = bool(raw.get("fan_in_fan_out"))
        """Weights are stored as [in, out]."""
        self.dora = bool(raw.get("use_dora"))
        self.keeps_tie = bool(raw.get("ensure_weight_tying"))
        self.base = raw.get("base_model_name_or_path") or "another model"

    def rank_of(self, module: str) -> int:
        """Return the rank r of a module's factors."""
        return int(_matching(self._ranks, module, self._rank))

    def scale_of(self, module: str) -> float:
        """Return the factor s of a module's product."""
        rank = self.rank_of(module)
        return _matching(self._alphas, module, self._alpha) / (rank**0.5 if self._rank_stabilised else rank)


def _matching(patterns: Patterns, module: str, default: float) -> float:
    """Return the value of the first pattern that matches the end of a module's name, from a dot on."""
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _patterns(path: Path, given: Mapping[str, float] | None) -> Patterns:
    """Compile untrusted patterns. Raises `UnsupportedModel` for expressions that could take exponential time to match,
    `CorruptModel` for those that are not regular expressions."""
    found = []
    for pattern, value in (given or {}).items():
        plain = pattern.replace("(?:", "(")
        costs = len(re.findall(r"[*+?{(]", plain))
        if costs > _MAX_COSTS or "(?" in plain or re.search(r"\)[*+?{]", plain) or len(plain) > _LONGEST_PATTERN:
            raise UnsupportedModel(
                f"{path / ADAPTER_CONFIG} uses the pattern {shown(pattern)}, which could take very long to match",
                f"Name the modules, or use at most {_MAX_COSTS} groups and repetitions, and no repeated group",
            )
        with library_errors(f"{path / ADAPTER_CONFIG} holds the pattern {shown(pattern)}", _AGAIN):
            found.append((re.compile(rf"(.*\.)?({pattern})$"), value))
    return tuple(found)


def _refuse_other_kinds(path: Path, raw: Mapping[str, Any]) -> None:
    merge = "Merge it with the peft package and load the result, or use a plain LoRA"
    if raw.get("peft_type") == "XLORA":
        raise UnsupportedModel(
            f"{path} is an X-LoRA, which weighs its adapters anew for every token, by another pass before",
            "Give its adapters as a list, with fixed weights",
        )
    if raw.get("peft_type") != "LORA":
        raise UnsupportedModel(f"{path} is an adapter of type {raw.get('peft_type', '?')}, not LORA", merge)
    if used := [key for key in _VARIANTS if raw.get(key)]:
        raise UnsupportedModel(f"the adapter {path} uses {', '.join(used)}, which is not merged here", merge)
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_REBASED):
        raise UnsupportedModel(
            f"the adapter {path} was initialised with {start}, which changes the base model too",
            "Save it as a plain LoRA (peft: path_initial_model_for_weight_conversion)",
        )


class LoraAdapter:
    """The tensors of a folder in PEFT's layout, adapter_config.json and adapter_model.safetensors, in the base's terms.

    `changes`: module -> part ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector",
    "bias") -> name in the file. `whole`: tensor of the base -> name in the file of the tensor that replaces it.
    """

    def __init__(self, path: Path, base: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        """`base`: the base's config. Raises `UnsupportedModel`, `ModelNotFound`, or `CorruptModel` for damage and for
        an A without its B."""
        self.path, self.rules = path, MergeRules(path)
        self.tensors = open_weights(path, "adapter_model.safetensors", "adapter_model.bin", allow_pickle)
        self.changes: dict[str, dict[str, str]] = {}
        self.whole: dict[str, str] = {}
        self._trained: dict[str, str] = {}
        """Module -> its name in the adapter's files, which the config's patterns are about."""
        for key in self.tensors:
            name = key.removeprefix(_PREFIX)
            if found := _PART.fullmatch(name):
                trained, part, rest = found.groups()
                module = self._own_name(trained, base)
                self._trained[module] = trained
                self.changes.setdefault(module, {})["bias" if rest.endswith(".bias") else part] = key
            elif ".original_module." not in name:  # the tensor that a trained one replaces
                module, _, kind = _WRAPPED.sub("", name).rpartition(".")
                self.whole[f"{self._own_name(module, base)}.{kind}".removeprefix(".")] = key
        if not self.changes:
            raise CorruptModel(f"the adapter {path} holds no LoRA weights", _AGAIN)
        for module in self.changes:
            self.factors(module)

    def _own_name(self, module: str, base: Mapping[str, Any]) -> str:
        name = module_name(base, module)
        if reason := family_of(base).unlike_file(base, name):
            raise UnsupportedModel(
                f"the adapter {self.path} cannot be added to {module} of a {base.get('model_type')} model: {reason}",
                "Merge it with the peft package, and load (or convert) the result",
            )
        return name

    def scale_of(self, module: str) -> float:
        """Return the factor s of a module's product."""
        return self.rules.scale_of(self._trained[module])

    def factors(self, module: str) -> tuple[Tensor, Tensor]:
        """Return A [r, in] and B [out, r]. Raises `CorruptModel` where they contradict each other or the config."""
        parts = self.changes[module]
        kind = "lora_embedding_" if "lora_embedding_A" in parts or "lora_embedding_B" in parts else "lora_"
        if missing := [kind + side for side in "AB" if kind + side not in parts]:
            raise CorruptModel(f"the adapter {self.path} holds no {missing[0]} for {module}", _AGAIN)
        if ("lora_magnitude_vector" in parts) != self.rules.dora:
            problem = "holds no" if self.rules.dora else "without use_dora holds a"
            raise CorruptModel(f"the adapter {self.path} {problem} lora_magnitude_vector for {module}", _AGAIN)
        a, b = self.tensors[parts[kind + "A"]], self.tensors[parts[kind + "B"]]
        rank = self.rules.rank_of(self._trained[module])
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise CorruptModel(
                f"the adapter {self.path} has A {tuple(a.shape)} and B {tuple(b.shape)} for {module}, "
                f"where its config says rank {rank}",
                "Config and weights are of different adapters; fetch it again",
            )
        return a, b

    def low_rank(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A [r, in] and B [out, r] of each module, B with the scale, in float32 or wider.

        Raises `UnsupportedModel` for an adapter that changes more than products, and can only be merged.
        """
        parts = {part for found in self.changes.values() for part in found}
        kinds = {"bias": "has biases of its own", "lora_embedding_A": "changes an embedding"}
        kinds["lora_magnitude_vector"] = "is weight-decomposed (DoRA)"
        reasons = [reason for part, reason in kinds.items() if part in parts]
        if self.whole:
            reasons.append(f"replaces {next(iter(self.whole))}")
        if reasons:
            raise UnsupportedModel(
                f"the adapter {self.path} {' and '.join(reasons)}, which must be the same for all rows of a pass",
                "Merge it into the model: give it as `adapter`, without a name",
            )
        found = {}
        for module in self.changes:
            a, b = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in self.factors(module))
            found[module] = a, b * self.scale_of(module)
        return found

    def misfit(self, name: str, shapes: str) -> AdapterMismatch:
        """Return the error for a base whose tensor or module `name` contradicts the adapter."""
        return AdapterMismatch(
            f"the adapter {self.path} does not fit its base model at {name}: {shapes}",
            f"It was trained for {self.rules.base}; load it with that",
        )


class Merged(LazyTensors):
    """A base model's tensors with an adapter's changes: merged at each access, in float32 or better."""

    def __init__(self, base: Mapping[str, Tensor], adapter: LoraAdapter, *, untied: bool) -> None:
        """`untied`: the output head starts as a copy of the embedding and is a separate tensor from here on."""
        self._base, self._adapter, self._untied = base, adapter, untied
        biases = {module + ".bias" for module, parts in adapter.changes.items() if "bias" in parts}
        self._names = dict.fromkeys([*base, *([HEAD] if untied else []), *sorted(biases)])

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        module, _, kind = name.rpartition(".")
        parts = self._adapter.changes.get(module, {})
        if kind == "weight" and parts:
            return self._with_product(module, self._start(name))
        if kind == "bias" and "bias" in parts:
            return self._with_bias(module, parts["bias"])
        return self._start(name)

    def codes(self, name: str) -> Codes | None:
        """Return the base's codes of a matrix that the adapter does not change, else None."""
        return None if self._changed(name) else codes_of(self._base, name)

    def stored(self, name: str) -> Stored | None:
        """Return a matrix of the base that the adapter does not change, else None."""
        return None if self._changed(name) else stored_of(self._base, name)

    def _changed(self, name: str) -> bool:
        changed = name in self._adapter.whole or name.rpartition(".")[0] in self._adapter.changes
        return changed or (name == HEAD and self._untied)

    def mostly_codes(self) -> bool:
        return isinstance(self._base, LazyTensors) and self._base.mostly_codes()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a shape: the base's, except for tensors that the adapter replaces."""
        source = EMBEDDING if name == HEAD and self._untied else name
        if source in self._adapter.whole or name in self._adapter.whole or source not in self._base:
            return tuple(self[name].shape)
        return shape_of(self._base, source)

    def _start(self, name: str) -> Tensor:
        """Return the tensor before any product is added: the base's, or the one that replaces it."""
        source = EMBEDDING if name == HEAD and self._untied else name
        if name not in self._adapter.whole:
            # A replaced embedding leaves a tied head unchanged, unless it also has products: then it was only resized.
            resized = source in self._adapter.whole and self._adapter.changes.get(source.removesuffix(".weight"))
            return self._adapter.tensors[self._adapter.whole[source]] if resized else self._base[source]
        tensor, held = self._adapter.tensors[self._adapter.whole[name]], self._base[source]
        fixed = slice(1, None) if name in (EMBEDDING, HEAD) else slice(None)
        if tensor.dim() != held.dim() or tensor.shape[fixed] != held.shape[fixed]:
            raise self._adapter.misfit(name, f"{tuple(tensor.shape)} where the base has {tuple(held.shape)}")
        return tensor

    def _with_product(self, module: str, weight: Tensor) -> Tensor:
        parts, rules = self._adapter.changes[module], self._adapter.rules
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        a, b = (factor.to(weight.dtype) for factor in self._adapter.factors(module))
        transposed = rules.transposed or "lora_embedding_A" in parts
        change = (b @ a).T if transposed else b @ a
        if change.shape != weight.shape:
            shapes = f"A {tuple(a.shape)} and B {tuple(b.shape)} for a weight {tuple(weight.shape)}"
            raise self._adapter.misfit(module, shapes)
        merged = weight + self._adapter.scale_of(module) * change
        if not rules.dora:
            return merged
        norm: Tensor = merged.norm(dim=0 if transposed else 1, keepdim=True)
        magnitude = self._adapter.tensors[parts["lora_magnitude_vector"]].to(weight.dtype)
        if magnitude.numel() != norm.numel():
            raise self._adapter.misfit(module, f"{magnitude.numel()} magnitudes for {norm.numel()} outputs")
        return merged * (magnitude.reshape(norm.shape) / norm)

    def _with_bias(self, module: str, key: str) -> Tensor:
        name, change = module + ".bias", self._adapter.tensors[key]
        change = change.to(torch.promote_types(change.dtype, torch.float32)) * self._adapter.scale_of(module)
        if name not in self._base and name not in self._adapter.whole:
            return change
        bias = self._start(name)
        if bias.shape != change.shape:
            raise self._adapter.misfit(name, f"{tuple(change.shape)} where the base has {tuple(bias.shape)}")
        return bias + change


def merge(base: Checkpoint, path: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Return `base` with the adapter in the folder `path`, merged tensor by tensor as they are read.

    An adapter that changes the embedding or the output head of a tied model unties them, as in training, unless it was
    trained with `ensure_weight_tying`. An adapter's tokenizer, if any, replaces the base's. Raises `AdapterMismatch`,
    here or where a tensor is read; `UnsupportedModel`, `ModelNotFound`, `CorruptModel`.
    """
    adapter = LoraAdapter(path, base.config, allow_pickle=allow_pickle)
    tied = ties_head(base.config)
    names = {*base.tensors, *([HEAD] if tied else [])}
    for name in (*adapter.whole, *(module + ".weight" for module in adapter.changes)):
        if name not in names:
            raise adapter.misfit(name.removesuffix(".weight"), f"{base.path} has no such module")
    touched = {
        name for name in (EMBEDDING, HEAD) if name in adapter.whole or name.removesuffix(".weight") in adapter.changes
    }
    untied = tied and bool(touched) and not (adapter.rules.keeps_tie and EMBEDDING in touched)
    config = base.config | ({"tie_word_embeddings": False} if untied else {})
    config |= _new_vocab_size(adapter, base.config.get("vocab_size"), tied)
    tokenizer = Tokenizer.from_folder(path) if (path / "tokenizer.json").exists() else base.tokenizer
    return replace(base, config=config, tensors=Merged(base.tensors, adapter, untied=untied), tokenizer=tokenizer)


def _new_vocab_size(adapter: LoraAdapter, size: int | None, tied: bool) -> dict[str, int]:
    """Return the new `vocab_size` where tokens were added before training: embedding and head are then replaced."""
    rows = {name: adapter.tensors[adapter.whole[name]].shape[0] for name in (EMBEDDING, HEAD) if name in adapter.whole}
    if all(count == size for count in rows.values()):
        return {}
    if len(set(rows.values())) > 1 or (len(rows) == 1 and not (tied and EMBEDDING in rows)):
        held = " and ".join(f"{count} rows for {name}" for name, count in rows.items())
        raise adapter.misfit(next(iter(rows)), f"{held}, and the vocabulary is {size}")
    return {"vocab_size": next(iter(rows.values()))}


def open_model(
    reference: str | Path,
    adapter: str | Path | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    allow_pickle: bool = False,
    quiet: bool = False,
) -> Checkpoint:
    """Open a model with an adapter merged: `adapter`, or the reference itself where it is one.

    `revision` is the reference's; an adapter's config names that of its base. Raises what `resolve`,
    `open_checkpoint` and `merge` raise, and `InvalidOption` for an `adapter` that is none.
    """
    fetch: dict[str, Any] = {"token": token, "allow_pickle": allow_pickle, "quiet": quiet}
    path = resolve(reference, revision=revision, **fetch)
    if adapter is not None:
        folder = resolve(adapter, **fetch)
        if not (folder / ADAPTER_CONFIG).exists():
            raise InvalidOption(f"{adapter} is not a LoRA adapter", f"Name a folder that holds {ADAPTER_CONFIG}")
    elif is_adapter(path):
        folder, path = path, _base_of(path, fetch)
    else:
        return open_checkpoint(path, allow_pickle=allow_pickle)
    return merge(open_checkpoint(path, allow_pickle=allow_pickle), folder, allow_pickle=allow_pickle)


def _base_of(folder: Path, fetch: dict[str, Any]) -> Path:
    raw = read_json(folder / ADAPTER_CONFIG, ADAPTER)
    name = raw.get("base_model_name_or_path")
    fix = f"Name the base model, and {folder} as its adapter"
    if not name:
        raise ModelNotFound(f"the adapter {folder} does not say which model it belongs to", fix)
    try:
        return resolve(name, revision=raw.get("revision") or None, **fetch)
    except ModelNotFound as error:
        raise ModelNotFound(f"the base model of the adapter {folder}: {error.cause}", fix) from error


def split_adapter(reference: str) -> tuple[str, str | None]:
    """Split `BASE@ADAPTER` into (base, adapter); a path that exists keeps its @."""
    base, _, adapter = reference.rpartition("@")
    if not (base and adapter) or Path(reference).expanduser().exists():
        return reference, None
    return base, adapter
