"""Bodies of Ollama's endpoints."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from paceline.sampling.json_schema import guide
from paceline.server.compat import Lenient, Naming, accepts, ignored, left_out, only
from paceline.server.errors import WrongParameter
from paceline.server.schema import (
    WITHOUT_EMPTY,
    Arguments,
    CalledName,
    Generating,
    ModelName,
    Schema,
    Stop,
    Stops,
    Text,
    Tools,
)


@accepts(
    ignored(
        "draft_num_predict embedding_only f16_kv logits_all low_vram main_gpu num_batch num_ctx num_gpu num_keep "
        "num_thread numa use_mlock use_mmap vocab_only",
        "the model is loaded already",
    ),
    ignored("mirostat_eta mirostat_tau penalize_newline", "settings of samplers that are off"),
    only((0,), "mirostat", "this sampler is not implemented"),
    only((1,), "tfs_z", "this sampler is not implemented"),
)
class OllamaOptions(Naming):
    """`options` of a request. Those of the machine have no effect, since the model is loaded already."""

    num_predict: Annotated[int, Field(ge=-2, le=2**31, description="0, -1, -2: as many as fit.")] | None = None
    temperature: Annotated[float, Field(ge=0, le=1000)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=1000)] | None = None
    repeat_last_n: (
        Annotated[int, Field(ge=-1, description="0: no penalty. Else it applies to the whole text.")] | None
    ) = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[Stop | Stops | None, WITHOUT_EMPTY] = None


class OllamaFunction(Lenient):
    name: CalledName
    arguments: Arguments = Field(default_factory=dict)


class OllamaCall(Lenient):
    """A function call in an assistant's message."""

    function: OllamaFunction
    id: Annotated[str, Field(max_length=200)] | None = None


def _lower(role: Any) -> Any:
    return role.lower() if isinstance(role, str) else role


class OllamaMessage(Naming):
    """A message of a chat."""

    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_lower)]
    content: Text | None = None
    images: Annotated[
        int,
        BeforeValidator(lambda images: len(images) if isinstance(images, list) else 0),  # they may be megabytes
        Field(description="A note stands for those of earlier messages; the last message must have none."),
    ] = 0
    thinking: Text | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=128)] | None = None
    tool_name: Annotated[str, Field(max_length=200)] | None = None
    tool_call_id: Annotated[str, Field(max_length=200)] | None = None


