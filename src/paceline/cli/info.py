"""`paceline info`: facts about a model or a learned drafter from its files."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.options import (
    DEMO,
    AllowPickle,
    AsJson,
    ModelArgument,
    ModelName,
    Revision,
    Token,
    VisionFile,
    model_name,
    progress_wanted,
)
from paceline.cli.show import amount, facts_table, percent

if TYPE_CHECKING:
    from paceline.checkpoints.checkpoint import Checkpoint
    from paceline.checkpoints.gguf_file import GGUFFile
    from paceline.models.config import ModelConfig
    from paceline.models.heads import HeadFile

_HEADS = {
    "eagle3": ("EAGLE-3", "", ""),
    "eagle": ("EAGLE (1 or 2)", "", ""),
    "mtp": ("multi-token prediction", "", ""),
    "peagle": ("P-EAGLE", "", ""),
    "medusa": ("Medusa", "heads", "{heads} of {layers} layers, with {output}"),
    "block": ("DFlash (block)", "block", "{block_size} tokens, {layers} layers, mask token {mask_token}"),
    "assistant": ("Gemma 4 assistant", "layers", "{layers}, over the target's keys and values"),
    "exit": ("early exit", "exit", "after {layers} layers, projection of rank {rank}"),
}
"""Kind -> title, and the name and value of an additional row."""
_COVERAGE = "coverage"
"""Key under which training stores the share of the training text that the draft vocabulary covers."""


def info(
    argument: ModelArgument = None,
    *,
    model: ModelName = DEMO,
    revision: Revision = None,
    token: Token = None,
    allow_pickle: AllowPickle = False,
    mmproj: VisionFile = None,
    as_json: AsJson = False,
) -> None:
    """Describe a model or drafter without running it.

    A hub model is downloaded first.
    """
    from rich.console import Console

    from paceline.checkpoints.head_files import holds_head
    from paceline.files.locate import resolve

    name, quiet = model_name(argument, model), not progress_wanted(False)
    path = resolve(name, revision=revision, token=token, quiet=quiet, allow_pickle=allow_pickle)
    is_head = holds_head(path)
    facts = _head_facts(path, allow_pickle) if is_head else _model_facts(path, allow_pickle, mmproj)
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        Console().print(facts_table(_head_rows(facts) if is_head else _model_rows(facts)))


def _dtypes(tensors: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Sum (dtype, elements) of tensors by dtype, most elements first."""
    sizes: Counter[str] = Counter()
    for dtype, size in tensors:
        sizes[dtype.removeprefix("torch.")] += size
    return dict(sizes.most_common())


# --- models -----------------------------------------------------------------------------------------------------------


def _model_facts(path: Path, allow_pickle: bool, mmproj: Path | None) -> dict[str, Any]:
    from paceline.checkpoints.checkpoint import eos_token_ids, open_checkpoint
    from paceline.checkpoints.gguf_file import read_gguf
    from paceline.checkpoints.loader import native_config
    from paceline.checkpoints.mtp import has_mtp
    from paceline.files.gguf_names import parts_of

    checkpoint = open_checkpoint(path, allow_pickle=allow_pickle)
    config = native_config(checkpoint)
    header = read_gguf(path) if path.is_file() else None
    family, tokenizer = checkpoint.config["model_type"], checkpoint.tokenizer
    eos = eos_token_ids(checkpoint.config, checkpoint.generation, tokenizer)
    parts = [path.with_name(name) for name in parts_of(path.name) or [path.name]]
    files = parts if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.bin")]
    form, dtypes = _weights(checkpoint, header)
    return {
        "path": str(path),
        "file_bytes": sum(file.stat().st_size for file in files),
        "architecture": (checkpoint.config.get("architectures") or [family])[0],
        "family": family,
        "runs": "natively" if config else "through transformers",
        "runner": _runner() if config else "torch",
        **(_architecture(config) if config else {}),
        "format": form,
        "parameters": sum(dtypes.values()),
        "dtypes": dtypes,
        "built_in_drafter": "mtp" if config and has_mtp(checkpoint.tensors) else None,
        "own_codes": _gguf_codes(header) if header else _folder_codes(dtypes),
        "vocab_size": checkpoint.config.get("vocab_size") or tokenizer.vocab_size,
        "tokens": tokenizer.vocab_size,
        "tokenizer": _gguf_tokenizer(header) if header else tokenizer.kind,
        "eos": [{"id": i, "token": tokenizer.decode([i], skip_special=False)} for i in eos],
        "chat_template": tokenizer.chat_template is not None,
        "images": _images(path, config, mmproj) if config else None,
        "generation": checkpoint.generation,
    }


