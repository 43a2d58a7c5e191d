"""Readers for learned drafters in the layouts of all projects. The results use the names of `models/heads.py`.

Tap numbers are translated. EAGLE-3's reference and `speculators` number a tap by the layer that the stream *enters*, as
Paceline does (vLLM checks `if idx in aux_hidden_state_layers` before the layer runs). SGLang's `eagle_config` and
DFlash number a tap by the layer whose *output* it reads, which is one less.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.assistant import ASSISTANT, open_assistant
from paceline.checkpoints.checkpoint import open_weights
from paceline.checkpoints.head_check import MAPS, check_tensors
from paceline.checkpoints.head_codes import decode
from paceline.checkpoints.head_dflash import read_dflash, read_speculators_dflash
from paceline.checkpoints.head_folder import HeadFolder, Raw, ReadHead, Tensors
from paceline.checkpoints.head_gguf import is_head_gguf, open_head_gguf
from paceline.checkpoints.model_config import read_config
from paceline.checkpoints.mtp import open_mtp
from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.locate import resolve
from paceline.files.reading import read_json
from paceline.files.schema import HEAD, HEAD_IDENTITY, check
from paceline.models.config import ModelConfig
from paceline.models.heads import BlockConfig, EagleConfig, ExitConfig, HeadFile, MedusaConfig, TrainableConfig
from paceline.types import Tap

_FETCH_AGAIN = "Fetch the head again"
_MEDUSA_FILE = "medusa_lm_head"

EAGLE_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""EAGLE-3 settings with the same names in files and in `EagleConfig`."""

_UNUSED_TENSORS = re.compile(r".*rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight|lm_head_mask")
"""Names of tensors that some files contain, but no head needs."""


def open_head(
    reference: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    quiet: bool = True,
    allow_pickle: bool = False,
) -> HeadFile:
    """Read and check a learned drafter in any layout.

    Args:
        reference: A folder or hub id of a head, a model with an MTP layer (also as a GGUF file), or llama.cpp's GGUF of
            an EAGLE-3 or DFlash drafter.
        revision: Revision on the hub.
        token: Access token of the hub.
        quiet: Show no progress.
        allow_pickle: Accept pytorch_model.bin and medusa_lm_head.pt. They are read with `weights_only`.

    Raises:
        ModelNotFound: If a file is missing.
        CorruptModel: If the head is damaged, incomplete, inconsistent or not finite.
        UnsupportedModel: If the files do not hold a head that Paceline supports.
    """
    path = resolve(reference, revision=revision, token=token, quiet=quiet, allow_pickle=allow_pickle)
    raw = {} if path.is_file() else read_json(path / "config.json", HEAD_IDENTITY)
    if raw.get("model_type") == ASSISTANT:
        return open_assistant(path, allow_pickle=allow_pickle)
    reader = None if path.is_file() else _reader(path, raw)
    if reader is None:
        if path.is_file() and (stored := open_head_gguf(path)):
            return stored
        if built_in := open_mtp(path, allow_pickle=allow_pickle):
            return built_in
        raise UnsupportedModel(
            f"{path} holds no learned drafter that Paceline knows",
            "It reads EAGLE, Medusa, DFlash and speculators heads, and MTP layers. For a draft model, use model:REF",
        )
    _check_fields(path / "config.json", raw)
    folder = HeadFolder(path, raw, _tensors(path, allow_pickle))
    try:
        layout, config, tensors = reader(folder)
    except KeyError as missing:
        raise CorruptModel(f"config.json of the head {path} lacks {missing}", _FETCH_AGAIN) from missing
    extra = dict(raw.get("paceline") or {})
    whole = decode(complete_token_maps(config, tensors), extra)
    check_tensors(path, config, whole)
    target, layers = extra.pop("target", None), extra.pop("target_layers", raw.get("num_target_layers"))
    for known in ("kind", "paths", "matrices"):  # these are already part of `config` and `tensors`
        extra.pop(known, None)
    target = _verifier(raw).get("name_or_path") or raw.get("base_model_name_or_path") or target
    return HeadFile(path, layout, config, whole, target, layers, extra)


