"""Bodies of the requests about tokens and prompts, in the shapes of vLLM and llama.cpp."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from paceline.server.compat import RAW, Strict, accepts, ignored
from paceline.server.schema import Messages, ModelName, RequestBody, Schema, Text, TokenId, Tools


class PromptRequest(Strict):
    """Messages for the chat template."""

    model: ModelName | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[Schema, Field(max_length=64)] | None = None

    @property
    def template_values(self) -> dict[str, Any]:
        """Variables of the chat template."""
        return self.chat_template_kwargs or {}


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
        """The text, and whether BOS and EOS are added to it."""
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


@accepts(RAW, ignored("time", "files stay in their order"))
class InfillFile(Strict):
    """Another file, which the model sees before the text."""

    filename: Annotated[str, Field(max_length=1000)] = ""
    text: Text


@accepts(ignored("samplers t_max_prompt_ms t_max_predict_ms", "editors send it with every request"))
class InfillRequest(RequestBody):
    """Body of /infill. `prompt`: the beginning of the current line, after `input_prefix`."""

    input_prefix: Text
    input_suffix: Text
    input_extra: Annotated[list[InfillFile], Field(max_length=1000, fail_fast=True)] | None = None
    prompt: Text | None = None
    n_indent: (
        Annotated[int, Field(ge=0, le=1000, description="The text ends at a line that begins with fewer blanks.")]
        | None
    ) = None
    response_fields: (
        Annotated[
            list[Annotated[str, Field(max_length=100)]],
            Field(max_length=100, description="What is sent of the answer, such as content or timings/prompt_n."),
        ]
        | None
    ) = None

    def completion(self, prompt: list[int]) -> dict[str, Any]:
        """Return the request as the body of a completion of these tokens."""
        mine = {"input_prefix", "input_suffix", "input_extra", "samplers", "t_max_prompt_ms", "t_max_predict_ms"}
        found = self.model_dump(exclude_none=True, exclude=mine | {"n_indent", "response_fields", "stream"})
        return {"max_tokens": -1, **found, "prompt": prompt} if self.length is None else {**found, "prompt": prompt}