def _is_zero(value: Any) -> bool:
    """Return whether a duration, a number or text as "0s", is 0."""
    if isinstance(value, str):
        zero = r"[-+]?(0+|(0+(\.0*)?(ns|us|µs|ms|s|m|h))+)"
        return len(value) <= 20 and re.fullmatch(zero, value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


@accepts(ignored("shift", "a full context ends the reply"))
class OllamaRequest(Naming, Generating, extra="ignore"):
    """Parameters of chats and of single prompts."""

    model: ModelName
    stream: bool | None = True
    format: Literal["", "json"] | Schema | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncate: (
        Annotated[bool, Field(description="Leave out the oldest messages of a chat that is too long. True by default.")]
        | None
    ) = None
    unloads: Annotated[
        Any,
        BeforeValidator(_is_zero),
        Field(alias="keep_alive", description="0: the model is unloaded after the reply. Others have no effect."),
    ] = False

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Whether there is nothing to reply to: the model is only loaded, or unloaded."""

    @property
    def constrained(self) -> bool:
        """Whether a grammar must be compiled for the reply."""
        return bool(self.format)

    @property
    def beyond(self) -> dict[str, Any]:
        """Sampling parameters outside of OpenAI's ranges."""
        heat = self.options.temperature if self.options else None
        return {"temperature": heat} if heat is not None and heat > 2 else {}

    def chat_body(self, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return the request as the body of a chat completion."""
        options = self.options.model_dump(exclude_none=True, exclude={*self.beyond}) if self.options else {}
        names = {"num_predict": "max_tokens"}
        found: dict[str, Any] = {names.get(name, name): value for name, value in options.items()}
        if found.get("max_tokens", 1) < 1:
            found["max_tokens"] = -1
        if found.pop("repeat_last_n", None) == 0:  # of no tokens
            for name in ("repeat_penalty", "presence_penalty", "frequency_penalty"):
                found.pop(name, None)
        schema = None if isinstance(self.format, str) or not self.format else {"name": "format", "schema": self.format}
        if self.format:
            found["response_format"] = (
                {"type": "json_schema", "json_schema": schema} if schema else {"type": "json_object"}
            )
        if isinstance(self.think, str):
            found["reasoning_effort"] = "xhigh" if self.think == "max" else self.think
        elif self.think is not None:
            found["reasoning"] = "auto" if self.think else "off"
        own = self.model_dump(include={"speculation", "timeout", "seed", "logprobs", "top_logprobs"}, exclude_none=True)
        return {"messages": messages, **found, **own, **more}


class OllamaChatRequest(OllamaRequest):
    """Body of /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(max_length=10_000, fail_fast=True)] = Field(default_factory=list)
    tools: Tools | None = None

    @property
    def empty(self) -> bool:
        """Whether there are no messages."""
        return not self.messages

    def as_chat(self) -> dict[str, Any]:
        """Return the request as the body of a chat completion."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return self.chat_body([_message(message) for message in self.messages], **({"tools": tools} if tools else {}))


def _message(message: OllamaMessage) -> dict[str, Any]:
    notes = [left_out("image")] * message.images
    found: dict[str, Any] = {"role": message.role, "content": "\n".join([*filter(None, [message.content]), *notes])}
    if message.thinking:
        found["reasoning_content"] = message.thinking
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id or f"call_{i}",
                "function": {"name": call.function.name, "arguments": json.dumps(call.function.arguments)},
            }
            for i, call in enumerate(message.tool_calls)
        ]
    if message.tool_name:
        found["name"] = message.tool_name
    return found | ({"tool_call_id": message.tool_call_id} if message.tool_call_id else {})


@accepts(
    only(("",), "template", "the model's own template is used"),
    only(([],), "context", "/api/chat takes whole conversations"),
    only(([],), "images", "this server reads text only"),
    only((), "width height steps", "this server writes text only"),
)
class OllamaGenerateRequest(OllamaRequest):
    """Body of /api/generate."""

    prompt: Text | None = None
    suffix: Text | None = None
    system: Text | None = None
    raw: Annotated[bool, Field(description="The prompt is used as it is, without the chat template.")] | None = None

    @property
    def empty(self) -> bool:
        """Whether there is no prompt."""
        return not self.prompt and not self.suffix

    @property
    def is_text(self) -> bool:
        """Whether the prompt is a text as it is."""
        return bool(self.raw or self.suffix)

    def as_chat(self) -> dict[str, Any]:
        """Return the request as the body of a chat completion."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.chat_body([*system, {"role": "user", "content": self.prompt or ""}])

    def as_text(self) -> dict[str, Any]:
        """Return the request as the body of a completion."""
        body = self.chat_body([], prompt=self.prompt or "", **({"suffix": self.suffix} if self.suffix else {}))
        form = body.pop("response_format", None)
        if form is not None:
            body["guided_json"] = guide(form["json_schema"]["schema"] if "json_schema" in form else {"type": "object"})
        for name in ("messages", "reasoning", "reasoning_effort"):
            body.pop(name, None)
        if body.pop("logprobs", None):
            body["logprobs"] = body.pop("top_logprobs", 0)
        return {"max_tokens": -1, **body}


@accepts(ignored("verbose options system template", "models are described as they are"))
class NamedModelRequest(Naming):
    """Body of /api/show and of the endpoints that change what is stored."""

    model: ModelName | None = None
    name: Annotated[ModelName | None, Field(description="The older name of `model`.")] = None

    @property
    def named(self) -> str:
        """The model's name."""
        return self.model or self.name or ""

    @model_validator(mode="after")
    def _has_name(self) -> NamedModelRequest:
        if not self.named:
            raise WrongParameter("model must not be empty", "model")
        return self


@accepts(ignored("insecure username password", "models are fetched from the hub"))
class PullRequest(NamedModelRequest):
    """Body of /api/pull."""

    stream: bool | None = True