def complete_token_maps(config: TrainableConfig, tensors: Mapping[str, Tensor]) -> Tensors:
    """Convert token maps to int64 and bool, and return the tensors. If one of d2t and t2d is missing, derive it from
    the other.

    Malformed maps (not integers, not a vector) are left unchanged. `check_tensors` reports them.
    """
    whole = dict(tensors)
    maps = {name: x for name, x in tensors.items() if name in MAPS and x.dim() == 1 and not x.is_floating_point()}
    for name, tensor in maps.items():
        whole[name] = tensor.bool() if name == "t2d" else tensor.long()
    if "d2t" in maps and "t2d" not in tensors and isinstance(config, (EagleConfig, BlockConfig)):
        tokens = torch.arange(len(whole["d2t"])) + whole["d2t"]
        marks = torch.zeros(config.layer.vocab_size, dtype=torch.bool)
        whole["t2d"] = marks.index_fill(0, tokens.clamp(0, len(marks) - 1), True)
    if "t2d" in maps and "d2t" not in tensors:
        tokens = whole["t2d"].nonzero().flatten()
        whole["d2t"] = tokens - torch.arange(len(tokens))
    return whole


def holds_head(path: Path) -> bool:
    """Return True if this folder or GGUF file holds a learned drafter.

    Raises:
        UnsupportedModel: If the drafter is of a type that Paceline does not support.
    """
    if path.is_file():
        return is_head_gguf(path)
    file = path / "config.json"
    if not file.exists():
        return False
    raw = read_json(file, HEAD_IDENTITY)
    return raw.get("model_type") == ASSISTANT or _reader(path, raw) is not None


def _check_fields(file: Path, raw: Raw) -> None:
    """Raise `CorruptModel` if a field of the config, or of an object in it, has the wrong type."""
    check(file, raw, HEAD)
    for key in ("paceline", "eagle_config", "dflash_config", "dspark_config", "speculators_config"):
        check(file, raw.get(key) or {}, HEAD)
    check(file, _verifier(raw), HEAD)


def verifier_of(raw: Raw) -> str | None:
    """Return the target that the config of a head in the layout of `speculators` names. Raise `CorruptModel` if the
    config is malformed."""
    _check_fields(Path("config.json"), raw)
    name: str | None = _verifier(raw).get("name_or_path")
    return name


def _verifier(raw: Raw) -> Raw:
    return (raw.get("speculators_config") or {}).get("verifier") or {}


def _reader(path: Path, raw: Raw) -> Callable[[HeadFolder], ReadHead] | None:
    """Return the reader for a folder's layout, or None if the folder does not hold a head. Raise `UnsupportedModel` if
    the head's type is not supported."""
    names = " ".join(map(str, raw.get("architectures") or [])).lower()
    kind = str(raw.get("speculators_model_type") or "")
    if kind == "mtp" or "mtp" in names:
        raise UnsupportedModel(
            f"{path} holds an MTP head, which Paceline does not support",
            "Use an EAGLE-3, DFlash, DSpark or Medusa head",
        )
    if kind == "dflash2":
        raise UnsupportedModel(
            f"{path} holds a DFlash 2 head in the layout of speculators", "Use one in its authors' layout (z-lab)"
        )
    if kind:
        if kind not in _SPECULATORS:
            raise UnsupportedModel(
                f"{path} holds a speculator of type {kind!r}, which is not supported",
                "Use one of type eagle3, dflash or dspark",
            )
        return _SPECULATORS[kind]
    paceline = raw.get("paceline_kind")
    medusa = "medusa" in names or raw.get("model_type") == "medusa" or "medusa_num_heads" in raw
    if paceline == "exit":
        return _read_exit
    if paceline == "medusa" or (medusa and not _medusa_file(path)):
        return _read_medusa
    if medusa or _medusa_file(path):
        return _read_medusa_reference
    if any(name in names or f"{name}_config" in raw for name in ("dflash", "dspark")):
        return read_dflash
    # Heads of EAGLE-1 and 2 have Llama's config with a single layer, and no tokenizer. Heads with more layers have
    # "eagle" in their config.
    single = raw.get("num_hidden_layers") == 1 and not any(path.glob("tokenizer*"))
    return _read_eagle if "eagle" in names or "draft_vocab_size" in raw or single else None


def _medusa_file(path: Path) -> bool:
    return any((path / (_MEDUSA_FILE + end)).exists() for end in (".safetensors", ".pt"))


