"""A request for generated text, in the form that every API decodes its bodies to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.chat.calls import Call
from paceline.sampling.json_schema import with_leniency
from paceline.server.compat import placeholder_for
from paceline.server.errors import bad_request
from paceline.server.grammars import Constraint
from paceline.server.schema import Schema, SpeculationOptions
from paceline.text.image_part import ImagePart
from paceline.vision.picture import Picture

_SWITCHES = ("enable_thinking", "thinking")
"""Variables of chat templates that switch reasoning on and off. Qwen, GLM and others read the first; DeepSeek, Kimi
and Granite read the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentImage:
    """An image in a message, as it was sent.

    Attributes:
        source: A data URL, another URL, or base64. "" if the part has none of these.
        param: The path of the part in the body.
        kind: The part's type.
        low: True if the client asks for little detail.
        refusal: The error message if the model reads text only. None if such a model gets a note instead of the image.
    """

    source: str
    param: str
    kind: str = "image"
    low: bool = False
    refusal: str | None = None

    @property
    def note(self) -> str:
        """The text that stands for the image if a model reads text only."""
        return placeholder_for(self.kind)


Part = str | SentImage | Picture
"""A part of a message's content. If the model reads images, each `SentImage` is replaced with a `Picture`
before the chat template is applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """A message of a chat.

    Attributes:
        role: The author.
        content: The text, or its parts: texts and images.
        calls: Function calls of the assistant.
        reasoning: Reasoning of the assistant.
        name: The author's name, or the function whose result this is.
        call_id: The call whose result this is.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str | Sequence[Part] = ""
    calls: Sequence[Call] = ()
    reasoning: str | None = None
    name: str | None = None
    call_id: str | None = None

    @property
    def parts(self) -> Sequence[Part]:
        """The parts of the content. Empty if the content is text."""
        return () if isinstance(self.content, str) else self.content

    def as_dict(self) -> dict[str, Any]:
        """Return the message in the form that chat templates expect."""
        content: Any = self.content
        if any(isinstance(part, SentImage) for part in self.parts):  # the model reads text only
            content = "\n".join(part.note if isinstance(part, SentImage) else part for part in content)
        elif not isinstance(content, str):
            content = [*map(_part, content)]
        found: dict[str, Any] = {
            "role": self.role,
            "content": content,
            "name": self.name,
            "tool_call_id": self.call_id,
            "reasoning_content": self.reasoning,
        }
        if self.calls:
            found["tool_calls"] = [call.as_dict() for call in self.calls]
            if not self.content and self.reasoning:
                found["thinking"] = self.reasoning  # its name in gpt-oss's template
        return {name: value for name, value in found.items() if value is not None}


def _part(part: Any) -> dict[str, Any]:
    return {"type": "text", "text": part} if isinstance(part, str) else ImagePart()


