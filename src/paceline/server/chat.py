"""/v1/chat/completions: from messages to a prompt, and from a reply to a message, whole or in pieces."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.engine.prediction import predicted_ids
from paceline.errors import InvalidPrompt, PacelineError, TimedOut
from paceline.llm import LLM
from paceline.server import options, tools
from paceline.server.calls import Call, CallParser, ForcedCallParser, Piece
from paceline.server.choices import Choice, PreparedRequest, TokenTexts
from paceline.server.errors import bad_request
from paceline.server.limits import Settings
from paceline.server.schema import ChatRequest, Message, NamedTool, TokenizeRequest, Tool
from paceline.server.tools import CallFormat
from paceline.server.worker import Busy, ReplyRound
from paceline.text.chat_template import check_messages

_MESSAGE_FIELDS = {"role", "content", "name", "tool_call_id", "reasoning_content"}
_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}


@dataclass(slots=True, kw_only=True)
class ChatChoice(Choice):
    """A choice of a chat completion.

    `parser`: None if no tool may be called. `marker`: a special token that begins a call, and the text it stands for.
    `legacy`: calls are sent as `function_call`.
    """

    parser: CallParser | ForcedCallParser | None = None
    marker: tuple[int, str] | None = None
    legacy: bool = False
    calls: list[Call] = field(default_factory=list)
    token_logprobs: list[dict[str, Any]] = field(default_factory=list)

    def first_event(self) -> dict[str, Any]:
        """Return the event with the assistant's role."""
        return self._event({"role": "assistant", "content": None if isinstance(self.parser, ForcedCallParser) else ""})

    def as_dict(self) -> dict[str, Any]:
        """Return a choice of a `chat.completion`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.calls:
            calls = [call.as_dict() for call in self.calls]
            message["content"] = self.text or None
            message |= {"function_call": calls[0]["function"]} if self.legacy else {"tool_calls": calls}
        return {
            "index": self.index,
            "message": message,
            "logprobs": {"content": self.token_logprobs, "refusal": None} if self.logprobs else None,
            "finish_reason": self.finish_reason,
            **self._all_traced(),
        }

    def _event(self, delta: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"index": self.index, "delta": delta or {}, "logprobs": None, "finish_reason": None}

    def _events(self, round_: ReplyRound) -> list[dict[str, Any]]:
        text, pieces = self._parse(round_)
        self.text += text
        events = [self._event({"content": text})] if text else []
        events += [self._event(self._call_delta(piece)) for piece in pieces]
        if self.logprobs or self.trace:
            events = events or [self._event()]
            events[0] |= self._trace(round_)
        if self.logprobs:
            new = [self.token_texts.chat_logprobs(chunk) for chunk in round_.chunks]
            self.token_logprobs += new
            events[0]["logprobs"] = {"content": new, "refusal": None}
        return events

    def _parse(self, round_: ReplyRound) -> tuple[str, list[Piece]]:
        if self.parser is None:
            return round_.text, []
        token, marker = self.marker or (None, "")
        text = "".join(chunk.text + (marker if chunk.token_id == token else "") for chunk in round_.chunks)
        shown, pieces = self.parser.push(text)
        rest, last = self.parser.flush() if round_.chunks[-1].finish_reason else ("", [])
        return shown + rest, [*pieces, *last]

    def _call_delta(self, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, str):
            self.calls[-1] = replace(self.calls[-1], arguments=self.calls[-1].arguments + piece)
            new: dict[str, Any] = {"function": {"arguments": piece}}
        else:
            self.calls.append(piece)
            new = piece.as_dict()
        if self.legacy:
            return {"function_call": new["function"]}
        return {"tool_calls": [{"index": len(self.calls) - 1, **new}]}

    def _finish(self, reason: str) -> str:
        incomplete = isinstance(self.parser, ForcedCallParser) and not self.parser.complete
        if self.calls and reason != "length" and not incomplete:
            return "function_call" if self.legacy else "tool_calls"
        return Choice._finish(self, reason)


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Tools of a request: those that the prompt `shows`, those that may be called, and whether one must be."""

    shown: Sequence[Tool] = ()
    callable: Sequence[Tool] = ()
    forced: bool = False

    @staticmethod
    def of(body: ChatRequest) -> CallOptions:
        """Return the options that a request sets."""
        offered, choice = body.offered, body.choice
        if choice == "none":
            return CallOptions()
        if isinstance(choice, str):
            return CallOptions(offered, offered, choice == "required")
        allowed = [choice] if isinstance(choice, NamedTool) else choice.allowed_tools.tools
        names = {tool.function.name for tool in allowed}
        forced = isinstance(choice, NamedTool) or choice.allowed_tools.mode == "required"
        return CallOptions(offered, [tool for tool in offered if tool.function.name in names], forced)

    def grammar(self, family: CallFormat, marker: int | None, body: ChatRequest) -> str | None:
        """Return the grammar of a reply that must be a call, or is a call or constrained JSON; None for any other.

        A constraint of the request is one of the content, which a forced call does not have.
        """
        if not self.callable:
            return None
        content = options.content_schema(body)
        if not self.forced and content is None:
            return None
        functions = [(tool.function.name, tool.function.parameters) for tool in self.callable]
        return family.grammar(functions, marker, None if self.forced else content)


