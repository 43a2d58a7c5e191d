"""Builds tokenizers from GGUF metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama", "gemma4")."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.reading import library_errors
from paceline.text.gguf_splitters import SPLITTERS, Splitter

Fields = Mapping[str, Any]

_MAX_TOKEN_LENGTH = 1024
"""Maximum length of a token, in characters. It is limited because finding all ways to cut a token in two takes
quadratic time."""

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")
"""Added tokens of Phi-3 that do not absorb the white space after them."""


def backend_from_gguf(fields: Fields, *, strips_spaces: bool = False) -> Tokenizer:
    """Build the tokenizer that the metadata describes, including its special tokens and its rules for BOS and EOS.

    Args:
        fields: GGUF metadata, key -> value.
        strips_spaces: True if added tokens of a SentencePiece tokenizer absorb the white space after them. The metadata
            has no field for this. Like Paceline, llama.cpp decides it by the architecture.

    Raises:
        UnsupportedModel: If the tokenizer model or the splitter is not supported.
        CorruptModel: If metadata is missing or inconsistent.
    """
    model = fields.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama", "gemma4"):
        raise UnsupportedModel(
            f"the GGUF tokenizer {model!r} is not supported",
            "Supported: gpt2 (byte-level BPE), llama and gemma4 (SentencePiece BPE)",
        )
    tokens, kinds = _vocabulary(fields)
    if model == "gpt2":
        splitter = _splitter_of(fields)
        backend, bos = _byte_level(fields, tokens, splitter), splitter.bos
    else:
        tokens = _sentencepiece_spelling(tokens, kinds)
        backend, bos = _sentencepiece(fields, tokens, kinds), True
    _add_tokens(backend, tokens, kinds, strips_spaces and model == "llama")
    defaults = {"bos_token": bos, "eos_token": False}
    added = {role: fields.get(f"tokenizer.ggml.add_{role}", default) for role, default in defaults.items()}
    set_bos_and_eos(backend, special_tokens(backend, fields), added)
    return backend


def special_tokens(backend: Tokenizer, fields: Fields) -> dict[str, str]:
    """Return role -> text of the special tokens that the metadata names."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: fields.get(f"tokenizer.ggml.{key}_token_id") for role, key in keys.items()}
    texts = {role: backend.id_to_token(index) for role, index in ids.items() if index is not None}
    return {role: text for role, text in texts.items() if text is not None}


def _vocabulary(fields: Fields) -> tuple[list[str], list[int]]:
    tokens = fields.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CorruptModel("the GGUF file contains no vocabulary", "Download the file again")
    if (longest := max(map(len, tokens))) > _MAX_TOKEN_LENGTH:
        raise CorruptModel(
            f"the GGUF vocabulary contains a token of {longest} characters, "
            f"but at most {_MAX_TOKEN_LENGTH} are allowed",
            "Convert the model again",
        )
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        raise CorruptModel("the GGUF vocabulary contains a token twice", "Convert the model again")
    kinds = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise CorruptModel(
            f"the GGUF file contains {len(tokens)} tokens but {len(kinds)} token types", "Convert the model again"
        )
    return tokens, kinds


def _sentencepiece_spelling(tokens: list[str], kinds: list[int]) -> list[str]:
    """Restore "▁", SentencePiece's space, in user-defined tokens, because converters write a plain space there."""
    taken = set(tokens)
    spelled = []
    for token, kind in zip(tokens, kinds, strict=True):
        new = token.replace(" ", "▁") if kind == _USER_DEFINED else token
        spelled.append(token if new in taken else new)
    return spelled


def _splitter_of(fields: Fields) -> Splitter:
    name = fields.get("tokenizer.ggml.pre") or "default"
    if name not in SPLITTERS:
        raise UnsupportedModel(
            f"the GGUF pre-tokenizer {name!r} is not supported",
            f"Use the model's Hugging Face folder instead; supported: {', '.join(sorted(SPLITTERS))}",
        )
    return SPLITTERS[name]


