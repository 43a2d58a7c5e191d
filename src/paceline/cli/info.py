"""`paceline info`: what a model is made of, read from its headers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.info_head import head_facts, head_lines
from paceline.cli.options import (
    DEMO,
    AllowPickle,
    ModelName,
    NamedModel,
    Revision,
    Token,
    one_model,
    progress_wanted,
)
from paceline.cli.show import amount, percent

if TYPE_CHECKING:
    from rich.table import Table

    from paceline.checkpoints.checkpoint import Checkpoint
    from paceline.checkpoints.gguf_file import GGUFFile
    from paceline.models.config import ModelConfig, RopeConfig


def info(
    named: NamedModel = None,
    *,
    model: ModelName = DEMO,
    revision: Revision = None,
    token: Token = None,
    allow_pickle: AllowPickle = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Show what MODEL (a model, or a learned drafter) is made of, without running it. A hub model is fetched first."""
    facts = _facts(one_model(named, model), revision, token, allow_pickle)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    from rich.console import Console

    Console().print(_table(head_lines(facts) if "head" in facts else _lines(facts)))


def _facts(model: str, revision: str | None, token: str | None, allow_pickle: bool) -> dict[str, Any]:
    from paceline.checkpoints.checkpoint import eos_token_ids, open_checkpoint
    from paceline.checkpoints.gguf_file import read_gguf
    from paceline.checkpoints.head_files import holds_head
    from paceline.checkpoints.loader import native
    from paceline.files.locate import resolve

    path = resolve(model, revision=revision, token=token, quiet=not progress_wanted(False), allow_pickle=allow_pickle)
    if path.is_dir() and holds_head(path):
        return head_facts(path, allow_pickle)
    checkpoint = open_checkpoint(path, allow_pickle=allow_pickle)
    config = native(checkpoint)
    header = read_gguf(path) if path.is_file() else None
    eos = eos_token_ids(checkpoint.config, checkpoint.generation, checkpoint.tokenizer)
    return {
        "path": str(path),
        "file_bytes": _file_bytes(path),
        **_name(checkpoint.config),
        "runs": "natively" if config else "through transformers",
        "runner": _runner(config) if config else "torch",
        **(_architecture(config) if config else {}),
        **_weights(checkpoint, header),
        "own_codes": _own_codes(header),
        "vocab_size": checkpoint.config.get("vocab_size") or checkpoint.tokenizer.vocab_size,
        "tokens": checkpoint.tokenizer.vocab_size,
        "tokenizer": _tokenizer_kind(checkpoint, header),
        "eos": [{"id": i, "token": checkpoint.tokenizer.decode([i], skip_special=False)} for i in eos],
        "chat_template": checkpoint.tokenizer.chat_template is not None,
        "generation": checkpoint.generation,
    }


def _file_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.bin")]
    return sum(file.stat().st_size for file in files)


def _name(raw: dict[str, Any]) -> dict[str, Any]:
    family = raw["model_type"]
    return {"architecture": (raw.get("architectures") or [family])[0], "family": family}


def _architecture(config: ModelConfig) -> dict[str, Any]:
    return {
        "layers": config.layers,
        "hidden": config.hidden,
        "ffn": config.ffn,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "context_length": config.context_length,
        "rope": _rope(config.rope),
        "tied_head": config.tied,
        "cache_bytes": config.cache_bytes(config.context_length),
    }


def _runner(config: ModelConfig) -> str:
    """The runner of the layers with default options, and how to get a faster one."""
    from paceline.checkpoints.loader import pick_device, pick_dtype
    from paceline.models.runner_choice import runner_of

    device = pick_device("auto")
    runner = runner_of(config, device, pick_dtype("auto", device))
    return f"{runner.name}. {runner.remedy}" if runner.remedy else runner.name


def _rope(rope: RopeConfig) -> dict[str, Any]:
    facts = asdict(rope) | {"scaling": dict(rope.scaling)}
    return facts | {"factors": list(rope.factors)}


def _weights(checkpoint: Checkpoint, header: GGUFFile | None) -> dict[str, Any]:
    """Format, parameters in all, and how many of them each dtype holds, most first."""
    form, tensors = _gguf_tensors(header) if header else _folder_tensors(checkpoint)
    held: dict[str, int] = {}
    for kind, size in tensors:
        held[kind] = held.get(kind, 0) + size
    ordered = dict(sorted(held.items(), key=lambda item: -item[1]))
    return {"format": form, "parameters": sum(held.values()), "dtypes": ordered}


Tensors = Iterable[tuple[str, int]]
"""(dtype, elements) of each tensor."""


def _gguf_tensors(header: GGUFFile) -> tuple[str, Tensors]:
    """From the header: asking the checkpoint for its tensors would dequantise every one of them."""
    # Rotary factors are stored as a tensor and are none of the model's parameters.
    tensors = [tensor for name, tensor in header.tensors.items() if not name.startswith("rope_")]
    return "GGUF", [(tensor.kind, math.prod(tensor.shape)) for tensor in tensors]


