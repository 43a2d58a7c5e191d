"""/api/chat and /api/generate: chats and prompts in the shape of Ollama's API."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field

from paceline.chat.calls import Call
from paceline.sampling.json_schema import with_leniency
from paceline.server.api import Api, Encoder, Event, dumps
from paceline.server.apis.openai_chat import Tools
from paceline.server.compat import Lenient, OllamaObject, accepted_values, accepts, ignored_parameters, text_or_empty
from paceline.server.errors import ApiError, bad_request
from paceline.server.grammars import ANY_OBJECT
from paceline.server.prepare import PreparedRequest
from paceline.server.replies import BlockEnded, Usage
from paceline.server.request import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    Part,
    SentImage,
    TextPrompt,
    ToolOffer,
    reasoning_values,
    requested_logprobs,
)
from paceline.server.schema import (
    WITHOUT_EMPTY,
    Arguments,
    CalledName,
    Generating,
    ModelName,
    Penalty,
    Probability,
    Schema,
    Stop,
    Stops,
    Text,
    TokenPenalty,
    TopLogprobs,
    same_named_parameters,
    without_none,
)
from paceline.server.worker import ReplyRound


@accepts(
    ignored_parameters(
        "draft_num_predict embedding_only f16_kv logits_all low_vram main_gpu num_batch num_ctx num_gpu num_keep "
        "num_thread numa use_mlock use_mmap vocab_only",
        "the model is already loaded",
    ),
    ignored_parameters("mirostat_eta mirostat_tau penalize_newline", "settings of samplers that are off"),
    accepted_values((0,), "mirostat", "this sampler is not implemented"),
    accepted_values((1,), "tfs_z", "this sampler is not implemented"),
)
class OllamaOptions(OllamaObject):
    """`options` of a request. Options for the machine have no effect, because the model is already loaded."""

    num_predict: Annotated[int, Field(ge=-2, le=2**31, description="0, -1, -2: as many as fit.")] | None = None
    temperature: Annotated[float, Field(ge=0, le=1000)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repeat_penalty: Penalty | None = None
    repeat_last_n: (
        Annotated[int, Field(ge=-1, description="0: no penalty. Else it applies to the whole text.")] | None
    ) = None
    presence_penalty: TokenPenalty | None = None
    frequency_penalty: TokenPenalty | None = None
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


def _as_images(value: Any) -> list[str]:
    """Return images as texts. An image that is not text is refused later, if the model sees it at all."""
    return [text_or_empty(one) for one in value] if isinstance(value, list) else []


Images = Annotated[
    list[str],
    BeforeValidator(_as_images),
    Field(
        description="Base64. If the model reads text only, the last message must have no image, and a note replaces "
        "each image of an earlier message."
    ),
]


class OllamaMessage(OllamaObject):
    """A message of a chat."""

    role: Annotated[Literal["system", "user", "assistant", "tool"], BeforeValidator(_lower)]
    content: Text | None = None
    images: Images = Field(default_factory=list)
    thinking: Text | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=128)] | None = None
    tool_name: Annotated[str, Field(max_length=200)] | None = None
    tool_call_id: Annotated[str, Field(max_length=200)] | None = None


def _is_zero(value: Any) -> bool:
    """Return True if a duration is 0. It is a number, or text such as "0s"."""
    if isinstance(value, str):
        zero = r"[-+]?(0+|(0+(\.0*)?(ns|us|µs|ms|s|m|h))+)"
        return len(value) <= 20 and re.fullmatch(zero, value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0


@accepts(ignored_parameters("shift", "a full context ends the reply"))
class OllamaRequest(OllamaObject, Generating, extra="ignore"):
    """Parameters of chats and of single prompts."""

    model: ModelName
    stream: bool | None = True
    format: Literal["", "json"] | Schema | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
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
        """True if the request has no prompt, and only loads or unloads the model."""

    @property
    def constrained(self) -> bool:
        return bool(self.format)

    @property
    def sampling(self) -> dict[str, Any]:
        own = self.options or OllamaOptions()
        found = {**same_named_parameters(own), **without_none(seed=self.seed, repetition_penalty=own.repeat_penalty)}
        if own.repeat_last_n == 0:  # penalties that look at no tokens
            return {name: value for name, value in found.items() if not name.endswith("_penalty")}
        return found

    def request(self, prompt: ChatPrompt | TextPrompt) -> GenerateRequest:
        """Return the request with a prompt. Raises `ApiError` 400."""
        length = (self.options and self.options.num_predict) or -1
        schema = ANY_OBJECT if isinstance(self.format, str) else self.format
        return GenerateRequest(
            prompt=prompt,
            sampling=self.sampling,
            constraints={"format": ("json_schema", with_leniency(schema))} if self.format and schema else {},
            max_tokens=max(-1, length),
            logprobs=requested_logprobs(self.logprobs, self.top_logprobs),
            speculation=self.speculation,
        )

    @property
    def template_values(self) -> dict[str, Any]:
        """Variables of the chat template."""
        if isinstance(self.think, str):
            return reasoning_values("xhigh" if self.think == "max" else self.think)
        return reasoning_values("none" if self.think is False else None)


class OllamaChatRequest(OllamaRequest):
    """Body of /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(max_length=10_000, fail_fast=True)] = Field(default_factory=list)
    tools: Tools | None = None

    @property
    def image_chars(self) -> int:
        return sum(len(image) for message in self.messages for image in message.images)

    @property
    def empty(self) -> bool:
        return not self.messages