def _tensors(path: Path, allow_pickle: bool) -> Tensors:
    names = ("model.safetensors", "pytorch_model.bin")
    if _medusa_file(path):
        names = (_MEDUSA_FILE + ".safetensors", _MEDUSA_FILE + ".pt")
    found = open_weights(path, *names, allow_pickle)
    return {name: found[name] for name in found if not _UNUSED_TENSORS.fullmatch(name)}


# --- EAGLE


def _canonical(name: str) -> str:
    return re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))


def _eagle_tensors(folder: HeadFolder) -> Tensors:
    """Return the tensors by canonical name. Hidden-state norms of later layers are left out, because only the first
    layer applies this norm."""
    named = {_canonical(name): tensor for name, tensor in folder.tensors.items()}
    return {name: x for name, x in named.items() if not re.fullmatch(r"layers\.[1-9]\d*\.hidden_norm\.weight", name)}


def _read_speculators_eagle3(folder: HeadFolder) -> ReadHead:
    raw = folder.raw
    layer = _eagle_layers(folder, raw["transformer_layer_config"])
    config = _eagle3(folder, layer, tuple(raw.get("eagle_aux_hidden_state_layer_ids") or ()))
    if raw["speculators_model_type"] == "peagle":
        config = replace(config, mask_token=folder.number("mask_token_id"))
    return "speculators", config, _eagle_tensors(folder)


def _read_eagle(folder: HeadFolder) -> ReadHead:
    """Read the layout of the reference, SGLang and SpecForge. EAGLE-1 and 2 differ from EAGLE-3 in that they have no
    `hidden_norm`."""
    raw = folder.raw
    tensors = _eagle_tensors(folder)
    sglang = "LlamaForCausalLMEagle3" in (raw.get("architectures") or [])
    # The reference ignores model_type and windows, and always uses Llama's layer. Only vLLM's Llama 4 heads are
    # different.
    ignored = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", *_CHUNKS)
    kind = _LLAMA4 if raw.get("model_type") == _LLAMA4 and not sglang else "llama"
    layer = _eagle_layers(folder, {k: v for k, v in raw.items() if k not in ignored} | {"model_type": kind})
    if "layers.0.hidden_norm.weight" not in tensors and "draft_vocab_size" not in raw:
        tensors.pop("lm_head.weight", None)  # some files contain a copy of the target's
        return "reference", EagleConfig(layer, ("final",), layer.hidden, layer.vocab_size, version=1), tensors
    layout = "sglang" if sglang else "reference"
    nested = raw.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise UnsupportedModel(
            f"{folder.path} is an EAGLE-3 head that reads only the last layer",
            "Use a head that reads several layers",
        )
    if "lm_head.weight" not in tensors:  # only the layout of speculators allows a missing head
        raise CorruptModel(f"the head {folder.path} lacks lm_head.weight", _FETCH_AGAIN)
    key = "eagle_aux_hidden_state_layer_ids"
    taps = raw.get(key) or [x + 1 for x in nested.get(key) or ()]
    return layout, _eagle3(folder, layer, tuple(taps)), tensors


def _eagle3(folder: HeadFolder, layer: ModelConfig, taps: tuple[Tap, ...]) -> EagleConfig:
    raw = folder.raw
    flags: Any = {flag: bool(raw.get(flag)) for flag in EAGLE_FLAGS}
    return EagleConfig(
        layer=layer,
        taps=taps,
        target_hidden=raw.get("target_hidden_size") or layer.hidden,
        draft_vocab=raw.get("draft_vocab_size") or layer.vocab_size,
        **flags,
    )


_LLAMA4, _CHUNKS = "llama4_text", ("attention_chunk_size", "no_rope_layers")


def _eagle_layers(folder: HeadFolder, raw: Raw) -> ModelConfig:
    if raw.get("model_type") == _LLAMA4:
        raise UnsupportedModel(
            f"{folder.path} is an EAGLE head with layers of {_LLAMA4}", "Use one with Llama's layers"
        )
    config = read_config({"model_type": "qwen3", "num_hidden_layers": 1, **raw})
    if any(layer.window for layer in config.plan) or config.norms.kind == "layer":
        raise UnsupportedModel(
            f"{folder.path} is an EAGLE head with sliding windows or layer norms", "Use a head without them"
        )
    normed = any(_canonical(name) == "layers.0.self_attn.q_norm.weight" for name in folder.tensors)
    return replace(config, norms=replace(config.norms, heads="shared" if normed else None), special=(), tied=False)


