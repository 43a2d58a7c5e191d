"""Small tokenizers of every kind, trained on demand, and models for them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from paceline.checkpoints.loader import Loaded
from paceline.drafters.vocab_map import SAMPLE
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.testing import TINY, random_tensors
from paceline.text.gguf_tokenizer import set_bos_and_eos
from paceline.text.tokenizer import Tokenizer
from tests.support.toys import toy_dtype

ROLES = {"bos_token": "<s>", "eos_token": "</s>"}


def byte_level(size: int = 400, prefix: bool = False, nfc: bool = False) -> Tokenizer:
    """Return a byte-level tokenizer as in GPT-2: letters represent bytes."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    if nfc:
        backend.normalizer = normalizers.NFC()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return trained(backend, trainers.BpeTrainer, size, initial_alphabet=letters)


def sentencepiece(size: int = 500, prefix: bool = True) -> Tokenizer:
    """Return a tokenizer as in Llama 2: "▁" is a space, unknown characters are bytes, texts begin with a space."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    special = ["<unk>", *ROLES.values()]
    said = json.loads(trained(backend, trainers.BpeTrainer, size - 256, special_tokens=special)._backend.to_str())
    # Byte tokens are ordinary tokens without a merge. Their ids precede the ids of all learned tokens.
    first = [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    learnt = sorted(said["model"]["vocab"], key=said["model"]["vocab"].__getitem__)
    said["model"]["vocab"] = {token: i for i, token in enumerate(dict.fromkeys(first + learnt))}
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(said)), ROLES)


def word_piece(size: int = 300) -> Tokenizer:
    """Return a tokenizer as in BERT: lower case, "##" before the continuation of a word, and no spaces."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return trained(backend, trainers.WordPieceTrainer, size, special_tokens=["[UNK]", *ROLES.values()])


def unigram(size: int = 200) -> Tokenizer:
    """Return a tokenizer as in T5: whole pieces with scores, and spaces at the beginning of words."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return trained(backend, trainers.UnigramTrainer, size, special_tokens=["<unk>", *ROLES.values()], unk_token="<unk>")


def letters() -> Tokenizer:
    """Return a tokenizer with one token per character of the sample. Other characters have no token."""
    alphabet = [*sorted(set(SAMPLE)), "</s>"]
    backend = tokenizers.Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(alphabet)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, {"eos_token": "</s>"})


_TRAINED: dict[tuple[str, str, int], str] = {}
"""Untrained tokenizer, trainer and size -> the trained tokenizer, because hundreds of tests use the same few."""


def trained(backend: tokenizers.Tokenizer, kind: Any, size: int, **how: Any) -> Tokenizer:
    key = backend.to_str(), repr((kind, sorted(how.items()))), size
    if key not in _TRAINED:
        how = {"special_tokens": list(ROLES.values())} | how
        backend.train_from_iterator([SAMPLE], kind(vocab_size=size, show_progress=False, **how))
        _TRAINED[key] = backend.to_str()
    return Tokenizer(tokenizers.Tokenizer.from_str(_TRAINED[key]), ROLES)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": byte_level,
    "byte-level, small": lambda: byte_level(300),
    "byte-level, NFC, a space before": lambda: byte_level(350, prefix=True, nfc=True),
    "sentencepiece": sentencepiece,
    "sentencepiece, no space before": lambda: sentencepiece(600, prefix=False),
    "word piece": word_piece,
    "unigram": unigram,
    "letters": letters,
}


@cache
def tokenizer(kind: str) -> Tokenizer:
    return KINDS[kind]()


def framed(words: Tokenizer) -> Tokenizer:
    """Return the same tokenizer with "<s>" before every text."""
    backend = tokenizers.Tokenizer.from_str(words._backend.to_str())
    set_bos_and_eos(backend, ROLES, {"bos_token": True, "eos_token": False})
    return Tokenizer(backend, ROLES)


def speaker(words: Tokenizer, seed: int = 0, padded: int = 0) -> Loaded:
    """Return a random model for a tokenizer, with `padded` extra rows beyond its tokens."""
    return _speaker(words, random_tensors(_config(words, padded), seed), padded)


def renumbered(words: Tokenizer, seed: int = 0) -> Loaded:
    """Return the model of `speaker(words)` with other token ids, and otherwise the same."""
    said = json.loads(words._backend.to_str())
    new = list(range(words.vocab_size))
    random.Random(seed).shuffle(new)
    said["model"]["vocab"] = {token: new[i] for token, i in said["model"]["vocab"].items()}
    for token in said["added_tokens"]:
        token["id"] = new[token["id"]]
    said["added_tokens"].sort(key=lambda token: token["id"])
    tensors = random_tensors(_config(words))
    embedded = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.empty_like(embedded).index_copy(0, torch.tensor(new), embedded)
    return _speaker(Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(said)), words.special_tokens), tensors)


def _config(words: Tokenizer, padded: int = 0) -> ModelConfig:
    size = max(words.vocabulary.values()) + 1 + padded
    return replace(TINY, vocab_size=size, hidden=16, heads=2, kv_heads=1, ffn=16, layers=1, context_length=512)


def _speaker(words: Tokenizer, tensors: dict[str, Tensor], padded: int = 0) -> Loaded:
    model = Decoder(_config(words, padded), tensors, toy_dtype(), torch.device("cpu"))
    end = words.eos_token_id
    return Loaded(model, words, () if end is None else (end,), {}, Path("tiny"))