def _own_codes(header: GGUFFile | None) -> dict[str, float]:
    """What `--quantize` packs as it stands: bits -> the share of the file's matrices that they hold."""
    from paceline.checkpoints.gguf_codes import BITS

    matrices = [x for x in header.tensors.values() if len(x.shape) > 1] if header else []
    sizes = [(BITS.get(x.kind), math.prod(x.shape)) for x in matrices]
    total = sum(size for _, size in sizes)
    held = {bits: sum(size for b, size in sizes if b == bits) / total for bits in sorted({*BITS.values()}) if total}
    return {str(bits): share for bits, share in held.items() if share}


def _folder_tensors(checkpoint: Checkpoint) -> tuple[str, Tensors]:
    safe = any(checkpoint.path.glob("*.safetensors"))
    tensors = [checkpoint.tensors[name] for name in checkpoint.tensors]
    sizes = [(str(tensor.dtype).removeprefix("torch."), tensor.numel()) for tensor in tensors]
    return ("safetensors" if safe else "pickle"), sizes


def _tokenizer_kind(checkpoint: Checkpoint, header: GGUFFile | None) -> str:
    if header:
        parts = [header.fields.get(f"tokenizer.ggml.{key}") for key in ("model", "pre")]
        return " / ".join(str(part) for part in parts if part)
    return checkpoint.tokenizer.kind


def _table(lines: list[tuple[str, str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines:
        table.add_row(name, Text(value))
    return table


def _lines(f: dict[str, Any]) -> list[tuple[str, str]]:
    from paceline.drafters.factory import AUTO

    shares = ", ".join(f"{kind} {percent(size / f['parameters'])}" for kind, size in f["dtypes"].items())
    name = f["architecture"] if f["architecture"] == f["family"] else f"{f['architecture']} ({f['family']})"
    return [
        ("model", f"{name}, {amount(f['parameters'])} parameters"),
        ("path", f["path"]),
        ("file", f"{f['format']}, {amount(f['file_bytes'], 'bytes')}: {shares}"),
        ("runs", f["runs"] + (f"; its layers on {f['runner']}" if f["runs"] == "natively" else "")),
        *([("--quantize", _quantise_line(f["own_codes"]))] if f["runs"] == "natively" else []),
        ("default drafter", AUTO),
        ("default sampling", _sampling_line(f["generation"])),
        ("chat template", _yes(f["chat_template"])),
        *(_architecture_lines(f) if "layers" in f else []),
        ("vocabulary", _vocabulary_line(f)),
        ("end of sequence", ", ".join(f"{eos['token']!r} (id {eos['id']})" for eos in f["eos"]) or "none"),
    ]


def _vocabulary_line(f: dict[str, Any]) -> str:
    unused = f["vocab_size"] - f["tokens"]
    padding = f", and {unused:,} unused rows" if unused > 0 else ""
    return f"{f['tokens']:,} tokens{padding} ({f['tokenizer']})"


def _sampling_line(generation: dict[str, Any]) -> str:
    from paceline.sampling.parameters import recommended

    found = ", ".join(f"{name} {value}" for name, value in recommended(generation).items())
    return f"{found} (recommended by the model)" if found else "greedy (the model recommends nothing)"


def _architecture_lines(f: dict[str, Any]) -> list[tuple[str, str]]:
    """What only the native decoder reads from a config."""
    cache = f["cache_bytes"]
    return [
        ("context", f"{f['context_length']:,} tokens; KV cache at full length: {amount(cache, 'bytes')}"),
        ("layers", f"{f['layers']} of {f['hidden']:,} channels, feed-forward {f['ffn']:,}"),
        ("attention heads", f"{f['heads']} of {f['head_dim']} channels, {f['kv_heads']} for keys and values"),
        ("output head", "the embedding matrix" if f["tied_head"] else "a matrix of its own"),
        ("rotary positions", _rope_line(f["rope"])),
    ]


def _rope_line(rope: dict[str, Any]) -> str:
    scaling = "".join(f", {key.replace('_', ' ')} {value:g}" for key, value in rope["scaling"].items())
    factors = f", {len(rope['factors'])} factors of its own" if rope["factors"] else ""
    kind = "not scaled" if rope["kind"] == "default" else f"scaling {rope['kind']}"
    return f"base {rope['theta']:,.0f}, {kind}{scaling}{factors}"


def _quantise_line(own: dict[str, float]) -> str:
    if not own:
        return "int8 or int4"
    held = " and ".join(f"{percent(share)} in {bits} bits" for bits, share in own.items())
    return f"int8 keeps the file's own codes, {held}" + ("" if sum(own.values()) > 0.995 else ", and rounds the rest")


def _yes(value: bool) -> str:
    return "yes" if value else "no"