@accepts(
    accepted_values(("",), "template", "the model's own template is used"),
    accepted_values(([],), "context", "/api/chat takes whole conversations"),
    accepted_values((), "width height steps", "this server writes text only"),
)
class OllamaGenerateRequest(OllamaRequest):
    """Body of /api/generate."""

    prompt: Text | None = None
    suffix: Text | None = None
    system: Text | None = None
    images: Annotated[Images, Field(description="Base64. Not with `raw` or `suffix`.")] = Field(default_factory=list)
    raw: Annotated[bool, Field(description="The prompt is used as it is, without the chat template.")] | None = None

    @property
    def image_chars(self) -> int:
        return sum(map(len, self.images))

    @property
    def empty(self) -> bool:
        return not self.prompt and not self.suffix


Asked = TypeVar("Asked", bound=OllamaRequest)


def _content(text: str | None, images: Sequence[str], param: str, new: bool) -> str | list[Part]:
    """Return the content of a message: its text, or the images and the text. `new`: it is the user's last message."""
    if not images:
        return text or ""
    refusal = f"{param}: not supported by this server. Leave it out, or send []" if new else None
    parts = [SentImage(source=one, param=f"{param}.{i}", refusal=refusal) for i, one in enumerate(images)]
    return [*parts, *filter(None, [text])]  # in the order in which Ollama shows them


def _chat_message(message: OllamaMessage, param: str, new: bool) -> ChatMessage:
    calls = [
        Call(call.function.name, json.dumps(call.function.arguments), call.id or f"call_{i}")
        for i, call in enumerate(message.tool_calls or ())
    ]
    return ChatMessage(
        role=message.role,
        content=_content(message.content, message.images, f"{param}.images", new and message.role == "user"),
        calls=calls,
        reasoning=message.thinking or None,
        name=message.tool_name or None,
        call_id=message.tool_call_id or None,
    )


class _OllamaApi(Api[Asked]):
    """An API of Ollama, whose requests can load and unload models.

    Attributes:
        kind: The key of the reply in the answers.
    """

    media_type = "application/x-ndjson"
    kind: ClassVar[Literal["message", "response"]]

    def unloads(self, body: Asked) -> bool:
        return bool(body.unloads)

    def without_reply(self, body: Asked) -> Event | None:
        if not (body.unloads and body.empty):
            return None
        return {**_head(body.model), **_reply(self.kind, ""), "done": True, "done_reason": "unload"}

    def encoder(self, body: Asked, prepared: PreparedRequest) -> OllamaEncoder:
        return OllamaEncoder(body, prepared, self.kind)


class OllamaChat(_OllamaApi[OllamaChatRequest]):
    """Ollama's chats."""

    kind = "message"
    path = "/api/chat"
    body = OllamaChatRequest
    about = "Generate the next message of a chat (Ollama's API)."

    def decode(self, body: OllamaChatRequest) -> GenerateRequest | None:
        """Return the request of a chat; None without messages, which loads the model."""
        if body.empty:
            return None
        last = body.messages[-1]
        return body.request(
            ChatPrompt(
                messages=[_chat_message(m, f"messages.{i}", m is last) for i, m in enumerate(body.messages)],
                tools=ToolOffer.chosen([tool.offered for tool in body.tools or ()]),
                values=body.template_values,
                may_truncate=body.truncate is not False,
            )
        )


