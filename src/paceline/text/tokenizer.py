"""Converts text to token ids and back, and chat messages to text, with the `tokenizers` library."""

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
from paceline.text.gguf_tokenizer import backend_from_gguf, set_bos_and_eos, special_tokens
from paceline.text.template_text import TemplateText
from paceline.text.token_bytes import Speller, max_token_chars, token_bytes

TOKENIZER_LIMIT = 128 * MIB
"""Maximum size of a tokenizer.json in bytes."""
_MAX_TEMPLATES = 32
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer. Create it with `from_folder`, `from_gguf` or `from_transformers`.

    Attributes:
        special_tokens: Role -> text, such as "bos_token" -> "<s>".
        chat_template: The default chat template, or None.
        named_templates: Other chat templates by name.
        special_tokens_in_messages: True if control tokens that are spelled out in messages become tokens, as in
            transformers.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        named_templates: Mapping[str, str] | None = None,
    ) -> None:
        """Create a tokenizer.

        Args:
            backend: The tokenizer of the `tokenizers` library.
            special_tokens: Role -> text, such as "bos_token" -> "<s>". Chat templates use these names.
            chat_template: The default chat template.
            named_templates: Other chat templates by name. "tool_use" is used for chats with tools.
        """
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.named_templates = dict(named_templates or {})
        self.special_tokens_in_messages = False

    @staticmethod
    def from_folder(path: Path) -> Tokenizer:
        """Load tokenizer.json and the files next to it.

        Raises:
            UnsupportedModel: If there is no tokenizer.json.
            CorruptModel: If a file is damaged.
        """
        config: dict[str, Any] = {}
        for file in (path / "special_tokens_map.json", path / "tokenizer_config.json"):
            config |= read_json_if_exists(file, TOKENIZER)
        backend = _backend_from_folder(path)
        special = {key: text for key in _ROLES if (text := _text(config.get(key))) is not None}
        with library_errors(f"{path / 'tokenizer_config.json'} does not fit its tokenizer"):
            _add_tokens(backend, config.get("added_tokens_decoder"))
            added = {role: config.get(f"add_{role}") for role in ("bos_token", "eos_token")}
            if added != {"bos_token": None, "eos_token": None}:  # otherwise tokenizer.json decides
                set_bos_and_eos(backend, special, added)
        return Tokenizer(backend, special, *_default_and_named(_templates(path, config)))

    @staticmethod
    def from_gguf(fields: Mapping[str, Any], *, strips_spaces: bool = False) -> Tokenizer:
        """Build a tokenizer from GGUF metadata.

        Args:
            fields: Key -> value.
            strips_spaces: True if added tokens of a SentencePiece tokenizer absorb the white space after them.

        Raises:
            UnsupportedModel: If this kind of tokenizer is not supported.
            CorruptModel: If the metadata is incomplete.
        """
        backend = backend_from_gguf(fields, strips_spaces=strips_spaces)
        key = "tokenizer.chat_template"
        named = {name.removeprefix(f"{key}."): text for name, text in fields.items() if name.startswith(f"{key}.")}
        return Tokenizer(backend, special_tokens(backend, fields), fields.get(key), _texts(named))

    @staticmethod
    def from_transformers(tokenizer: Any) -> Tokenizer:
        """Copy a fast tokenizer of transformers. Raise `InvalidOption` if it is not one."""
        from transformers import PreTrainedTokenizerFast

        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise InvalidOption(
                f"{type(tokenizer).__name__} is not a fast tokenizer of transformers",
                "Use tokenizer=transformers.AutoTokenizer.from_pretrained(...), or a paceline Tokenizer",
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
        """Size of the vocabulary, including added tokens. The model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The vocabulary, including added tokens: the tokenizer's spelling of a token -> its id."""
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
        """Ids of the special tokens, which `decode` omits."""
        return frozenset(i for i, token in self._backend.get_added_tokens_decoder().items() if token.special)

    def special_in(self, text: str) -> dict[int, str]:
        """Return the special tokens that occur in a text, as id -> text."""
        if not text:
            return {}
        names = {token: self._backend.id_to_token(token) for token in self.special_ids}
        return {token: name for token, name in names.items() if name and name in text}

    @cached_property
    def digest(self) -> str:
        """A hash of everything on which the tokens of texts and chats depend."""
        about = json.dumps([self.special_tokens, self.named_templates], sort_keys=True)
        parts = (self._backend.to_str(), about, self.chat_template or "")
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()

    @cached_property
    def token_bytes(self) -> dict[int, bytes]:
        """Token id -> bytes that the token adds to a text, without special tokens."""
        return token_bytes(self._backend)

    @cached_property
    def max_token_chars(self) -> int | None:
        """Maximum number of characters of a text that a token can stand for, or None if there is no limit."""
        return max_token_chars(self._backend, self.token_bytes)

    def token_id(self, token: str | None) -> int | None:
        """Return the id of the token with exactly this spelling, or None."""
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Convert text to token ids.

        Special tokens that are spelled out in the text become tokens. In `TemplateText`, this applies only to text that
        the template wrote, so `TemplateText(text)` is encoded as data.

        Args:
            text: The text.
            special: True to add BOS and EOS as the model expects. Use False for a rendered chat template, which
                contains these tokens.

        Raises:
            InvalidPrompt: If the text is not valid Unicode (lone surrogates).
        """
        with library_errors("the model's tokenizer fails on this text"):
            try:
                if isinstance(text, TemplateText):
                    before, after = self._frame if special else ([], [])
                    return [*before, *self._data_encoder.encode(text), *after]
                # Encode a batch of one text, because `encode` would hold the GIL and block all other threads.
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
        """The ids that the backend adds before a text, and the ids that it adds after it."""
        bare, framed = (self._backend.encode("a", add_special_tokens=special).ids for special in (False, True))
        start = next((i for i in range(len(framed)) if framed[i : i + len(bare)] == bare), 0)
        return framed[:start], framed[start + len(bare) :]

    def starts(self, text: str) -> list[int]:
        """Return the offset in characters at which each token of `encode(text)` begins.

        The tokens cover the whole text. Characters that the tokenizer drops, such as repeated spaces, belong to the
        next token, or to the last token. Added BOS and EOS tokens cover nothing.
        """
        encoding = self._backend.encode_batch([text])[0]
        starts, start, end = [], 0, 0
        for (first, last), added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            start = end if added else max(start, min(first, end))
            end = max(end, last)
            starts.append(start)
        return starts

    def spell(self, text: str) -> list[int]:
        """Return token ids that add exactly this text to an existing text. If possible, they are the ids that `encode`
        returns.

        They contain no special tokens, even if the text spells one. They stop before a byte that no token contains.
        """
        data = text.encode(errors="replace")
        line = self.encode("\n", special=False)
        # A line break before the text absorbs anything that the tokenizer adds at the start of a text, such as a space.
        after = self.encode("\n" + text, special=False)
        for ids in (self.encode(text, special=False), after[len(line) :]):
            if b"".join(self.token_bytes.get(i, b"\xff") for i in ids) == data:
                return ids
        return self._speller.spell(data)

    @cached_property
    def _speller(self) -> Speller:
        return Speller(self.token_bytes)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Convert token ids to text. Bytes that are not valid UTF-8 become U+FFFD.

        Args:
            ids: Token ids.
            skip_special: True to omit special tokens.

        Raises:
            InvalidPrompt: If an id is not an integer >= 0.
        """
        try:
            # Decode a batch of one text, for the reason given in `encode`.
            return self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]
        except (OverflowError, TypeError) as error:
            raise InvalidPrompt("token ids must be integers >= 0", "Pass the ids that the model generated") from error

    def template_for(self, tools: bool) -> str | None:
        """Return the template for chats with or without tools."""
        return self.named_templates.get("tool_use", self.chat_template) if tools else self.chat_template

    def with_template(self, given: str | Path) -> Tokenizer:
        """Return a copy of this tokenizer with another chat template, which is also used for chats with tools.

        Args:
            given: A file, the name of one of the model's own templates, or the text of a template.

        Raises:
            InvalidOption: If it is none of these.
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
                    f"Give a file with a jinja template, or the name of one of the model's templates: {names}",
                )
            template = read_text(Path(given))
        made = Tokenizer(self._backend, self.special_tokens, template)
        made.special_tokens_in_messages = self.special_tokens_in_messages
        return made

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """Render messages in the format that the model was trained on.

        Args:
            messages: [{"role": str, "content": str}, ...].
            add_generation_prompt: True to end with the beginning of the assistant's reply.
            **extra: Other variables of the template, such as `tools`.

        Returns:
            The text. Encode it with `special=False`. It is `TemplateText`, so data forms no control tokens. With
            `special_tokens_in_messages`, the whole text is treated as if the template had written it.

        Raises:
            InvalidPrompt: If the messages are malformed, the model has no template, or the template raises an error.
        """
        from paceline.text.chat_template import render

        template = self.template_for(bool(extra.get("tools")))
        if template is None:
            raise InvalidPrompt(
                "the model has no chat template", "Pass text with raw=True (--raw), or use another model"
            )
        values = {**self.special_tokens, "add_generation_prompt": add_generation_prompt, **extra}
        text = render(template, messages, values, self.special_tokens.keys() - extra.keys())
        return TemplateText.written(text.plain()) if self.special_tokens_in_messages else text


def template_of(path: Path) -> str | None:
    """Return the default chat template of a model folder. Raise `CorruptModel` if a file is damaged."""
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
    # The file may contain truncation and padding settings from training, but prompts must never be truncated or padded.
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
    """Return the text of a special token, which may be a string or {"content": string, ...}, or None."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of a folder by name. Files take precedence over tokenizer_config.json."""
    found = _by_name(config.get("chat_template"))
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))[:_MAX_TEMPLATES]}
    return found | {name: read_text(file) for name, file in files.items() if file.exists()}


def _by_name(found: Any) -> dict[str, str]:
    """Return templates by name. A single template is named "default"."""
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}
    return _texts(found if isinstance(found, Mapping) else {"default": found})


def _texts(found: Mapping[str, Any]) -> dict[str, str]:
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _default_and_named(found: Mapping[str, str]) -> tuple[str | None, dict[str, str]]:
    """Return the default template (the first one if none is named "default"), and all other templates by name."""
    named = {name: text for name, text in found.items() if name != "default"}
    return found.get("default", next(iter(found.values()), None)), named
