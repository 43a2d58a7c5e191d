"""/v1/chat/completions: chats in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline.chat.calls import Call
from paceline.server.api import Api
from paceline.server.apis.completions import Choice, ChoicesEncoder
from paceline.server.apis.openai_chat import (
    AllowedTools,
    ContentPart,
    Function,
    FunctionName,
    MessageList,
    NamedTool,
    Tools,
    chat_messages,
    image_chars,
    text_of,
)
from paceline.server.compat import Strict, accepted_values, accepts, ignored_parameters
from paceline.server.errors import WrongParameter
from paceline.server.prepare import PreparedRequest
from paceline.server.replies import BlockBegun, BlockEnded, BlockGrown, ChatReply, ReplyBlock
from paceline.server.request import ChatPrompt, GenerateRequest, ToolOffer, reasoning_values, requested_logprobs
from paceline.server.schema import (
    LENGTHS,
    MAX_TOOLS,
    Effort,
    Length,
    ReasoningOptions,
    RequestBody,
    TemplateValues,
    Text,
    ThinkingBudgets,
    ThinkingOptions,
    TopLogprobs,
)
from paceline.server.worker import ReplyRound


class PredictedContent(Strict):
    """OpenAI's predicted outputs."""

    type: Literal["content"]
    content: Text | Annotated[list[ContentPart], Field(fail_fast=True, max_length=10_000)]

    @property
    def text(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @model_validator(mode="after")
    def _is_text(self) -> PredictedContent:
        for i, part in enumerate([] if isinstance(self.content, str) else self.content):
            if part.type != "text":
                param = f"prediction.content.{i}"
                raise WrongParameter(f"{param}: type must be 'text', got {part.type!r:.60}", param)
        return self


@accepts(
    ignored_parameters(
        "metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options",
        "it has no effect on a local server",
    ),
    accepted_values((1,), "best_of", "only /v1/completions has it"),
    accepted_values((False,), "echo", "`continue_final_message` continues a message"),
    accepted_values((False,), "add_special_tokens", "the chat template adds the special tokens"),
    accepted_values((True,), "include_reasoning", "reasoning is returned separately from the text"),
    accepted_values((True,), "parse_tool_calls", "calls are parsed if tools are sent"),
    accepted_values(([],), "documents", "put documents into a message"),
    accepted_values(("",), "chat_template", "the model's own template is used"),
    accepted_values((), "input_ids", "/v1/completions takes token ids"),
    accepted_values((), "task", "put the task into a message"),
    accepted_values(("medium",), "verbosity", "put it into a message"),
    accepted_values((), "audio", "this server writes text only"),
    accepted_values((), "web_search_options moderation", "this server writes text only"),
)
class ChatRequest(ThinkingBudgets, RequestBody):
    """Body of /v1/chat/completions."""

    messages: MessageList
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    prediction: PredictedContent | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: TemplateValues | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[
        bool | None, Field(description="The reply continues the last message, which must be the assistant's.")
    ] = None
    functions: Annotated[list[Function], Field(max_length=MAX_TOOLS, description="OpenAI's legacy `tools`.")] | None = (
        None
    )
    function_call: Literal["none", "auto"] | FunctionName | None = None

    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    reasoning: (
        Annotated[Literal["off", "auto"], Field(description="off: the model does not reason.")]
        | ReasoningOptions
        | None
    ) = None
    reasoning_effort: (
        Annotated[Effort, Field(description="none: as `reasoning` off; others are passed to the chat template.")] | None
    ) = None
    reasoning_format: (
        Annotated[Literal["none", "auto", "deepseek"], Field(description="none: reasoning is part of the text.")] | None
    ) = None

    # Names that other servers use
    enable_thinking: bool | None = None
    think: bool | Effort | None = None
    thinking: bool | ThinkingOptions | None = None

    @property
    def constrained(self) -> bool:
        return self.choice not in ("none", "auto") or super().constrained

    @property
    def image_chars(self) -> int:
        return image_chars(self.messages)

    @property
    def template_values(self) -> dict[str, Any]:
        """Variables of the chat template."""
        return {**reasoning_values(next(iter(self._efforts), None)), **(self.chat_template_kwargs or {})}

    @property
    def _efforts(self) -> dict[str, str]:
        """Effort ("none", a level, or "on" for any level) -> the parameter that asks for it."""
        reasoning, thinking = self.reasoning, self.thinking
        given: dict[str, Any] = {
            "reasoning": "none" if reasoning == "off" else None,
            "reasoning_effort": self.reasoning_effort,
            "enable_thinking": self.enable_thinking,
            "think": self.think,
            "thinking": thinking.type != "disabled" if isinstance(thinking, ThinkingOptions) else thinking,
        }
        if isinstance(reasoning, ReasoningOptions):
            given["reasoning"] = reasoning.effort or reasoning.enabled
        named = {True: "on", False: "none"}
        found = {named.get(value, value): name for name, value in given.items() if value is not None}
        levels = {effort: name for effort, name in found.items() if effort != "on"}
        return found if "none" in found else levels or found

    @property
    def reasoning_limit(self) -> int | None:
        """Maximum tokens of reasoning; None for no limit. Raises `WrongParameter` if several limits differ."""
        return self.budget(
            reasoning=self.reasoning.max_tokens if isinstance(self.reasoning, ReasoningOptions) else None,
            thinking=self.thinking.budget_tokens if isinstance(self.thinking, ThinkingOptions) else None,
        )

    @property
    def choice(self) -> Literal["none", "auto", "required"] | NamedTool | AllowedTools:
        """The tool choice, sent as `tool_choice` or as the legacy `function_call`."""
        if isinstance(self.function_call, FunctionName):
            return NamedTool(type="function", function=self.function_call)
        return self.tool_choice or self.function_call or "auto"

    @property
    def tool_offer(self) -> ToolOffer:
        """The functions and which of them may be called. Raises `ApiError` 400 for a choice that contradicts them."""
        offered = [*(tool.offered for tool in self.tools or ()), *(one.offered for one in self.functions or ())]
        mode, names, choice = "required", None, self.choice
        if isinstance(choice, str):
            mode = choice
        elif isinstance(choice, NamedTool):
            names = [choice.function.name]
        else:
            mode = choice.allowed_tools.mode
            names = [tool.function.name for tool in choice.allowed_tools.tools]
        return ToolOffer.chosen(
            offered,
            mode,
            names,
            single=bool(self.functions) or self.parallel_tool_calls is False,
            where="functions" if self.functions else "tools",
            param="function_call" if self.function_call else "tool_choice",
        )

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.length == 0:
            name = next(name for name in LENGTHS if getattr(self, name) == 0)
            raise WrongParameter(f"{name} must be >= 1, or -1 for as many as fit, got 0", name)
        if self.tools and (self.functions or self.function_call):
            raise WrongParameter(
                "functions and function_call are the legacy names of tools and tool_choice. Send only tools",
                "functions" if self.functions else "function_call",
            )
        if len(self._efforts) > 1:
            names = [*self._efforts.values()]
            raise WrongParameter(f"{' and '.join(names)} have different values. Send one of them", names[0])
        if self.add_generation_prompt and self.continue_final_message:
            raise WrongParameter(
                "continue_final_message and add_generation_prompt are mutually exclusive. Send one of them",
                "continue_final_message",
            )
        return self


@dataclass(slots=True, kw_only=True)
class ChatChoice(Choice):
    """A choice of a chat completion. `legacy`: calls are sent as `function_call`. `custom`: names of custom tools."""

    reply: ChatReply
    legacy: bool = False
    custom: frozenset[str] = frozenset()
    token_logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def reasoning_tokens(self) -> int:
        return self.reply.reasoning_tokens

    def first_event(self) -> dict[str, Any]:
        """Return the event with the assistant's role."""
        return self.event({"role": "assistant", "content": None if self.reply.forced else ""})

    def as_dict(self) -> dict[str, Any]:
        """Return a choice of a `chat.completion`."""
        reply = self.reply
        message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            calls = [self._call(call) for call in reply.calls]
            message["content"] = reply.text or None
            message |= {"function_call": calls[0]["function"]} if self.legacy else {"tool_calls": calls}
        return {
            "index": self.index,
            "message": message,
            "logprobs": {"content": self.token_logprobs, "refusal": None} if self.logprobs else None,
            "finish_reason": self.finish_reason,
            **self._all_traced(),
        }

    def event(self, delta: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return {"index": self.index, "delta": delta or {}, "logprobs": None, "finish_reason": None}

    def _events(self, round_: ReplyRound) -> list[dict[str, Any]]:
        events = [
            self.event(self._delta(event))
            for event in self.reply.add(round_)
            if not isinstance(event, BlockEnded) and event.block.name not in self.custom
        ]
        if self.reply.finish_reason:
            # The text of a custom tool's call is known only once its JSON is complete.
            whole = [(i, call) for i, call in enumerate(self.reply.calls) if call.name in self.custom]
            events += [self.event({"tool_calls": [{"index": i, **self._call(call)}]}) for i, call in whole]
        if self.logprobs or self.trace:
            events = events or [self.event()]
            events[0] |= self._trace(round_)
        if self.logprobs:
            new = [self.token_texts.chat_logprobs(chunk) for chunk in round_.chunks]
            self.token_logprobs += new
            events[0]["logprobs"] = {"content": new, "refusal": None}
        return events

    def _delta(self, event: BlockBegun | BlockGrown) -> dict[str, Any]:
        """Return more of a block as a delta."""
        block = event.block
        if block.kind != "call":
            return {"reasoning_content" if block.kind == "reasoning" else "content": event.text}
        new = Call(block.name, event.text, block.id).as_dict() if isinstance(event, BlockBegun) else None
        new = new or {"function": {"arguments": event.text}}
        index = self.reply.calls.index(block)
        return {"function_call": new["function"]} if self.legacy else {"tool_calls": [{"index": index, **new}]}

    def _call(self, call: ReplyBlock) -> dict[str, Any]:
        if call.name not in self.custom:
            return call.call
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text_of(call.text)}}

    def _finish(self, reason: str) -> str:
        finished = self.reply.finish_reason or Choice._finish(self, reason)
        return "function_call" if finished == "tool_calls" and self.legacy else finished


