"""Text <-> token ids, and chat messages -> text, over the `tokenizers` library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidOption, InvalidPrompt, UnsupportedModel
from paceline.files.reading import MIB, library_errors, read_json_if_exists, read_text
from paceline.files.schema import TOKENIZER, check

if TYPE_CHECKING:
    import tokenizers

    from paceline.text.token_bytes import Speller

_LIMIT = 128 * MIB
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer. Make one with `from_folder` or `from_gguf`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """`special_tokens`: role -> text, "bos_token" -> "<s>" for instance; templates may use them by that name."""
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template

    @staticmethod
    def from_folder(path: Path) -> Tokenizer:
        """From tokenizer.json and its companions. Raises `UnsupportedModel` without one, `CorruptModel`."""
        config: dict[str, Any] = {}
        for file in (path / "special_tokens_map.json", path / "tokenizer_config.json"):
            found = read_json_if_exists(file)
            check(file, found, TOKENIZER)
            config |= found
        backend = _backend_from_folder(path)
        special = {key: text for key in _NAMED if (text := _text(config.get(key))) is not None}
        with library_errors(f"{path / 'tokenizer_config.json'} does not fit its tokenizer"):
            _add_listed(backend, config.get("added_tokens_decoder"))
            _frame_as_told(backend, config, special)
        return Tokenizer(backend, special, _template(path, config))

    @staticmethod
    def from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
        """From a GGUF's metadata as plain values. Raises `UnsupportedModel` and `CorruptModel`."""
        from paceline.text.gguf_tokenizer import backend_from_gguf

        backend = backend_from_gguf(fields)
        tokens = fields["tokenizer.ggml.tokens"]
        special = {}
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            index = fields.get(f"tokenizer.ggml.{key}_token_id")
            if index is not None and index < len(tokens):
                special[f"{role}_token"] = tokens[index]
        return Tokenizer(backend, special, fields.get("tokenizer.chat_template"))

    @staticmethod
    def from_transformers(tokenizer: Any) -> Tokenizer:
        """From a fast tokenizer of transformers, which is left as it is. Raises `InvalidOption` for anything else."""
        from tokenizers import Tokenizer as Backend
        from transformers import PreTrainedTokenizerFast

        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise InvalidOption(
                f"{type(tokenizer).__name__} is not a fast tokenizer of transformers",
                "Give tokenizer=transformers.AutoTokenizer.from_pretrained(...), or a paceline Tokenizer",
            )
        backend = Backend.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        special = {key: text for key in _NAMED if (text := _text(getattr(tokenizer, key))) is not None}
        return Tokenizer(backend, special, _one_template(tokenizer.chat_template))

    @property
    def kind(self) -> str:
        """The model in the sense of the `tokenizers` library: "BPE", "Unigram", "WordPiece" or "WordLevel"."""
        return type(self._backend.model).__name__

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, added ones included; a model may have more rows than that."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Token -> id, added tokens included, each as the tokenizer spells it."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self.token_id(self.special_tokens.get("bos_token"))

    @property
    def eos_token_id(self) -> int | None:
        return self.token_id(self.special_tokens.get("eos_token"))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `decode` leaves out."""
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def digest(self) -> str:
        """Names this tokenizer: two with the same digest read every text and every chat alike."""
        parts = (self._backend.to_str(), json.dumps(self.special_tokens, sort_keys=True), self.chat_template or "")
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()

    @cached_property
    def surfaces(self) -> dict[int, bytes]:
        """Token id -> the bytes that it adds to a text; without special tokens."""
        from paceline.text.token_bytes import surfaces

        return surfaces(self._backend)

    @cached_property
    def longest(self) -> int | None:
        """The most characters of a text that one token can stand for; None where there is no such bound."""
        from paceline.text.token_bytes import longest

        return longest(self._backend, self.surfaces)

    def token_id(self, token: str | None) -> int | None:
        """The id of one token spelled exactly so, or None."""
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids. `special`: with the BOS / EOS the model wants; a rendered chat template brings its own.

        Special tokens spelled out in the text become those tokens. Raises `InvalidPrompt` for text that is not
        Unicode (lone surrogates).
        """
        with library_errors("the model's tokenizer fails on this text"):
            try:
                # As a batch of one: `encode` keeps the interpreter from all other threads as long as it takes.
                return list(self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)
            except (TypeError, UnicodeError) as error:
                raise InvalidPrompt(
                    "the prompt is not valid Unicode text", "Decode the bytes it came from properly"
                ) from error

    def starts(self, text: str) -> list[int]:
        """Where in the text, in characters, each token of `encode(text)` begins.

        The tokens cover the text: what the tokenizer drops, such as repeated spaces, belongs to the token after it, or
        to the last one. BOS and EOS that the text does not spell out cover nothing.
        """
        read = self._backend.encode_batch([text])[0]
        starts, start, end = [], 0, 0
        for (first, last), added in zip(read.offsets, read.special_tokens_mask, strict=True):
            start = end if added else max(start, min(first, end))
            end = max(end, last)
            starts.append(start)
        return starts

    def spell(self, text: str) -> list[int]:
        """Token ids that add exactly this to a text that has begun: cut as `encode` cuts it where that can be.

        Never a special token, whatever the text spells. It ends where no token has the next byte.
        """
        said = text.encode(errors="replace")
        line = self.encode("\n", special=False)
        # What a tokenizer puts before a text (a space, say) does not belong here; a line break in front keeps it away.
        after = self.encode("\n" + text, special=False)
        for ids in (self.encode(text, special=False), after[len(line) :]):
            if b"".join(self.surfaces.get(i, b"\xff") for i in ids) == said:
                return ids
        return self._speller.spell(said)

    @cached_property
    def _speller(self) -> Speller:
        from paceline.text.token_bytes import Speller

        return Speller({said: i for i, said in reversed(self.surfaces.items())})

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text; bytes that are no UTF-8 become U+FFFD. Raises `InvalidPrompt` for ids that are no ids."""
        try:
            # As a batch of one, for the reason that `encode` gives.
            return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]
        except (OverflowError, TypeError) as error:
            raise InvalidPrompt("token ids must be integers from 0 up") from error

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The messages as the model was taught to read them; encode the result with `special=False`.

        `messages`: [{"role": str, "content": str}, ...]. `extra`: further names for the template. Raises
        `InvalidPrompt` for malformed messages, a model without a template, or a template's own refusal.
        """
        from paceline.text.chat_template import render

        if self.chat_template is None:
            raise InvalidPrompt("the model has no chat template", "Give text with raw=True (--raw), or another model")
        values = {**self.special_tokens, "add_generation_prompt": add_generation_prompt, **extra}
        return render(self.chat_template, messages, values)


