"""`paceline info` of a learned drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.cli.show import amount, percent

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.models.heads import HeadConfig, HeadFile

_KINDS = {
    "eagle3": "EAGLE-3",
    "eagle": "EAGLE (1 or 2)",
    "medusa": "Medusa",
    "block": "DFlash (block)",
    "exit": "early exit",
}
_COVERAGE = "coverage"
"""What training stores of how much of its text the draft vocabulary holds, a share."""


def head_facts(path: Path, allow_pickle: bool) -> dict[str, Any]:
    """What the head in this folder is and expects. Raises `PacelineError`."""
    from paceline.checkpoints.head_files import open_head
    from paceline.models.heads import kind_of

    head = open_head(path, allow_pickle=allow_pickle)
    held: dict[str, int] = {}
    for tensor in head.tensors.values():
        kind = str(tensor.dtype).removeprefix("torch.")
        held[kind] = held.get(kind, 0) + tensor.numel()
    return {
        "path": str(head.path),
        "head": kind_of(head.config),
        "layout": head.layout,
        "target": head.target,
        "target_layers": head.target_layers,
        **_expects(head),
        "parameters": sum(x.numel() for x in head.tensors.values() if x.is_floating_point()),
        "bytes": sum(x.numel() * x.element_size() for x in head.tensors.values()),
        "dtypes": dict(sorted(held.items(), key=lambda item: -item[1])),
        "extra": dict(head.extra),
    }


def _expects(head: HeadFile) -> dict[str, Any]:
    from paceline.models.heads import BlockConfig, EagleConfig, ExitConfig, MedusaConfig, taps_of

    config: HeadConfig = head.config
    facts: dict[str, Any] = {"taps": list(taps_of(config)) or None}
    if isinstance(config, EagleConfig):
        sizes = {"hidden": config.target_hidden, "vocab_size": config.layer.vocab_size}
        return facts | sizes | {"draft_vocab": config.draft_vocab}
    if isinstance(config, MedusaConfig):
        facts |= {"hidden": config.hidden, "vocab_size": config.vocab_size, "draft_vocab": config.draft_vocab}
        return facts | {"heads": config.heads, "layers": config.layers, "shared_head": config.shared}
    if isinstance(config, BlockConfig):
        vocab = config.layer.vocab_size
        facts |= {"hidden": config.layer.hidden, "vocab_size": vocab, "draft_vocab": config.draft_vocab or vocab}
        return facts | {"layers": config.layer.layers, "block_size": config.size, "mask_token": config.mask_token}
    assert isinstance(config, ExitConfig)
    return facts | {"hidden": config.hidden, "layers": config.layers, "rank": config.rank}


def head_lines(f: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts as rows of a table."""
    taps = ", ".join(map(str, f["taps"])) if f["taps"] else "2, L // 2, L - 3 (EAGLE-3's default)"
    layers = f", of {f['target_layers']} layers" if f["target_layers"] else ""
    dtypes = ", ".join(f["dtypes"])
    return [
        ("path", f["path"]),
        ("head", f"{_KINDS[f['head']]}, {f['layout']} layout"),
        ("target", (f["target"] or "not said") + layers),
        ("hidden size", f"{f['hidden']:,}"),
        ("listens to", taps),
        *_vocabulary_lines(f),
        *_own_lines(f),
        ("size", f"{amount(f['bytes'], 'bytes')}, {amount(f['parameters'])} parameters ({dtypes})"),
        *((key.replace("_", " "), _told(value)) for key, value in f["extra"].items() if key != _COVERAGE),
    ]


def _vocabulary_lines(f: dict[str, Any]) -> list[tuple[str, str]]:
    if "vocab_size" not in f:
        return []
    lines = [("vocabulary", f"{f['vocab_size']:,}")]
    if f.get("draft_vocab", f["vocab_size"]) != f["vocab_size"]:
        share = f["extra"].get(_COVERAGE)
        held = f", {percent(share)} of the text it was trained on" if isinstance(share, (int, float)) else ""
        lines.append(("draft vocabulary", f"{f['draft_vocab']:,}{held}"))
    return lines


def _own_lines(f: dict[str, Any]) -> list[tuple[str, str]]:
    if f["head"] == "medusa":
        end = "the target's output head" if f["shared_head"] else "output heads of their own"
        return [("heads", f"{f['heads']} of {f['layers']} layers, with {end}")]
    if f["head"] == "block":
        return [("block", f"{f['block_size']} tokens, {f['layers']} layers, mask token {f['mask_token']}")]
    if f["head"] == "exit":
        return [("exit", f"after {f['layers']} layers, adapter of rank {f['rank']}")]
    return []


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_told(one)}" for key, one in value.items())
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