# --- Medusa


def _read_medusa_reference(folder: HeadFolder) -> ReadHead:
    """Read a head's layers, `{head}.{layer}.linear.{weight,bias}`, and its output head, which comes after its last
    layer.

    The numbers of heads and layers are taken from the tensors, because published configs say 2 heads although the files
    have 5.
    """
    tensors: Tensors = {}
    for name, tensor in folder.tensors.items():
        found = re.fullmatch(r"(?:medusa_head\.)?(\d+)\.(\d+)(\.linear)?\.(weight|bias)", name)
        if not found:
            raise CorruptModel(f"the Medusa head {folder.path} holds the unknown tensor {name}", _FETCH_AGAIN)
        head, layer, linear, part = found.groups()
        tensors[f"blocks.{head}.layers.{layer}.{part}" if linear else f"lm_heads.{head}.{part}"] = tensor
    return "reference", _medusa(folder, tensors, shared=False), tensors


def _read_medusa(folder: HeadFolder) -> ReadHead:
    """Read vLLM's layout or Paceline's. In Paceline's layout, the heads may share the target's output head."""
    tensors = {name.replace("medusa_heads.", ""): tensor for name, tensor in folder.tensors.items()}
    shared = not any(name.startswith("lm_head") for name in tensors)
    config = _medusa(folder, tensors, shared)
    if folder.raw.get("original_lm_head") and not shared:
        head = tensors.pop("lm_head.weight", tensors.get("lm_heads.0.weight"))
        tensors |= {f"lm_heads.{i}.weight": head for i in range(config.heads) if head is not None}
    if "token_map" in tensors:  # vLLM also accepts output heads for all tokens, and selects their rows on loading
        rows = tensors["token_map"].long()
        heads = [name for name, x in tensors.items() if name.startswith("lm_heads.") and len(x) == config.vocab_size]
        tensors |= {name: tensors[name][rows] for name in heads if rows.max() < config.vocab_size}
    return "paceline" if folder.raw.get("paceline_kind") else "vllm", config, tensors


def _medusa(folder: HeadFolder, tensors: Tensors, shared: bool) -> MedusaConfig:
    found = [re.fullmatch(r"blocks\.(\d{1,9})\.layers\.(\d{1,9})\.weight", name) for name in tensors]
    places = {(int(x[1]), int(x[2])) for x in found if x}
    heads, layers = (1 + max((place[i] for place in places), default=0) for i in (0, 1))
    # Block numbers are untrusted and may be as large as 10^9. Among the first N + 1 numbers, one is missing if there
    # are only N blocks, so the loop ends there.
    for head, layer in (divmod(i, layers) for i in range(min(heads * layers, len(places) + 1))):
        if (head, layer) not in places:
            raise CorruptModel(f"the Medusa head {folder.path} lacks blocks.{head}.layers.{layer}.weight", _FETCH_AGAIN)
    rows = len(next((x for name, x in tensors.items() if name.startswith("lm_head")), ())) or None
    vocab = folder.number("vocab_size", {"vocab_size": rows, **folder.raw})
    return MedusaConfig(
        hidden=len(tensors["blocks.0.layers.0.weight"]),
        vocab_size=vocab,
        heads=heads,
        layers=layers,
        shared=shared,
        draft_vocab=len(tensors["token_map"]) if "token_map" in tensors else vocab,
        paths=tuple(tuple(path) for path in (folder.raw.get("paceline") or {}).get("paths", ())),
    )


# --- early exit


def _read_exit(folder: HeadFolder) -> ReadHead:
    config = ExitConfig(folder.number("hidden_size"), folder.number("layers"), folder.number("rank"))
    return "paceline", config, folder.tensors


_SPECULATORS: dict[str, Callable[[HeadFolder], ReadHead]] = {
    "eagle3": _read_speculators_eagle3,
    "peagle": _read_speculators_eagle3,
    "dflash": read_speculators_dflash,
    "dspark": read_speculators_dflash,
}
"""speculators_model_type -> its reader."""
