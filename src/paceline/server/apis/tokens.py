"""Requests about tokens and prompts, in the shapes of vLLM and llama.cpp: nothing is generated."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from paceline.server.api import dumps_long
from paceline.server.apis.messages import CountTokensRequest, chat_prompt
from paceline.server.apis.openai_chat import MessageList, Tools, chat_messages, image_chars
from paceline.server.errors import bad_request
from paceline.server.images import read_images
from paceline.server.limits import Settings
from paceline.server.models import LoadedModel
from paceline.server.prepare import chat_ids, chat_text, chat_tokens, prompt_limit
from paceline.server.request import ChatPrompt, ToolOffer
from paceline.server.schema import NamedBody, TemplateValues, Text, TokenId
from paceline.text.template_text import TemplateText


class PromptRequest(NamedBody):
    """Messages for the chat template."""

    messages: MessageList | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateValues | None = None

    @property
    def image_chars(self) -> int:
        return image_chars(self.messages or ())

    @property
    def chat(self) -> ChatPrompt:
        """The prompt of a chat. Raises `ApiError` 400 for new content that is not text."""
        return ChatPrompt(
            messages=chat_messages(self.messages or ()),
            tools=ToolOffer([tool.offered for tool in self.tools or ()]),
            values=self.chat_template_kwargs or {},
            continues_last=bool(self.continue_final_message),
            opens_reply=self.add_generation_prompt is not False,
        )


class TokenizeRequest(PromptRequest):
    """Body of /tokenize: either text, or messages for the chat template. `content`, `add_special`, `parse_special` and
    `with_pieces` are llama.cpp's parameters, the others are vLLM's."""

    prompt: Text | None = None
    add_special_tokens: bool | None = None
    content: Text | None = None
    add_special: bool | None = None
    parse_special: (
        Annotated[
            bool,
            Field(
                description="True: special tokens that are spelled out become tokens. The default is true for text; "
                "for messages, --special-tokens-in-messages decides."
            ),
        ]
        | None
    ) = None
    with_pieces: bool | None = None

    @property
    def text(self) -> tuple[str, bool]:
        """(The text, True if BOS and EOS are added to it)."""
        if self.content is not None:
            return self.content, bool(self.add_special)
        return self.prompt or "", self.add_special_tokens is not False

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if sum(given is not None for given in (self.prompt, self.messages, self.content)) != 1:
            raise ValueError("exactly one of prompt and messages is required")
        return self


class ApplyTemplateRequest(PromptRequest):
    """Body of /apply-template."""

    messages: MessageList


class DetokenizeRequest(NamedBody):
    """Body of /detokenize."""

    tokens: Annotated[list[TokenId], Field(max_length=1_000_000, fail_fast=True)]


def tokenize(model: LoadedModel, settings: Settings, body: TokenizeRequest) -> bytes:
    """Return the token ids of a text or a chat."""
    llm = model.llm
    if body.messages is None:
        text, special = body.text
        text = TemplateText(text) if body.parse_special is False else text
        tokens = llm.tokenizer.encode(text, special=special)
    else:
        chat = read_images(llm, settings, body.chat)
        text, pictures = chat_text(llm, chat)
        text = TemplateText.written(text) if body.parse_special else text
        tokens = chat_ids(llm, text, pictures, prompt_limit(llm, settings))
    pieces = ({"id": token, "piece": model.token_texts.text(token)} for token in tokens)
    about = {"count": len(tokens), "max_model_len": llm.model.target.context_length}
    return dumps_long(about, "tokens", pieces if body.with_pieces else tokens)


def detokenize(model: LoadedModel, _: Settings, body: DetokenizeRequest) -> dict[str, Any]:
    """Return the text of token ids, under vLLM's name and llama.cpp's."""
    size = model.llm.model.target.vocab_size
    for i, token in enumerate(body.tokens):
        if token >= size:
            raise bad_request(f"token ids must be < {size}, got {token}", f"tokens.{i}")
    text = model.llm.tokenizer.decode(body.tokens, False)
    return {"prompt": text, "content": text}


def apply_template(model: LoadedModel, settings: Settings, body: ApplyTemplateRequest) -> dict[str, Any]:
    """Return a chat's prompt as text."""
    return {"prompt": chat_text(model.llm, read_images(model.llm, settings, body.chat))[0]}


def count_tokens(model: LoadedModel, settings: Settings, body: CountTokensRequest) -> dict[str, Any]:
    """Count the tokens of a prompt (Anthropic's API)."""
    return {"input_tokens": len(chat_tokens(model.llm, settings, chat_prompt(body)))}


def tokenizer_info(model: LoadedModel) -> dict[str, Any]:
    """Describe a model's tokenizer as vLLM does."""
    words, context = model.llm.tokenizer, model.llm.model.target.context_length
    about = {"tokenizer_class": words.kind, "model_max_length": context, "vocab_size": words.vocab_size}
    return {**about, **words.special_tokens, "chat_template": words.chat_template}