class ChatCompletions(Api[ChatRequest]):
    """OpenAI's chat completions."""

    path = "/v1/chat/completions"
    body = ChatRequest
    id_prefix = "chatcmpl-"
    about = "Generate the next message of a chat."

    def decode(self, body: ChatRequest) -> GenerateRequest:
        prompt = ChatPrompt(
            messages=chat_messages(body.messages),
            tools=body.tool_offer,
            values=body.template_values,
            continues_last=bool(body.continue_final_message),
            opens_reply=body.add_generation_prompt is not False,
            split=body.reasoning_format != "none",
        )
        logprobs = requested_logprobs(body.logprobs, body.top_logprobs)
        return GenerateRequest(
            prompt=prompt,
            sampling=body.sampling,
            constraints=body.constraints(),
            max_tokens=-1 if body.length is None else body.length,
            samples=body.samples,
            logprobs=0 if logprobs is None and body.trace else logprobs,
            thinking_budget=body.reasoning_limit,
            prediction=body.prediction.text if body.prediction else None,
            speculation=body.speculation,
        )

    def encoder(self, body: ChatRequest, prepared: PreparedRequest) -> ChoicesEncoder:
        custom = frozenset(tool.function.name for tool in body.tools or () if tool.type == "custom")
        choices = [
            ChatChoice(
                index=index,
                token_texts=prepared.model.token_texts,
                logprobs=bool(body.logprobs),
                trace=bool(body.trace),
                reply=reply,
                legacy=bool(body.functions),
                custom=custom,
            )
            for index, reply in enumerate(prepared.replies)
        ]
        return ChoicesEncoder(body, prepared, ("chat.completion", "chat.completion.chunk"), choices)
