"""Text to token ids and back, and chat messages to text, with the `tokenizers` library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from paceline.errors import InvalidOption, InvalidPrompt, UnsupportedModel
from paceline.files.reading import MIB, library_errors, read_json_if_exists, read_text
from paceline.files.schema import TOKENIZER
from paceline.text.data_encoder import DataEncoder
from paceline.text.gguf_tokenizer import backend_from_gguf, frame, special_tokens
from paceline.text.template_text import TemplateText
from paceline.text.token_bytes import Speller, max_token_chars, token_bytes

TOKENIZER_LIMIT = 128 * MIB
"""Bytes of a tokenizer.json."""
_MOST_TEMPLATES = 32
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer; see `from_folder`, `from_gguf` and `from_transformers`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        named_templates: Mapping[str, str] | None = None,
    ) -> None:
        """Make a tokenizer.

        Args:
            backend: The tokenizer of the `tokenizers` library.
            special_tokens: Role -> text, such as "bos_token" -> "<s>"; templates use them by these names.
            chat_template: The default chat template.
            named_templates: Other templates by name. "tool_use" is used for chats with tools.
        """
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.named_templates = dict(named_templates or {})
        self.special_tokens_in_messages = False
        """True: control tokens that messages spell out become those tokens, as in transformers."""

    @staticmethod
    def from_folder(path: Path) -> Tokenizer:
        """Load tokenizer.json and its companions. Raises `UnsupportedModel` without one, `CorruptModel`."""
        config: dict[str, Any] = {}
        for file in (path / "special_tokens_map.json", path / "tokenizer_config.json"):
            config |= read_json_if_exists(file, TOKENIZER)
        backend = _backend_from_folder(path)
        special = {key: text for key in _ROLES if (text := _text(config.get(key))) is not None}
        with library_errors(f"{path / 'tokenizer_config.json'} does not fit its tokenizer"):
            _add_tokens(backend, config.get("added_tokens_decoder"))
            added = {role: config.get(f"add_{role}") for role in ("bos_token", "eos_token")}
            if added != {"bos_token": None, "eos_token": None}:  # else tokenizer.json decides
                frame(backend, special, added)
        return Tokenizer(backend, special, *_default_and_named(_templates(path, config)))

    @staticmethod
    def from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
        """Build a tokenizer from a GGUF's metadata. Raises `UnsupportedModel` and `CorruptModel`."""
        backend = backend_from_gguf(fields)
        key = "tokenizer.chat_template"
        named = {name.removeprefix(f"{key}."): text for name, text in fields.items() if name.startswith(f"{key}.")}
        return Tokenizer(backend, special_tokens(backend, fields), fields.get(key), _texts(named))

    @staticmethod
    def from_transformers(tokenizer: Any) -> Tokenizer:
        """Copy a fast tokenizer of transformers. Raises `InvalidOption` for anything else."""
        from transformers import PreTrainedTokenizerFast

        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise InvalidOption(
                f"{type(tokenizer).__name__} is not a fast tokenizer of transformers",
                "Give tokenizer=transformers.AutoTokenizer.from_pretrained(...), or a paceline Tokenizer",
            )
        backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        special = {key: text for key in _ROLES if (text := _text(getattr(tokenizer, key))) is not None}
        return Tokenizer(backend, special, *_default_and_named(_by_name(tokenizer.chat_template)))

    @property
    def kind(self) -> str:
        """Model type in the `tokenizers` library: "BPE", "Unigram", "WordPiece" or "WordLevel"."""
        return type(self._backend.model).__name__

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, added tokens included; the model may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Token, as the tokenizer spells it, -> id; added tokens included."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the BOS token, or None."""
        return self.token_id(self.special_tokens.get("bos_token"))

    @property
    def eos_token_id(self) -> int | None:
        """Id of the EOS token, or None."""
        return self.token_id(self.special_tokens.get("eos_token"))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which `decode` leaves out."""
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    def special_in(self, text: str) -> dict[int, str]:
        """Return the special tokens that occur in a text, by id."""
        if not text:
            return {}
        names = {token: self._backend.id_to_token(token) for token in self.special_ids}
        return {token: name for token, name in names.items() if name and name in text}

    @cached_property
    def digest(self) -> str:
        """Hash of everything that decides how texts and chats are tokenized."""
        about = json.dumps([self.special_tokens, self.named_templates], sort_keys=True)
        parts = (self._backend.to_str(), about, self.chat_template or "")
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()

    @cached_property
    def token_bytes(self) -> dict[int, bytes]:
        """Token id -> the bytes that it adds to a text; without special tokens."""
        return token_bytes(self._backend)

    @cached_property
    def max_token_chars(self) -> int | None:
        """Upper bound of the characters of a text that one token can stand for, or None."""
        return max_token_chars(self._backend, self.token_bytes)

    def token_id(self, token: str | None) -> int | None:
        """Return the id of the token with exactly this spelling, or None."""
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return token ids. `special`: add BOS / EOS as the model wants them; a rendered chat template has its own.

        Special tokens spelled out in the text become those tokens; in `TemplateText` only those that the template
        wrote, so that all of `TemplateText(text)` is data. Raises `InvalidPrompt` for text that is not valid Unicode
        (lone surrogates).
        """
        with library_errors("the model's tokenizer fails on this text"):
            try:
                if isinstance(text, TemplateText):
                    before, after = self._frame if special else ([], [])
                    return [*before, *self._data_encoder.encode(text), *after]
                # As a batch of one: `encode` holds the interpreter lock, which blocks all other threads.
                return list(self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)
            except (TypeError, UnicodeError) as error:
                raise InvalidPrompt(
                    "the prompt is not valid Unicode text", "Check how it was decoded from bytes"
                ) from error

    @cached_property
    def _data_encoder(self) -> DataEncoder:
        return DataEncoder(self._backend)

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        """Ids that the backend puts before and after a text."""
        bare, framed = (self._backend.encode("a", add_special_tokens=special).ids for special in (False, True))
        start = next((i for i in range(len(framed)) if framed[i : i + len(bare)] == bare), 0)
        return framed[:start], framed[start + len(bare) :]

    def starts(self, text: str) -> list[int]:
        """Return the offset in the text, in characters, at which each token of `encode(text)` begins.

        The tokens cover the text: characters that the tokenizer drops, such as repeated spaces, belong to the token
        after them, or to the last one. BOS and EOS that the text does not spell out cover nothing.
        """
        encoding = self._backend.encode_batch([text])[0]
        starts, start, end = [], 0, 0
        for (first, last), added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            start = end if added else max(start, min(first, end))
            end = max(end, last)
            starts.append(start)
        return starts

    def spell(self, text: str) -> list[int]:
        """Return token ids that add exactly this text to one that has begun: as `encode` splits it where possible.

        No special tokens, whatever the text spells. The ids end where no token has the next byte.
        """
        data = text.encode(errors="replace")
        line = self.encode("\n", special=False)
        # A line break in front absorbs what a tokenizer puts before a text, such as a space.
        after = self.encode("\n" + text, special=False)
        for ids in (self.encode(text, special=False), after[len(line) :]):
            if b"".join(self.token_bytes.get(i, b"\xff") for i in ids) == data:
                return ids
        return self._speller.spell(data)

    @cached_property
    def _speller(self) -> Speller:
        return Speller(self.token_bytes)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text; bytes that are not UTF-8 become U+FFFD. Raises `InvalidPrompt` for invalid ids."""
        try:
            # As a batch of one, as in `encode`.
            return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]
        except (OverflowError, TypeError) as error:
            raise InvalidPrompt("token ids must be integers >= 0") from error

    def template_for(self, tools: bool) -> str | None:
        """Return the chat template of a chat with or without tools."""
        return self.named_templates.get("tool_use", self.chat_template) if tools else self.chat_template

    def with_template(self, given: str | Path) -> Tokenizer:
        """Return the same tokenizer with another chat template, for chats with tools too.

        Args:
            given: A file, the name of one of the model's own templates, or the text of a template.

        Raises:
            InvalidOption: It is none of these.
        """
        own = {**self.named_templates, **({"default": self.chat_template} if self.chat_template else {})}
        template = own.get(str(given))
        if template is None and isinstance(given, str) and ("{{" in given or "{%" in given):
            template = given
        if template is None:
            if not Path(given).is_file():
                names = ", ".join(own) or "none"
                raise InvalidOption(
                    f"chat_template {str(given)!r:.200} is neither a file nor a template of the model",
                    f"Give a file with a jinja template. The model's own templates: {names}",
                )
            template = read_text(Path(given))
        made = Tokenizer(self._backend, self.special_tokens, template)
        made.special_tokens_in_messages = self.special_tokens_in_messages
        return made

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """Return the messages in the format that the model was trained on; encode the result with `special=False`.

        The text is `TemplateText`, whose data forms no control tokens, unless `special_tokens_in_messages` is set.
        `messages`: [{"role": str, "content": str}, ...]. `extra`: further variables for the template, such as `tools`.
        Raises `InvalidPrompt` for malformed messages, a model without a template, or an error that the template raises.
        """
        from paceline.text.chat_template import render

        template = self.template_for(bool(extra.get("tools")))
        if template is None:
            raise InvalidPrompt("the model has no chat template", "Give text with raw=True (--raw), or another model")
        values = {**self.special_tokens, "add_generation_prompt": add_generation_prompt, **extra}
        text = render(template, messages, values, self.special_tokens.keys() - extra.keys())
        return TemplateText.written(text.plain()) if self.special_tokens_in_messages else text


def template_of(path: Path) -> str | None:
    """Return the chat template of a folder in Hugging Face's layout. Raises `CorruptModel`."""
    return _default_and_named(_templates(path, read_json_if_exists(path / "tokenizer_config.json", TOKENIZER)))[0]


