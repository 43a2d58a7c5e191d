"""LoRA adapters in PEFT's layout. An access to a tensor of the base model merges the adapter into it.

W' = W + s B A, where s = alpha / r (Hu et al. 2021), or alpha / sqrt(r) for rank-stabilised adapters (Kalajdzievski
2023). DoRA (Liu et al. 2024) also scales each output row of W' to a trained norm.
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
from paceline.files.schema import ADAPTER, format_value
from paceline.kernels.quantize import Codes
from paceline.kernels.stored import Stored
from paceline.models.lazy import LazyTensors, codes_of, shape_of, stored_of
from paceline.text.tokenizer import Tokenizer

_PREFIX = "base_model.model."
_FETCH_AGAIN = "Fetch the adapter again"

_PART = re.compile(r"(.+)\.(lora_(?:embedding_)?[AB]|lora_magnitude_vector)((?:\.[^.]+){0,2})")
"""A tensor name: the module, the part, and the rest. In some files, the rest begins with the adapter's name
("default"). In most files, it ends with "weight" or "bias"."""

_MAX_REPETITIONS, _MAX_PATTERN_LENGTH = 3, 256
"""Maximum number of groups and repetitions in a pattern, and its maximum length. They bound the time that it takes to
match untrusted patterns."""

_WRAPPED = re.compile(r"\.(?:base_layer|modules_to_save(?:\.default)?)(?=\.[^.]+$)")
"""Names that PEFT inserts between a wrapped module's name and the names of its tensors."""

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
"""Entries of adapter_config.json that mark variants whose merged weights are not W + s B A."""

_REBASED = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Initialisations that also change the base model's weights. An adapter's files do not contain these changes."""

Patterns = tuple[tuple[re.Pattern[str], float], ...]
"""Patterns of module names, and the value for each. The first pattern that matches applies."""


class MergeRules:
    """The merge settings in a folder's adapter_config.json."""

    def __init__(self, path: Path) -> None:
        """Read the settings.

        Raises:
            UnsupportedModel: If the folder holds another kind of adapter.
            CorruptModel: If the config is damaged.
        """
        raw = read_json(path / ADAPTER_CONFIG, ADAPTER)
        _refuse_other_kinds(path, raw)
        if missing := [key for key in ("r", "lora_alpha") if key not in raw]:
            raise CorruptModel(f"{path / ADAPTER_CONFIG} lacks {missing[0]}", _FETCH_AGAIN)
        self._rank, self._alpha, self._rank_stabilised = raw["r"], raw["lora_alpha"], raw.get("use_rslora")
        self._ranks = _patterns(path, raw.get("rank_pattern"))
        self._alphas = _patterns(path, raw.get("alpha_pattern"))
        self.transposed = bool(raw.get("fan_in_fan_out"))
        """True if the weights have the shape [in, out]."""
        self.dora = bool(raw.get("use_dora"))
        self.keeps_tie = bool(raw.get("ensure_weight_tying"))
        self.base = raw.get("base_model_name_or_path") or "another model"

    def rank_of(self, module: str) -> int:
        """Return the rank r of a module's factors."""
        return int(_matching(self._ranks, module, self._rank))

    def scale_of(self, module: str) -> float:
        """Return the scale s of a module's factors."""
        rank = self.rank_of(module)
        return _matching(self._alphas, module, self._alpha) / (rank**0.5 if self._rank_stabilised else rank)


def _matching(patterns: Patterns, module: str, default: float) -> float:
    """Return the value of the first pattern that matches the last components of a module's name."""
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _patterns(path: Path, given: Mapping[str, float] | None) -> Patterns:
    """Compile untrusted patterns.

    Raises:
        UnsupportedModel: If a pattern could take exponential time to match.
        CorruptModel: If a pattern is not a regular expression.
    """
    found = []
    for pattern, value in (given or {}).items():
        plain, shown = pattern.replace("(?:", "("), format_value(pattern)
        costs = len(re.findall(r"[*+?{(]", plain))
        if (
            costs > _MAX_REPETITIONS
            or "(?" in plain
            or re.search(r"\)[*+?{]", plain)
            or len(plain) > _MAX_PATTERN_LENGTH
        ):
            raise UnsupportedModel(
                f"{path / ADAPTER_CONFIG} uses the pattern {shown}, which could take very long to match",
                f"Name the modules, or use at most {_MAX_REPETITIONS} groups and repetitions, and no repeated group",
            )
        with library_errors(f"{path / ADAPTER_CONFIG} holds the pattern {shown}", _FETCH_AGAIN):
            found.append((re.compile(rf"(.*\.)?({pattern})$"), value))
    return tuple(found)