def refuse_media(param: str, kinds: Sequence[str], textual: Collection[str], wanted: str) -> None:
    """Raise `ApiError` 400 if a part of a new message is not text.

    In earlier messages and in tool results, a note replaces such a part, because the client cannot remove it from the
    conversation.

    Args:
        param: The path of the parts in the body.
        kinds: The type of each part.
        textual: The types that are text.
        wanted: The requirement, for the error message.
    """
    for i, kind in enumerate(kinds):
        if kind not in textual:
            raise bad_request(f"{param}.{i}: {wanted}, got {kind!r:.60}", f"{param}.{i}")


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A function that the model may call.

    Attributes:
        name: The name.
        description: Description of the function, for the model.
        parameters: The JSON schema of the arguments.
        strict: True if a forced call must follow the schema. Otherwise the schema is a guide.
        custom: True if the function stands for a tool that takes plain text.
    """

    name: str
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None
    custom: bool = False

    @property
    def shown(self) -> dict[str, Any]:
        """The function as chat templates know it."""
        fields = ("name", "description", "parameters", "strict")
        about = {name: value for name in fields if (value := getattr(self, name)) is not None}
        return {"type": "function", "function": about}

    @property
    def schema(self) -> Schema | None:
        """The schema of the arguments. If the function is strict, the schema says that it must be followed."""
        return with_leniency(self.parameters, lenient=False) if self.parameters and self.strict else self.parameters


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """The functions that a request offers, and its tool choice.

    Attributes:
        offered: The functions that the prompt shows.
        callable: The functions that may be called.
        forced: True if the reply must be a call.
        single: True if the reply has at most one call.
    """

    offered: Sequence[OfferedFunction] = ()
    callable: Sequence[OfferedFunction] = ()
    forced: bool = False
    single: bool = False

    @staticmethod
    def chosen(
        offered: Sequence[OfferedFunction],
        mode: str = "auto",
        names: Collection[str] | None = None,
        *,
        single: bool = False,
        where: str = "tools",
        param: str = "tool_choice",
    ) -> ToolOffer:
        """Return the functions that a tool choice leaves. Raises `ApiError` 400 for a choice that contradicts them.

        Args:
            offered: All functions.
            mode: "none", "auto" or "required".
            names: The functions that may be called; None for all.
            single: True if the reply has at most one call.
            where: The parameter with the functions.
            param: The parameter with the choice.
        """
        known = {function.name for function in offered}
        if len(known) != len(offered):
            raise bad_request(f"{where} must not have the same name twice", where)
        for name in names or ():
            if name not in known:
                raise bad_request(f"{param} names {name!r}, which is not in {where}", param)
        if mode == "required" and not offered:
            raise bad_request("tool_choice 'required' requires tools", param)
        if mode == "none":
            return ToolOffer()
        kept = [function for function in offered if names is None or function.name in names]
        return ToolOffer(offered, kept, mode == "required", single)

    @property
    def schemas(self) -> dict[str, Schema | None]:
        """The schemas of the functions that may be called, by their names."""
        return {function.name: function.schema for function in self.callable}


def reasoning_values(effort: str | None) -> dict[str, Any]:
    """Return the variables of a chat template for an effort: "none", a level, or "on" for any level. None sets no
    variable."""
    if effort is None:
        return {}
    values: dict[str, Any] = dict.fromkeys(_SWITCHES, effort != "none")
    if effort not in ("none", "on"):
        values["reasoning_effort"] = {"minimal": "low", "xhigh": "high", "max": "high"}.get(effort, effort)
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A prompt that a chat template writes.

    Attributes:
        messages: The messages.
        tools: The functions that the request offers.
        values: Variables of the template.
        continues_last: True if the reply continues the last message.
        opens_reply: True if the prompt ends with the beginning of a reply.
        split: True if reasoning is separated from the text.
        may_truncate: True if the oldest messages may be left out of a chat that is too long.
    """

    messages: Sequence[ChatMessage]
    tools: ToolOffer = field(default_factory=ToolOffer)
    values: Mapping[str, Any] = field(default_factory=dict)
    continues_last: bool = False
    opens_reply: bool = True
    split: bool = True
    may_truncate: bool = False

    def __post_init__(self) -> None:
        for i, message in enumerate(self.messages):
            if message.calls and message.role != "assistant":
                param = f"messages.{i}"
                raise bad_request(f"{param}: tool_calls and function_call require the role 'assistant'", param)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Prompts that are used as they are, without a chat template.

    Attributes:
        texts: Each prompt, as text or token ids.
        after: The text after the gap that the reply fills. None if there is no gap.
        files: Names and contents of other files, which the model sees before the gap.
        ends: True if the model's end-of-infill tokens end the reply.
        param: The parameter of the API that holds the prompts.
    """

    texts: Sequence[str | Sequence[int]]
    after: str | None = None
    files: Sequence[tuple[str, str]] = ()
    ends: bool = True
    param: str = "prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request for generated text.

    Attributes:
        prompt: The prompt.
        sampling: The fields of `Sampling` that the request sets. The model's own values apply to the others.
        constraints: Constraints on the reply's form, by the parameters of the client's body that set them. An error
            names the parameter.
        max_tokens: Maximum tokens of a reply. -1: the context length divided by `share`.
        share: See `max_tokens`.
        samples: Number of replies to each prompt.
        logprobs: See `Sampling`.
        thinking_budget: Maximum tokens of reasoning. None for no limit.
        prediction: A text that most of the reply is expected to repeat.
        speculation: The drafter. None for the server's default.
    """

    prompt: ChatPrompt | TextPrompt
    sampling: Mapping[str, Any] = field(default_factory=dict)
    constraints: Mapping[str, Constraint] = field(default_factory=dict)
    max_tokens: int = -1
    share: int = 1
    samples: int = 1
    logprobs: int | None = None
    thinking_budget: int | None = None
    prediction: str | None = None
    speculation: Literal["auto", "off"] | SpeculationOptions | None = None

    def __post_init__(self) -> None:
        chat = self.prompt
        if isinstance(chat, ChatPrompt) and chat.continues_last:
            last = chat.messages[-1]
            if last.role != "assistant" or last.calls:
                raise bad_request(
                    "continue_final_message requires that the last message is the assistant's and has no calls",
                    "continue_final_message",
                )


def requested_logprobs(wanted: bool | None, top: int | None) -> int | None:
    """Return `Sampling.logprobs` for the parameters `logprobs` and `top_logprobs` of a chat. Raises `ApiError` 400."""
    if top and not wanted:
        raise bad_request("top_logprobs requires logprobs=true", "top_logprobs")
    return (top or 0) if wanted else None