def prepare(
    llm: LLM, settings: Settings, token_texts: TokenTexts, trials: options.GrammarTrials, body: ChatRequest
) -> PreparedRequest:
    """Prepare every reply's tokens, sampling and speculation. Raises `PacelineError` and `ApiError`."""
    family = tools.family(llm.tokenizer.chat_template)
    calling = CallOptions.of(body)
    marker = _marker(llm, family) if calling.callable else None
    grammar = options.grammar(trials, body, calling.grammar(family, marker[0] if marker else None, body))
    thinking = {"enable_thinking": False} if body.reasoning_effort == "none" else {}
    values = {**thinking, **(body.chat_template_kwargs or {})}
    text = chat_text(llm, body, calling.shown, values)
    options.check_length(llm, settings, text, "messages")
    tokens = options.token_ids(llm, text, "messages", chat=True)
    options.check_length(llm, settings, tokens, "messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = options.sampling(llm, body, options.length(llm, body), logprobs, grammar)
    if body.prediction:
        # Here, and not where the reply begins, which holds up all others.
        predicted = predicted_ids(body.prediction.text, llm.tokenizer.encode, sampling.max_new_tokens)
        sampling = replace(sampling, prediction=predicted)
    legacy = bool(body.functions)
    names = [tool.function.name for tool in calling.callable]

    def parser() -> CallParser | ForcedCallParser | None:
        if calling.forced:
            return ForcedCallParser(family, names)
        single = legacy or body.parallel_tool_calls is False
        return CallParser(family, names, single) if names else None

    def choice(index: int) -> ChatChoice:
        return ChatChoice(
            index=index,
            token_texts=token_texts,
            logprobs=bool(body.logprobs),
            trace=bool(body.trace),
            parser=parser(),
            marker=marker,
            legacy=legacy,
        )

    jobs = options.jobs(llm, settings, body, [tokens], sampling)
    return PreparedRequest(jobs, choice, "chat.completion", "chat.completion.chunk")


def _marker(llm: LLM, family: CallFormat) -> tuple[int, str] | None:
    token = llm.tokenizer.token_id(family.start)
    return (token, family.start) if token is not None and token in llm.tokenizer.special_ids else None


def chat_text(
    llm: LLM, body: ChatRequest | TokenizeRequest, offered: Sequence[Tool] | None, values: dict[str, Any]
) -> str:
    """Return a chat's prompt as text. `values`: further variables of the template. Raises `ApiError` 400 naming the
    messages.
    """
    chat = [_as_template_message(message) for message in body.messages or ()]
    given = [tool.model_dump(exclude_none=True) for tool in offered or ()]
    reserved = values.keys() & {"messages", "tools", "add_generation_prompt", "self"}
    if reserved:
        raise bad_request(f"chat_template_kwargs must not contain {reserved.pop()!r}", "chat_template_kwargs")
    try:
        if given and not tools.knows_tools(llm.tokenizer.chat_template):
            chat, given = tools.with_tools(check_messages(chat), given), []
        values = {"tools": given or None, **values}
        if body.continue_final_message:
            return _continued(llm, chat, values)
        return llm.tokenizer.apply_chat_template(chat, body.add_generation_prompt is not False, **values)
    except TimedOut as error:
        raise Busy(error.cause, error.fix) from error
    except PacelineError as error:
        raise bad_request(str(error), "messages") from error


def _continued(llm: LLM, chat: list[dict[str, Any]], values: dict[str, Any]) -> str:
    """Return the prompt up to the end of the last message, where a marker shows what the template adds to close it."""
    marker = f"[{uuid.uuid4().hex}]"
    content = check_messages(chat[-1:])[0]["content"]
    text = llm.tokenizer.apply_chat_template([*chat[:-1], {**chat[-1], "content": content + marker}], False, **values)
    before, found, _ = text.partition(marker)
    if not found:
        raise InvalidPrompt(
            "the chat template does not show the last message, which the reply is to continue",
            "Send it as the user's, or leave out continue_final_message",
        )
    return before


def _as_template_message(message: Message) -> dict[str, Any]:
    """Return a message in the form that chat templates expect."""
    found = message.model_dump(include=_MESSAGE_FIELDS, exclude_none=True)
    if message.calls:
        found["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.calls]
    found["content"] = message.refusal if message.content is None else found["content"]
    return {**found, "role": _TEMPLATE_ROLES.get(message.role, message.role)}