def _images(path: Path, config: ModelConfig, mmproj: Path | None) -> str | None:
    """Return the name of the model's vision tower. None if it reads text only."""
    import torch

    from paceline.checkpoints.vision import open_vision

    vision = open_vision(path, torch.float32, torch.device("cpu"), config=config, mmproj=mmproj)
    return vision.name if vision else None


def _architecture(config: ModelConfig) -> dict[str, Any]:
    rope = asdict(config.rope) | {"scaling": dict(config.rope.scaling), "factors": list(config.rope.factors)}
    names = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "context_length")
    facts = {name: getattr(config, name) for name in names}
    recurrent = sum(bool(layer.recurrent) for layer in config.plan)
    facts["latent"] = asdict(config.attention.latent) if config.attention.latent else None
    facts |= {"rope": rope, "tied_head": config.tied, "recurrent_layers": recurrent, "state_bytes": config.state_bytes}
    import torch

    length = config.context_length
    return facts | {
        "cache_bytes": config.cache_bytes(length),
        "cache_bytes_int8": config.cache_bytes(length, torch.int8),
    }


def _runner() -> str:
    """Return what runs matrix multiplications with default options, and how to get a faster one."""
    from paceline.checkpoints.loader import pick_device, pick_dtype
    from paceline.files.progress import progress_bar
    from paceline.models.runner_choice import runner_of

    device = pick_device("auto")
    with progress_bar("compiling the CPU kernels, once", progress_wanted(quiet=False)):
        runner = runner_of(device, pick_dtype("auto", device))
    return f"{runner.name}. {runner.remedy}" if runner.remedy else runner.name


def _weights(checkpoint: Checkpoint, header: GGUFFile | None) -> tuple[str, dict[str, int]]:
    """Return (file format, elements by dtype)."""
    from paceline.models.lazy import kind_of, shape_of

    if header:
        # Read the header, since the checkpoint would dequantise every tensor. Rotary factors are not parameters.
        held = [tensor for name, tensor in header.tensors.items() if not name.startswith("rope_")]
        return "GGUF", _dtypes((tensor.kind, math.prod(tensor.shape)) for tensor in held)
    form, tensors = "safetensors" if any(checkpoint.path.glob("*.safetensors")) else "pickle", checkpoint.tensors
    return form, _dtypes((kind_of(tensors, name), math.prod(shape_of(tensors, name))) for name in tensors)


def _folder_codes(dtypes: dict[str, int]) -> dict[str, float]:
    """Return `_gguf_codes` of a folder. Its only possible codes are gpt-oss's MXFP4."""
    from paceline.kernels.cpu.build import library

    share = dtypes.get("MXFP4", 0) / max(1, sum(dtypes.values()))
    return {"4": share} if share and library() else {}


def _gguf_codes(header: GGUFFile) -> dict[str, float]:
    """Return the codes that --quantize keeps: bits -> share of all matrix elements in the file."""
    matrices = [x for x in header.tensors.values() if len(x.shape) > 1]
    sizes = _dtypes((str(x.kept_bits() or ""), math.prod(x.shape)) for x in matrices)
    return {bits: sizes[bits] / sum(sizes.values()) for bits in sorted(sizes) if bits}


def _gguf_tokenizer(header: GGUFFile) -> str:
    parts = [header.fields.get(f"tokenizer.ggml.{key}") for key in ("model", "pre")]
    return " / ".join(str(part) for part in parts if part)


