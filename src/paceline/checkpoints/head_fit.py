"""Matching learned drafters to targets, and the heads that ship with Paceline."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch

from paceline.checkpoints.loader import Loaded
from paceline.errors import HeadMismatch, UnsupportedModel
from paceline.files.reading import read_json
from paceline.files.schema import HEAD
from paceline.models.config import ModelConfig
from paceline.models.heads import (
    AssistantConfig,
    BlockConfig,
    EagleConfig,
    HeadConfig,
    HeadFile,
    MedusaConfig,
    kind_of,
    taps_of,
)
from paceline.protocols import TargetWithHead
from paceline.text.tokenizer import Tokenizer
from paceline.types import Tap

_ROWS, _COLUMNS = 16, 64
_MAX_FLIPPED_SIGNS = 0.125
"""Maximum share of signs that may differ between two versions of the same model. Quantisation and light tuning flip a
few per cent of the signs. Another training run flips half of them."""

_PADDING_TOKEN = re.compile(r"\[PAD\d+\]")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a target that a head must match: hidden size, vocabulary size (rows of the output head) and number
    of layers."""

    hidden: int
    vocab: int
    layers: int


def as_host(target: Loaded) -> TargetWithHead:
    """Return the target as the host of a learned drafter. Raise `UnsupportedModel` if it cannot host one."""
    if not isinstance(target.target, TargetWithHead):
        raise UnsupportedModel(
            f"{target.path} runs as a {type(target.target).__name__}, which cannot lend its embedding and head",
            "Draft with suffix or ngram",
        )
    return target.target


def sizes_of(target: Loaded | ModelConfig) -> Sizes:
    """Return a target's sizes. Raise `UnsupportedModel` if it cannot host a learned drafter."""
    if isinstance(target, ModelConfig):
        return Sizes(target.hidden, target.vocab_size, target.layers)
    ends = as_host(target)
    hidden = ends.embed(torch.zeros(1, dtype=torch.long, device=target.target.device)).shape[-1]
    return Sizes(hidden, target.target.vocab_size, ends.layers)


def fit_to_target(head: HeadFile, target: Loaded | ModelConfig) -> HeadFile:
    """Check that a head fits a target. Return the head, with EAGLE-3's default taps {2, L // 2, L - 3} filled in if it
    names none.

    Raises:
        HeadMismatch: If the head was made for a target with another hidden size, vocabulary or number of layers.
        UnsupportedModel: If the target cannot host a learned drafter.
    """
    sizes, config = sizes_of(target), head.config
    hidden, vocab = _expected_sizes(config)
    for what, ours, theirs in (("hidden size", hidden, sizes.hidden), ("vocabulary", vocab, sizes.vocab)):
        if ours is not None and ours != theirs:
            raise _mismatch(head, f"a {what} of {ours}, and this target has {theirs}")
    if head.target_layers not in (None, sizes.layers):
        raise _mismatch(head, f"a target of {head.target_layers} layers, and this one has {sizes.layers}")
    if isinstance(config, EagleConfig) and not config.taps:
        taps: tuple[Tap, ...] = (2, sizes.layers // 2, sizes.layers - 3)
        if sizes.layers < 6:
            raise _mismatch(head, f"taps (2, L // 2, L - 3), and this target has {sizes.layers} layers")
        config = replace(config, taps=taps)
    last = sizes.layers - (kind_of(config) != "mtp")  # MiMo's MTP layer reads the stream after the last layer
    beyond = [tap for tap in taps_of(config) if tap != "final" and tap > last]
    if beyond:
        raise _mismatch(
            head, f"the stream entering layer {beyond[0]}, and this target has {sizes.layers} layers (from 0)"
        )
    return replace(head, config=config)


def _expected_sizes(config: HeadConfig) -> tuple[int, int | None]:
    """Return the hidden size and the vocabulary size that the head expects of its target."""
    if isinstance(config, (EagleConfig, AssistantConfig)):
        return config.target_hidden, config.layer.vocab_size
    if isinstance(config, BlockConfig):
        return config.layer.hidden, config.layer.vocab_size
    return config.hidden, config.vocab_size if isinstance(config, MedusaConfig) else None


def _mismatch(head: HeadFile, difference: str) -> HeadMismatch:
    made = f"It was trained for {head.target}. Use it with that model" if head.target else "Use it with its own model"
    return HeadMismatch(f"the head {head.path} does not fit this target: it expects {difference}", made)


def vocabulary_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the vocabulary as token -> id, without the padding tokens that GGUF converters add."""
    return {t: i for t, i in tokenizer.vocabulary.items() if not _PADDING_TOKEN.fullmatch(t)}


def fingerprint(target: Loaded) -> str:
    """Return the fingerprint of a target, `<sizes and tokens>:<signs of the embedding>`, in hex. Heads store it.

    The first part is a hash of the vocabulary, the hidden size and the number of layers. The second part holds the
    signs of 64 columns in 16 rows that are spread over the vocabulary. Signs do not depend on the dtype. Use
    `same_target` to compare fingerprints.
    """
    vocabulary, sizes = vocabulary_of(target.tokenizer), sizes_of(target)
    text = repr((sizes.hidden, sizes.layers, sorted(vocabulary.items())))
    rows = torch.linspace(0, max(vocabulary.values(), default=0), _ROWS, device=target.target.device).long()
    signs = as_host(target).embed(rows)[:, :_COLUMNS] > 0
    bits = "".join("01"[int(bit)] for bit in signs.flatten().tolist())
    return f"{sha256(text.encode()).hexdigest()[:32]}:{int(bits, 2):0{len(bits) // 4}x}"


def same_target(one: str, other: str) -> bool:
    """Return True if two fingerprints belong to the same model, even if one was quantised, lightly tuned, or stored in
    another dtype."""
    (tokens, signs), (tokens2, signs2) = one.split(":"), other.split(":")
    if tokens != tokens2 or len(signs) != len(signs2):
        return False
    return bin(int(signs, 16) ^ int(signs2, 16)).count("1") <= _MAX_FLIPPED_SIGNS * 4 * len(signs)


SHIPPED_HEADS = Path(__file__).parents[1] / "trained"
"""Folder with the heads that ship with Paceline."""


def shipped_head(kind: str, target: Loaded) -> Path | None:
    """Return the folder of the shipped head for this target, or None if there is none. The head is found by its
    fingerprint.

    Args:
        kind: "eagle3", "medusa", "block", "exit", or "mtp". For "mtp", the result is the target's own path.
        target: The target.
    """
    if not isinstance(target.target, TargetWithHead):
        return None
    if kind == "mtp":
        return target.path if target.has_mtp else None
    ours = ""
    for path in sorted(SHIPPED_HEADS.glob("*/config.json")):
        extra = read_json(path, HEAD).get("paceline") or {}
        if extra.get("kind") == kind and "fingerprint" in extra:
            ours = ours or fingerprint(target)
            if same_target(ours, extra["fingerprint"]):
                return path.parent
    return None