def _byte_level(fields: Fields, tokens: list[str], splitter: Splitter) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in fields.get("tokenizer.ggml.merges") or ()]
    model = _bpe(models.BPE, tokens, merges, ignore_merges=splitter.ignore_merges)
    backend = Tokenizer(model)
    backend.pre_tokenizer = splitter.build()
    backend.decoder = decoders.ByteLevel()
    if splitter.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(fields: Fields, tokens: list[str], kinds: list[int]) -> Tokenizer:
    scores = fields.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise CorruptModel(
            f"the GGUF file contains {len(tokens)} tokens but {len(scores)} scores", "Convert the model again"
        )
    unknown = fields.get("tokenizer.ggml.unknown_token_id", 0)
    listed = [tuple(merge.split(" ")) for merge in fields.get("tokenizer.ggml.merges") or ()]
    merges = listed if fields["tokenizer.ggml.model"] == "gemma4" else merges_from_scores(tokens, kinds, scores)
    name = tokens[unknown] if unknown < len(tokens) else None
    backend = Tokenizer(_bpe(models.BPE, tokens, merges, unk_token=name, fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = space
    backend.decoder = decoders.Sequence(steps)
    return backend


def _bpe(make: Any, tokens: list[str], merges: list[Any], **options: Any) -> Any:
    with library_errors("the GGUF vocabulary and merges do not fit", "Convert the model again"):
        return make(vocab={token: index for index, token in enumerate(tokens)}, merges=merges, **options)


def merges_from_scores(tokens: list[str], kinds: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece BPE, best first.

    SentencePiece joins the neighbours that form the token with the highest score. So every way to cut a token into two
    other tokens is a merge with the token's score. In a tie, the longer token comes first, and then the longer left
    part, so that runs grow from the left. User-defined runs of spaces come first, because SentencePiece extracts them
    from the text before all merges.
    """
    known = {token for token, kind in zip(tokens, kinds, strict=True) if kind in (1, _USER_DEFINED)}
    order = sorted(
        (-score if kind == 1 else -math.inf, -len(token), token)
        for token, kind, score in zip(tokens, kinds, scores, strict=True)
        if kind == 1 or (kind == _USER_DEFINED and not token.strip("▁"))
    )
    return [
        (token[:cut], token[cut:])
        for _, size, token in order
        for cut in range(-size - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]


def _add_tokens(backend: Tokenizer, tokens: list[str], kinds: list[int], strips: bool) -> None:
    """Add the control tokens, which `decode` omits, and the user-defined tokens, which it keeps."""
    added = {_UNKNOWN: True, _CONTROL: True, _USER_DEFINED: False}
    found = [
        AddedToken(token, special=added[kind], normalized=False, rstrip=strips and token not in _KEEP_SPACE)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in added
    ]
    backend.add_tokens(found)
    backend.add_special_tokens([token for token in found if token.special])


def set_bos_and_eos(backend: Tokenizer, special: Mapping[str, str], added: Mapping[str, bool | None]) -> None:
    """Make `backend` add BOS and EOS to each text, or not.

    Args:
        backend: The tokenizer to change.
        special: Role -> text of special tokens.
        added: For "bos_token" and "eos_token": True to add the token, False not to add it, and None to keep the current
            setting.
    """
    found: dict[str, list[tuple[str, int]]] = {}
    for role, wanted in added.items():
        text = special.get(role, "")
        index = backend.token_to_id(text)
        keep = index in backend.encode("").ids if wanted is None else wanted
        found[role] = [(text, index)] if keep and index is not None else []
    bos, eos = found["bos_token"], found["eos_token"]
    # A post-processor cannot be removed, but a template that contains nothing but the text has the same effect.
    single = [*(text for text, _ in bos), "$A", *(text for text, _ in eos)]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(dict.fromkeys(bos + eos)))