def _refuse_other_kinds(path: Path, raw: Mapping[str, Any]) -> None:
    merge = "Merge it with the peft package and load the result, or use a plain LoRA"
    if raw.get("peft_type") == "XLORA":
        raise UnsupportedModel(
            f"{path} is an X-LoRA, which weights its adapters for every token. This is not supported",
            "Give its adapters as a list, with fixed weights",
        )
    if raw.get("peft_type") != "LORA":
        raise UnsupportedModel(f"{path} is an adapter of type {raw.get('peft_type', '?')}, not LORA", merge)
    if used := [key for key in _VARIANTS if raw.get(key)]:
        raise UnsupportedModel(f"the adapter {path} uses {', '.join(used)}, which Paceline cannot merge", merge)
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_REBASED):
        raise UnsupportedModel(
            f"the adapter {path} was initialised with {start}, which also changes the base model",
            "Save it as a plain LoRA (peft: path_initial_model_for_weight_conversion)",
        )


class LoraAdapter:
    """An adapter in PEFT's layout (adapter_config.json, adapter_model.safetensors), under the base model's names.

    Attributes:
        changes: Module -> part ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector",
            "bias") -> name in the file.
        replacements: Name of a base model's tensor -> name, in the adapter's file, of the tensor that replaces it.
    """

    def __init__(self, path: Path, base: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        """Read the adapter in a folder.

        Args:
            path: The folder.
            base: The config of the base model.
            allow_pickle: Accept adapter_model.bin.

        Raises:
            UnsupportedModel: If the adapter is of a kind that cannot be merged.
            ModelNotFound: If a file is missing.
            CorruptModel: If a file is damaged, or one of the factors A and B is missing.
        """
        self.path, self.rules = path, MergeRules(path)
        self.tensors = open_weights(path, "adapter_model.safetensors", "adapter_model.bin", allow_pickle)
        self.changes: dict[str, dict[str, str]] = {}
        self.replacements: dict[str, str] = {}
        self._trained: dict[str, str] = {}
        """Module -> its name in the adapter's files. The patterns in the config refer to these names."""
        for key in self.tensors:
            name = key.removeprefix(_PREFIX)
            if found := _PART.fullmatch(name):
                trained, part, rest = found.groups()
                module = self._own_name(trained, base)
                self._trained[module] = trained
                self.changes.setdefault(module, {})["bias" if rest.endswith(".bias") else part] = key
            elif ".original_module." not in name:  # skip the original version of a replaced tensor
                module, _, kind = _WRAPPED.sub("", name).rpartition(".")
                self.replacements[f"{self._own_name(module, base)}.{kind}".removeprefix(".")] = key
        if not self.changes:
            raise CorruptModel(f"the adapter {path} holds no LoRA weights", _FETCH_AGAIN)
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
        """Return the scale s of a module's factors."""
        return self.rules.scale_of(self._trained[module])

    def factors(self, module: str) -> tuple[Tensor, Tensor]:
        """Return A [r, in] and B [out, r] of a module. Raise `CorruptModel` if they do not fit each other or the
        config."""
        parts = self.changes[module]
        kind = "lora_embedding_" if "lora_embedding_A" in parts or "lora_embedding_B" in parts else "lora_"
        if missing := [kind + side for side in "AB" if kind + side not in parts]:
            raise CorruptModel(f"the adapter {self.path} holds no {missing[0]} for {module}", _FETCH_AGAIN)
        if ("lora_magnitude_vector" in parts) != self.rules.dora:
            problem = "holds no" if self.rules.dora else "without use_dora holds a"
            raise CorruptModel(f"the adapter {self.path} {problem} lora_magnitude_vector for {module}", _FETCH_AGAIN)
        a, b = self.tensors[parts[kind + "A"]], self.tensors[parts[kind + "B"]]
        rank = self.rules.rank_of(self._trained[module])
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
            raise CorruptModel(
                f"the adapter {self.path} has A {tuple(a.shape)} and B {tuple(b.shape)} for {module}, "
                f"but its config says rank {rank}",
                "Config and weights are from different adapters. Fetch the adapter again",
            )
        return a, b

    def low_rank(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A [r, in] and the scaled B [out, r] of each module, in float32 or wider.

        Raises:
            UnsupportedModel: If the adapter changes more than linear layers. Such an adapter must be merged.
        """
        parts = {part for found in self.changes.values() for part in found}
        kinds = {"bias": "has biases of its own", "lora_embedding_A": "changes an embedding"}
        kinds["lora_magnitude_vector"] = "is weight-decomposed (DoRA)"
        reasons = [reason for part, reason in kinds.items() if part in parts]
        if self.replacements:
            reasons.append(f"replaces {next(iter(self.replacements))}")
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

    def mismatch(self, name: str, shapes: str) -> AdapterMismatch:
        """Return the error for a base model that the adapter does not fit at the tensor or module `name`."""
        return AdapterMismatch(
            f"the adapter {self.path} does not fit its base model at {name}: {shapes}",
            f"It was trained for {self.rules.base}. Load it with that model",
        )


class MergedTensors(LazyTensors):
    """A base model's tensors. Each access merges the adapter into a tensor, in float32 or wider."""

    def __init__(self, base: Mapping[str, Tensor], adapter: LoraAdapter, *, untied: bool) -> None:
        """`untied`: True if the output head becomes a separate tensor, which is a copy of the embedding before the
        adapter is merged."""
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
        """Return the base model's codes of a matrix, or None if the adapter changes the matrix."""
        return None if self._changed(name) else codes_of(self._base, name)

    def stored(self, name: str) -> Stored | None:
        """Return the base model's matrix, or None if the adapter changes it."""
        return None if self._changed(name) else stored_of(self._base, name)

    def _changed(self, name: str) -> bool:
        changed = name in self._adapter.replacements or name.rpartition(".")[0] in self._adapter.changes
        return changed or (name == HEAD and self._untied)

    def mostly_codes(self) -> bool:
        return isinstance(self._base, LazyTensors) and self._base.mostly_codes()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape. It is the shape in the base model, unless the adapter replaces the tensor."""
        source = EMBEDDING if name == HEAD and self._untied else name
        if source in self._adapter.replacements or name in self._adapter.replacements or source not in self._base:
            return tuple(self[name].shape)
        return shape_of(self._base, source)

    def _start(self, name: str) -> Tensor:
        """Return a tensor before s B A is added: the base model's tensor, or the tensor that replaces it."""
        source = EMBEDDING if name == HEAD and self._untied else name
        if name not in self._adapter.replacements:
            # A replaced embedding does not affect a tied head. However, if the embedding also has factors A and B,
            # it was replaced only to resize it, so it replaces the tied head too.
            resized = source in self._adapter.replacements and self._adapter.changes.get(source.removesuffix(".weight"))
            return self._adapter.tensors[self._adapter.replacements[source]] if resized else self._base[source]
        tensor, held = self._adapter.tensors[self._adapter.replacements[name]], self._base[source]
        fixed = slice(1, None) if name in (EMBEDDING, HEAD) else slice(None)
        if tensor.dim() != held.dim() or tensor.shape[fixed] != held.shape[fixed]:
            raise self._adapter.mismatch(name, f"{tuple(tensor.shape)} where the base has {tuple(held.shape)}")
        return tensor

    def _with_product(self, module: str, weight: Tensor) -> Tensor:
        parts, rules = self._adapter.changes[module], self._adapter.rules
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        a, b = (factor.to(weight.dtype) for factor in self._adapter.factors(module))
        transposed = rules.transposed or "lora_embedding_A" in parts
        change = (b @ a).T if transposed else b @ a
        if change.shape != weight.shape:
            shapes = f"A {tuple(a.shape)} and B {tuple(b.shape)} for a weight {tuple(weight.shape)}"
            raise self._adapter.mismatch(module, shapes)
        merged = weight + self._adapter.scale_of(module) * change
        if not rules.dora:
            return merged
        norm: Tensor = merged.norm(dim=0 if transposed else 1, keepdim=True)
        magnitude = self._adapter.tensors[parts["lora_magnitude_vector"]].to(weight.dtype)
        if magnitude.numel() != norm.numel():
            raise self._adapter.mismatch(module, f"{magnitude.numel()} magnitudes for {norm.numel()} outputs")
        return merged * (magnitude.reshape(norm.shape) / norm)

    def _with_bias(self, module: str, key: str) -> Tensor:
        name, change = module + ".bias", self._adapter.tensors[key]
        change = change.to(torch.promote_types(change.dtype, torch.float32)) * self._adapter.scale_of(module)
        if name not in self._base and name not in self._adapter.replacements:
            return change
        bias = self._start(name)
        if bias.shape != change.shape:
            raise self._adapter.mismatch(name, f"{tuple(change.shape)} where the base has {tuple(bias.shape)}")
        return bias + change


def merge(base: Checkpoint, path: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Merge an adapter into a checkpoint. Each tensor is merged when it is accessed.

    If an adapter changes the embedding or the output head of a model with tied embeddings, the two are untied, as in
    training, unless the adapter was trained with `ensure_weight_tying`. If the adapter has a tokenizer, it replaces the
    base model's tokenizer.

    Args:
        base: The base model.
        path: The adapter's folder.
        allow_pickle: Accept adapter_model.bin.

    Raises:
        AdapterMismatch: If the adapter does not fit the base model. Accessing a tensor may raise this too.
        UnsupportedModel: If the adapter cannot be merged.
        ModelNotFound: If a file is missing.
        CorruptModel: If a file is damaged.
    """
    adapter = LoraAdapter(path, base.config, allow_pickle=allow_pickle)
    tied = ties_head(base.config)
    names = {*base.tensors, *([HEAD] if tied else [])}
    for name in (*adapter.replacements, *(module + ".weight" for module in adapter.changes)):
        if name not in names:
            raise adapter.mismatch(name.removesuffix(".weight"), f"{base.path} has no such module")
    touched = {
        name
        for name in (EMBEDDING, HEAD)
        if name in adapter.replacements or name.removesuffix(".weight") in adapter.changes
    }
    untied = tied and bool(touched) and not (adapter.rules.keeps_tie and EMBEDDING in touched)
    config = base.config | ({"tie_word_embeddings": False} if untied else {})
    config |= _new_vocab_size(adapter, base.config.get("vocab_size"), tied)
    tokenizer = Tokenizer.from_folder(path) if (path / "tokenizer.json").exists() else base.tokenizer
    return replace(
        base, config=config, tensors=MergedTensors(base.tensors, adapter, untied=untied), tokenizer=tokenizer
    )


def _new_vocab_size(adapter: LoraAdapter, size: int | None, tied: bool) -> dict[str, int]:
    """Return the new `vocab_size` as an entry of the config, if tokens were added before training. The adapter then
    replaces embedding and head."""
    rows = {
        name: adapter.tensors[adapter.replacements[name]].shape[0]
        for name in (EMBEDDING, HEAD)
        if name in adapter.replacements
    }
    if all(count == size for count in rows.values()):
        return {}
    if len(set(rows.values())) > 1 or (len(rows) == 1 and not (tied and EMBEDDING in rows)):
        held = " and ".join(f"{count} rows for {name}" for name, count in rows.items())
        raise adapter.mismatch(next(iter(rows)), f"{held}, but the vocabulary size is {size}")
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
    """Open a model, with an adapter merged if there is one.

    Args:
        reference: A model, or an adapter. The adapter's config names the base model and its revision.
        adapter: An adapter to merge into the model.
        revision: Revision of the reference.
        token: Access token of the hub.
        allow_pickle: Accept pickled weights.
        quiet: Show no progress.

    Raises:
        InvalidOption: If `adapter` is not an adapter.
        PacelineError: See `resolve`, `open_checkpoint` and `merge`.
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
    """Split `BASE@ADAPTER` into (base, adapter). A path that exists is not split."""
    base, _, adapter = reference.rpartition("@")
    if not (base and adapter) or Path(reference).expanduser().exists():
        return reference, None
    return base, adapter