def _backend_from_folder(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file.exists():
        raise UnsupportedModel(
            f"{path} has no tokenizer.json",
            "Save one with transformers: AutoTokenizer.from_pretrained(PATH).save_pretrained(PATH)",
        )
    text = read_text(file, TOKENIZER_LIMIT)
    with library_errors(f"{file} is not a tokenizer"):
        backend = tokenizers.Tokenizer.from_str(text)
    # Settings left over from training: prompts are never cut or padded here.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_tokens(backend: tokenizers.Tokenizer, listed: Any) -> None:
    """Add the tokens that only tokenizer_config.json lists, in the order of their ids."""
    for _, entry in sorted((listed or {}).items(), key=lambda item: int(item[0])):
        if backend.token_to_id(entry["content"]) is not None:
            continue
        flags = {key: entry[key] for key in ("lstrip", "rstrip", "single_word", "normalized") if key in entry}
        token = tokenizers.AddedToken(entry["content"], special=entry.get("special", False), **flags)
        (backend.add_special_tokens if entry.get("special") else backend.add_tokens)([token])


def _text(value: Any) -> str | None:
    """Return a special token, written as a string or as {"content": string, ...}, or None."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of a folder by name: files go before tokenizer_config.json."""
    found = _by_name(config.get("chat_template"))
    files = {"default": path / "chat_template.jinja"}
    files |= {
        file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))[:_MOST_TEMPLATES]
    }
    return found | {name: read_text(file) for name, file in files.items() if file.exists()}


def _by_name(found: Any) -> dict[str, str]:
    """Return templates by name: one is the "default", several are listed with their names."""
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    return _texts(found if isinstance(found, Mapping) else {"default": found})


def _texts(found: Mapping[str, Any]) -> dict[str, str]:
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _default_and_named(found: Mapping[str, str]) -> tuple[str | None, dict[str, str]]:
    """Return the default template, else the first, and the others by name."""
    named = {name: text for name, text in found.items() if name != "default"}
    return found.get("default", next(iter(found.values()), None)), named