def _model_rows(f: dict[str, Any]) -> list[tuple[str, str]]:
    from paceline.drafters.factory import AUTO
    from paceline.sampling.parameters import recommended

    shares = ", ".join(f"{kind} {percent(size / f['parameters'])}" for kind, size in f["dtypes"].items())
    name = f["architecture"] if f["architecture"] == f["family"] else f"{f['architecture']} ({f['family']})"
    native = f["runs"] == "natively"
    sampling = ", ".join(f"{name} {value}" for name, value in recommended(f["generation"]).items())
    unused = f["vocab_size"] - f["tokens"]
    built_in = f["built_in_drafter"]
    padding = f", and {unused:,} unused rows" if unused > 0 else ""
    return [
        ("model", f"{name}, {amount(f['parameters'])} parameters"),
        ("path", f["path"]),
        ("file", f"{f['format']}, {amount(f['file_bytes'], 'bytes')}: {shares}"),
        ("runs", f["runs"] + (f"; matrix multiplications on {f['runner']}" if native else "")),
        *([("--quantize", _quantize_text(f["own_codes"]))] if native else []),
        *([("built-in drafter", f"{built_in}: a layer for multi-token prediction")] if built_in else []),
        ("default drafter", f"{AUTO}+{built_in}" if built_in else AUTO),
        (
            "default sampling",
            f"{sampling} (recommended by the model)" if sampling else "greedy (the model recommends nothing else)",
        ),
        ("chat template", "yes" if f["chat_template"] else "no"),
        ("images", f"yes ({f['images']})" if f["images"] else "no: it reads text only"),
        *(_architecture_rows(f) if native else []),
        ("vocabulary", f"{f['tokens']:,} tokens{padding} ({f['tokenizer']})"),
        ("end of sequence", ", ".join(f"{eos['token']!r} (id {eos['id']})" for eos in f["eos"]) or "none"),
    ]


def _architecture_rows(f: dict[str, Any]) -> list[tuple[str, str]]:
    rope = f["rope"]
    full, half = (amount(f[name], "bytes") for name in ("cache_bytes", "cache_bytes_int8"))
    scaling = "not scaled" if rope["kind"] == "default" else f"scaling {rope['kind']}"
    scaling += "".join(f", {key.replace('_', ' ')} {value:g}" for key, value in rope["scaling"].items())
    factors = f", {len(rope['factors'])} individual factors" if rope["factors"] else ""
    state = f"{f['recurrent_layers']}; state of a text of any length: {amount(f['state_bytes'], 'bytes')}"
    shape = f"{f['heads']} of {f['head_dim']} channels, {f['kv_heads']} for keys and values"
    if latent := f["latent"]:
        shape = (
            f"{f['heads']} of {latent['plain'] + latent['rotary']} channels, latent keys and values of {f['head_dim']}"
        )
    return [
        ("context", f"{f['context_length']:,} tokens; KV cache at full length: {full} (--kv-type int8: {half})"),
        ("layers", f"{f['layers']} of {f['hidden']:,} channels, feed-forward {f['ffn']:,}"),
        *([("recurrent layers", state)] if f["recurrent_layers"] else []),
        ("attention heads", shape),
        ("output head", "shared with the embedding" if f["tied_head"] else "separate from the embedding"),
        ("rotary positions", f"base {rope['theta']:,.0f}, {scaling}{factors}"),
    ]


def _quantize_text(codes: dict[str, float]) -> str:
    if not codes:
        return "auto keeps the weights as they are; int8 and int4 are possible"
    held = " and ".join(f"{percent(share)} in {bits} bits" for bits, share in codes.items())
    return f"auto keeps the file's own codes, {held}" + ("" if sum(codes.values()) > 0.995 else ", and rounds the rest")


# --- learned drafters -------------------------------------------------------------------------------------------------