def _backend_from_folder(path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    file = path / "tokenizer.json"
    if not file.exists():
        raise UnsupportedModel(
            f"{path} has no tokenizer.json",
            "Save one with transformers: AutoTokenizer.from_pretrained(PATH).save_pretrained(PATH)",
        )
    text = read_text(file, _LIMIT)
    with library_errors(f"{file} is not a tokenizer"):
        backend = Backend.from_str(text)
    # Left from training; a prompt is never cut or padded here.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_listed(backend: tokenizers.Tokenizer, listed: Any) -> None:
    """Tokens that only tokenizer_config.json knows, in the order of their ids."""
    from tokenizers import AddedToken

    for _, entry in sorted((listed or {}).items(), key=lambda item: int(item[0])):
        if backend.token_to_id(entry["content"]) is not None:
            continue
        flags = {key: entry[key] for key in ("lstrip", "rstrip", "single_word", "normalized") if key in entry}
        token = AddedToken(entry["content"], special=entry.get("special", False), **flags)
        (backend.add_special_tokens if entry.get("special") else backend.add_tokens)([token])


def _frame_as_told(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Follow `add_bos_token` and `add_eos_token` where tokenizer_config.json has them; else tokenizer.json decides."""
    from paceline.text.gguf_tokenizer import frame

    told = {role: config.get(f"add_{role}") for role in ("bos_token", "eos_token")}
    if all(wanted is None for wanted in told.values()):
        return
    now = backend.encode("").ids
    around: list[tuple[str, int] | None] = []
    for role, wanted in told.items():
        text = special.get(role, "")
        index = backend.token_to_id(text)
        keep = index in now if wanted is None else wanted
        around.append((text, index) if keep and index is not None else None)
    frame(backend, *around)


def _text(value: Any) -> str | None:
    """A special token, written as a string or as {"content": string, ...}."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def _template(path: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config's: a string, or a list of which "default" is taken."""
    file = path / "chat_template.jinja"
    if file.exists():
        return read_text(file)
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    return _one_template(found)


def _one_template(found: Any) -> str | None:
    """A template, or of several by name "default", else the first."""
    if isinstance(found, Mapping):
        found = found.get("default", next(iter(found.values()), None))
    return found if isinstance(found, str) else None
