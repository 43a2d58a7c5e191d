"""Requests about tokens and prompts, in the shapes of vLLM and llama.cpp: nothing is generated."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Request
from pydantic import Field, model_validator
from starlette.responses import Response

from paceline.server.api import dumps_long
from paceline.server.apis.messages import CountTokensRequest, chat_prompt
from paceline.server.apis.openai_chat import Messages, Tools, chat_messages
from paceline.server.compat import Strict
from paceline.server.errors import bad_request
from paceline.server.fields import ModelName, Schema, Text, TokenId
from paceline.server.models import LoadedModel
from paceline.server.prepare import chat_tokens, token_ids
from paceline.server.prompts import chat_text
from paceline.server.request import ChatPrompt, ToolUse
from paceline.server.serving import Service
from paceline.text.template_text import TemplateText


class PromptRequest(Strict):
    """Messages for the chat template."""

    model: ModelName | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[Schema, Field(max_length=64)] | None = None

    @property
    def chat(self) -> ChatPrompt:
        """The prompt of a chat. Raises `ApiError` 400 for new content that is not text."""
        return ChatPrompt(
            messages=chat_messages(self.messages or ()),
            tools=ToolUse([tool.offered for tool in self.tools or ()]),
            values=self.chat_template_kwargs or {},
            continued=bool(self.continue_final_message),
            answered=self.add_generation_prompt is not False,
        )


class TokenizeRequest(PromptRequest):
    """Body of /tokenize: either text as it is, or messages for the chat template. `content`, `add_special`,
    `parse_special` and `with_pieces` are llama.cpp's, the others vLLM's."""

    prompt: Text | None = None
    add_special_tokens: bool | None = None
    content: Text | None = None
    add_special: bool | None = None
    parse_special: (
        Annotated[
            bool,
            Field(
                description="Whether special tokens that are spelled out become tokens: by default true for text, and "
                "for messages as --special-tokens-in-messages says."
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

    messages: Messages


class DetokenizeRequest(Strict):
    """Body of /detokenize."""

    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1_000_000, fail_fast=True)]


class TokenRoutes:
    """Tokens of texts and chats, and texts of tokens."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or a chat."""
        async with self._service.bodies.read(request, TokenizeRequest) as (body, _):

            def work(model: LoadedModel) -> bytes:
                llm = model.llm
                if body.messages is None:
                    text, special = body.text
                    text = TemplateText(text) if body.parse_special is False else text
                    tokens = llm.tokenizer.encode(text, special=special)
                else:
                    text = chat_text(llm, body.chat)
                    text = TemplateText.written(text) if body.parse_special else text
                    tokens = token_ids(llm, text, "messages", chat=True)
                pieces = ({"id": token, "piece": model.token_texts.text(token)} for token in tokens)
                about = {"count": len(tokens), "max_model_len": llm.model.target.context_length}
                return dumps_long(about, "tokens", pieces if body.with_pieces else tokens)

            return await self._service.compute(request, body.model, work)

    async def tokenizer_info(self, request: Request) -> Response:
        """Describe a model's tokenizer as vLLM does. The `remote` backend of lm-eval asks for it first."""
        name = request.query_params.get("model") or self._service.loader.names[0]

        def work(model: LoadedModel) -> dict[str, Any]:
            words, context = model.llm.tokenizer, model.llm.model.target.context_length
            about = {"tokenizer_class": words.kind, "model_max_length": context, "vocab_size": words.vocab_size}
            return {**about, **words.special_tokens, "chat_template": words.chat_template}

        return await self._service.compute(request, name, work)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, under vLLM's name and llama.cpp's."""
        async with self._service.bodies.read(request, DetokenizeRequest) as (body, _):

            def work(model: LoadedModel) -> dict[str, Any]:
                size = model.llm.model.target.vocab_size
                for i, token in enumerate(body.tokens):
                    if token >= size:
                        raise bad_request(f"token ids must be < {size}, got {token}", f"tokens.{i}")
                text = model.llm.tokenizer.decode(body.tokens, False)
                return {"prompt": text, "content": text}

            return await self._service.compute(request, body.model, work)

    async def apply_template(self, request: Request) -> Response:
        """Return a chat's prompt as text."""
        async with self._service.bodies.read(request, ApplyTemplateRequest) as (body, _):

            def work(model: LoadedModel) -> dict[str, Any]:
                return {"prompt": chat_text(model.llm, body.chat)}

            return await self._service.compute(request, body.model, work)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a prompt (Anthropic's API)."""
        async with self._service.bodies.read(request, CountTokensRequest) as (body, _):

            def work(model: LoadedModel) -> dict[str, Any]:
                return {"input_tokens": len(chat_tokens(model.llm, self._service.settings, chat_prompt(body)))}

            return await self._service.compute(request, body.model, work)