def _head_facts(path: Path, allow_pickle: bool) -> dict[str, Any]:
    from paceline.checkpoints.head_files import open_head
    from paceline.models.heads import kind_of, taps_of
    from paceline.models.lazy import kind_of as kind_of_tensor
    from paceline.models.lazy import shape_of

    head = open_head(path, allow_pickle=allow_pickle)
    ends = ("safetensors", "bin", "pt")
    files = [path] if path.is_file() else [file for end in ends for file in path.glob(f"*.{end}")]
    sizes = [(kind_of_tensor(head.tensors, name), math.prod(shape_of(head.tensors, name))) for name in head.tensors]
    return {
        "path": str(head.path),
        "head": kind_of(head.config),
        "layout": head.layout,
        "target": head.target,
        "target_layers": head.target_layers,
        "taps": list(taps_of(head.config)) or None,
        **_head_sizes(head),
        "parameters": sum(count for kind, count in sizes if not kind.endswith(("int64", "bool"))),
        "bytes": sum(file.stat().st_size for file in files),
        "dtypes": _dtypes(sizes),
        "extra": dict(head.extra),
    }


def _head_sizes(head: HeadFile) -> dict[str, Any]:
    from paceline.models.heads import AssistantConfig, BlockConfig, EagleConfig, MedusaConfig

    c = head.config
    if isinstance(c, AssistantConfig):
        vocab = c.layer.vocab_size
        return {"hidden": c.target_hidden, "vocab_size": vocab, "draft_vocab": vocab, "layers": c.layer.layers}
    if isinstance(c, EagleConfig):
        return {"hidden": c.target_hidden, "vocab_size": c.layer.vocab_size, "draft_vocab": c.draft_vocab}
    if isinstance(c, MedusaConfig):
        names = ("hidden", "vocab_size", "draft_vocab", "heads", "layers")
        return {name: getattr(c, name) for name in names} | {"shared_head": c.shared}
    if isinstance(c, BlockConfig):
        vocab, layers = c.layer.vocab_size, c.layer.layers
        sizes = {"hidden": c.layer.hidden, "vocab_size": vocab, "draft_vocab": c.draft_vocab or vocab}
        own = {"layers": layers, "block_size": c.size, "mask_token": c.mask_token}
        return sizes | own | {"markov_rank": c.markov, "confidence_head": c.confidence > 0, "selector_rank": c.selector}
    return {"hidden": c.hidden, "layers": c.layers, "rank": c.rank}


def _head_rows(f: dict[str, Any]) -> list[tuple[str, str]]:
    title, own, value = _HEADS[f["head"]]
    if f.get("markov_rank"):
        title = f"DSpark (block), Markov head of rank {f['markov_rank']}"
        title += ", confidence head" if f["confidence_head"] else ""
    elif f.get("selector_rank"):
        title = f"DFlash 2 (block), path selector of rank {f['selector_rank']}"
    taps = ", ".join(map(str, f["taps"])) if f["taps"] else "2, L // 2, L - 3 (EAGLE-3's default)"
    layers = f", of {f['target_layers']} layers" if f["target_layers"] else ""
    rows = [
        ("path", f["path"]),
        ("head", f"{title}, {f['layout']} layout"),
        ("target", (f["target"] or "not stated") + layers),
        ("hidden size", f"{f['hidden']:,}"),
        ("taps", taps),
    ]
    if "vocab_size" in f:
        rows.append(("vocabulary", f"{f['vocab_size']:,}"))
        if f["draft_vocab"] != f["vocab_size"]:
            share = f["extra"].get(_COVERAGE)
            held = f", {percent(share)} of its training text" if isinstance(share, (int, float)) else ""
            rows.append(("draft vocabulary", f"{f['draft_vocab']:,}{held}"))
    if own:
        output = "the target's output head" if f.get("shared_head") else "their own output heads"
        rows.append((own, value.format(**f, output=output)))
    rows.append(
        ("size", f"{amount(f['bytes'], 'bytes')}, {amount(f['parameters'])} parameters ({', '.join(f['dtypes'])})")
    )
    extra = [(key.replace("_", " "), _extra_text(value)) for key, value in f["extra"].items() if key != _COVERAGE]
    return rows + extra


def _extra_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_extra_text(item)}" for key, item in value.items())
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