class OllamaGenerate(_OllamaApi[OllamaGenerateRequest]):
    """Ollama's replies to one prompt."""

    kind = "response"
    path = "/api/generate"
    body = OllamaGenerateRequest
    about = "Answer or continue one prompt (Ollama's API)."

    def decode(self, body: OllamaGenerateRequest) -> GenerateRequest | None:
        """Return the request of one prompt; None without a prompt, which loads the model."""
        if body.empty:
            return None
        prompt = body.prompt or ""
        if body.images and (body.raw or body.suffix):
            raise bad_request("images do not work with raw or suffix. Send images to /api/chat", "images")
        if body.raw or body.suffix:
            return body.request(TextPrompt(texts=[prompt], after=body.suffix or None))
        system = [ChatMessage(role="system", content=body.system)] if body.system else []
        messages = [*system, ChatMessage(role="user", content=_content(prompt, body.images, "images", True))]
        return body.request(ChatPrompt(messages=messages, values=body.template_values))


class OllamaEncoder(Encoder):
    """A reply as lines of JSON."""

    media_type = "application/x-ndjson"

    def __init__(self, body: OllamaRequest, prepared: PreparedRequest, kind: Literal["message", "response"]) -> None:
        """Make an encoder. `kind`: see `_OllamaApi`."""
        [self._reply] = prepared.replies
        self._model, self._kind = body.model, kind
        self._token_texts = prepared.model.token_texts if body.logprobs and not body.empty else None
        self._logprobs: list[dict[str, Any]] = []

    def add(self, round_: ReplyRound) -> list[Event]:
        """Add a round. Calls are sent as a whole, at the end."""
        block_events = self._reply.add(round_)
        new = [self._token_texts.chat_logprobs(chunk) for chunk in round_.chunks] if self._token_texts else []
        self._logprobs += new
        events = []
        for event in block_events:
            if not isinstance(event, BlockEnded) and event.block.kind != "call":
                reasoning = event.block.kind == "reasoning"
                events.append(self._line("", event.text) if reasoning else self._line(event.text))
        if self._reply.finish_reason and self._reply.calls:
            events.append(self._line("", calls=self._calls()))
        if new:
            events = events or [self._line("")]
            events[0]["logprobs"] = new
        return events

    def heartbeat(self) -> Event:
        """Return a line without text."""
        return self._line("")

    def end(self, usage: Usage) -> list[Event]:
        """Return the last line, with the counts."""
        return [{**self._line(""), **self._counts(usage)}]

    def document(self, usage: Usage) -> dict[str, Any]:
        whole = self._line(self._reply.text, self._reply.reasoning, self._calls())
        return {**whole, **self._counts(usage), **({"logprobs": self._logprobs} if self._token_texts else {})}

    def failed(self, error: ApiError) -> Event:
        return {"error": error.ollama}

    def encode(self, event: Event) -> bytes:
        return dumps(event) + b"\n"

    def _line(self, text: str, thinking: str = "", calls: list[dict[str, Any]] | None = None) -> Event:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = calls
        return {**_head(self._model), **_reply(self._kind, text, **more), "done": False}

    def _calls(self) -> list[dict[str, Any]]:
        """Return the calls whose arguments are complete."""
        found = []
        for index, call in enumerate(self._reply.calls):
            try:
                arguments = json.loads(call.text)
            except ValueError:
                continue
            found.append({"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}})
        return found

    def _counts(self, usage: Usage) -> dict[str, Any]:
        reason = {None: "load", "length": "length"}.get(self._reply.finish_reason, "stop")
        seconds = {
            "total_duration": usage.total,
            "load_duration": usage.queued,
            "prompt_eval_duration": max(0.0, usage.first - usage.queued),
            "eval_duration": max(0.0, usage.total - usage.first),
        }
        counts = {"prompt_eval_count": usage.prompt, "eval_count": usage.written}
        durations = {name: int(1e9 * value) for name, value in seconds.items()}
        return {"done": True, "done_reason": reason, **durations, **counts, "speculation": usage.speculation()}


def _reply(kind: str, text: str, **more: Any) -> dict[str, Any]:
    """Return the part of an answer that has the reply. `kind`: see `_OllamaApi`."""
    if kind == "message":
        return {"message": {"role": "assistant", "content": text, **more}}
    return {"response": text, **more}


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(timezone.utc).isoformat()}
