"""Bodies of the requests about tokens and prompts, which generate nothing."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from paceline.server.compat import Strict
from paceline.server.schema import Messages, ModelName, Schema, Text, TokenId, Tools


class TokenizeRequest(Strict):
    """Body of /tokenize: either text as it is, or messages for the chat template."""

    model: ModelName | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[Schema, Field(max_length=64)] | None = None

    @property
    def template_values(self) -> dict[str, Any]:
        """Variables of the chat template."""
        return self.chat_template_kwargs or {}

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of prompt and messages is required")
        return self


class DetokenizeRequest(Strict):
    """Body of /detokenize."""

    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1_000_000, fail_fast=True)]
