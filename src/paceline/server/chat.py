"""From the messages of a chat to a prompt and the jobs of its replies."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paceline.engine.prediction import predicted_ids
from paceline.errors import InvalidPrompt, PacelineError, TimedOut
from paceline.llm import LLM
from paceline.sampling.json_schema import guide
from paceline.sampling.parameters import Sampling
from paceline.server import options, thinking, tools
from paceline.server.calls import CallParser, ForcedCallParser, ReasonedCalls
from paceline.server.errors import ContextExceeded, bad_request
from paceline.server.limits import Settings
from paceline.server.models import LoadedModel
from paceline.server.replies import ChatReply
from paceline.server.schema import ChatRequest, Message, NamedTool, Schema, Tool
from paceline.server.schema_tokens import PromptRequest
from paceline.server.tools import CallFormat
from paceline.server.truncation import truncated
from paceline.server.worker import Busy, ReplyJob
from paceline.text.chat_template import check_messages

_MESSAGE_FIELDS = {"role", "content", "name", "tool_call_id", "reasoning_content"}
_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}


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

    @property
    def functions(self) -> dict[str, Schema | None]:
        """The schemas of the functions that may be called, by their names."""
        return {tool.function.name: _parameters(tool) for tool in self.callable}

    def grammar(self, family: CallFormat, special: Mapping[str, int], body: ChatRequest) -> str | None:
        """Return the grammar of a reply that must be a call, or is a call or constrained JSON; None for any other.

        A constraint of the request is one of the content, which a forced call does not have.
        """
        if not self.callable:
            return None
        content = options.content_schema(body)
        if not self.forced and content is None:
            return None
        return family.grammar([*self.functions.items()], special, None if self.forced else content)


def _parameters(tool: Tool) -> Schema | None:
    """Return the schema of a function's arguments, which is a guide unless the function is strict."""
    schema = tool.function.parameters
    return guide(schema, lenient=False) if schema and tool.function.strict else schema


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """The jobs of a chat, and a new reply for each."""

    jobs: Sequence[ReplyJob]
    reply: Callable[[], ChatReply]
    sampling: Sampling


def prepare(model: LoadedModel, settings: Settings, body: ChatRequest, truncate: bool = False) -> PreparedChat:
    """Prepare every reply's tokens, sampling and speculation. `truncate`: leave out the oldest messages of a chat that
    is too long.

    Raises `PacelineError` and `ApiError`.
    """
    try:
        return _prepare(model, settings, body)
    except ContextExceeded:
        if not truncate:
            raise
    llm = model.llm
    size = partial(_size, llm, settings, CallOptions.of(body).shown)
    return _prepare(model, settings, truncated(body, size, options.prompt_limit(llm, settings)))


def _prepare(model: LoadedModel, settings: Settings, body: ChatRequest) -> PreparedChat:
    llm = model.llm
    family, calling = call_format(llm), CallOptions.of(body)
    functions = calling.functions
    text = chat_text(llm, body, calling.shown)
    options.check_length(llm, settings, text, "messages")
    form = thinking.family(llm.tokenizer.template_for(bool(calling.shown)))
    budget = None
    if form and body.budget is not None and not form.over(text):
        budget = form.budget(body.budget, form.begun(text))
    if form and (form.over(text) or (body.reasoning_format == "none" and form is not thinking.HARMONY)):
        form = None
    inside = form is not None and form.begun(text)
    markers = _special(llm, *(family.markers if functions else ()), *(form.markers if form else ()))
    grammar = options.grammar(
        model.grammar_trials,
        body,
        calling.grammar(family, markers, body),
        form.rules(inside, markers) if form else None,
    )
    if grammar and form is None:
        budget = None  # the grammar has no reasoning
    tokens = options.token_ids(llm, text, "messages", chat=True)
    options.check_length(llm, settings, tokens, "messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = replace(
        options.sampling(llm, body, options.length(llm, body), logprobs, grammar), thinking_budget=budget
    )
    if form:
        sampling = replace(sampling, reasoning=form.reasoning(inside))
    if body.prediction:
        # Here, and not where the reply begins, which holds up all others.
        predicted = predicted_ids(
            body.prediction.text, llm.tokenizer.encode, sampling.max_new_tokens, llm.model.target.vocab_size
        )
        sampling = replace(sampling, prediction=predicted)

    single = bool(body.functions) or body.parallel_tool_calls is False

    def parser() -> CallParser | ForcedCallParser | None:
        if calling.forced:
            return ForcedCallParser(family, functions)
        return CallParser(family, functions, single, bare=grammar is None) if functions else None

    def reply() -> ChatReply:
        return ChatReply(
            parser=parser(),
            thoughts=form.parser(inside) if form else None,
            reasoned=ReasonedCalls(family, functions, single) if form and functions and not calling.forced else None,
            markers={token: marker for marker, token in markers.items()},
        )

    return PreparedChat(options.jobs(llm, settings, body, [tokens], sampling), reply, sampling)


def call_format(llm: LLM) -> CallFormat:
    """Return the format in which a model writes calls."""
    template, token_id = llm.tokenizer.template_for(tools=True), llm.tokenizer.token_id
    return tools.family(template if tools.knows_tools(template) else None, lambda text: token_id(text) is not None)


def _size(llm: LLM, settings: Settings, shown: Sequence[Tool], body: ChatRequest) -> int:
    """Return the tokens of a chat's prompt; at least as many for a text that is too long whatever its tokens are."""
    text = chat_text(llm, body, shown)
    try:
        options.check_length(llm, settings, text, "messages")
    except ContextExceeded as error:
        return error.size
    return len(options.token_ids(llm, text, "messages", chat=True))


def _special(llm: LLM, *markers: str) -> dict[str, int]:
    """Return those markers that are special tokens, which a reply's text leaves out, with their ids."""
    ids = {marker: llm.tokenizer.token_id(marker) for marker in markers}
    return {marker: token for marker, token in ids.items() if token is not None and token in llm.tokenizer.special_ids}


def chat_text(llm: LLM, body: ChatRequest | PromptRequest, offered: Sequence[Tool] | None) -> str:
    """Return a chat's prompt as text. Raises `ApiError` 400 naming the messages."""
    _check_new(body.messages or ())
    chat = [_as_template_message(message) for message in body.messages or ()]
    given = [tool.shown for tool in offered or ()]
    reserved = body.template_values.keys() & {"messages", "tools", "add_generation_prompt", "self"}
    if reserved:
        raise bad_request(f"chat_template_kwargs must not contain {reserved.pop()!r}", "chat_template_kwargs")
    try:
        return _rendered(llm, body, chat, given)
    except TimedOut as error:
        raise Busy(error.cause, error.fix) from error
    except PacelineError as error:
        raise bad_request(str(error), "messages") from error


def _rendered(
    llm: LLM, body: ChatRequest | PromptRequest, chat: list[dict[str, Any]], given: list[dict[str, Any]]
) -> str:
    template = llm.tokenizer.template_for(bool(given))
    if tools.knows_tools(template):
        chat, given = tools.fitted(template, call_format(llm), check_messages(chat), given)
        return _applied(llm, body, chat, given)
    if given:
        return _applied(llm, body, tools.with_tools(check_messages(chat), given), [])
    try:
        return _applied(llm, body, chat, [])
    except InvalidPrompt:
        if not any(message["role"] == "tool" or "tool_calls" in message for message in chat):
            raise
        return _applied(llm, body, tools.with_tools(check_messages(chat), []), [])


def _applied(
    llm: LLM, body: ChatRequest | PromptRequest, chat: list[dict[str, Any]], given: list[dict[str, Any]]
) -> str:
    values = {"tools": given or None, **body.template_values}
    if body.continue_final_message:
        return _continued(llm, chat, values)
    text = llm.tokenizer.apply_chat_template(chat, body.add_generation_prompt is not False, **values)
    form = thinking.family(llm.tokenizer.template_for(bool(given)))
    return form.skip(text) if form and values.get("enable_thinking") is False else text


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


def _check_new(messages: Sequence[Message]) -> None:
    """Raise `ApiError` 400 if the last message is the user's and has a part that is not text. In earlier messages and
    in results of tools a note stands for it, since the client that sent it cannot take it back."""
    last = messages[-1] if messages else None
    if last is not None and last.role == "user" and isinstance(last.content, list):
        for i, part in enumerate(last.content):
            if part.type != "text":
                param = f"messages.{len(messages) - 1}.content.{i}"
                raise bad_request(f"{param}: type must be 'text', got {part.type!r:.60}", param)


def _as_template_message(message: Message) -> dict[str, Any]:
    """Return a message in the form that chat templates expect."""
    found = message.model_dump(include=_MESSAGE_FIELDS, exclude_none=True)
    if message.calls:
        found["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.calls]
    if message.calls and not message.content and message.reasoning_content:
        found["thinking"] = message.reasoning_content  # its name in gpt-oss's template
    if isinstance(message.content, list):
        found["content"] = [{"type": "text", "text": part.text} for part in message.content]
    elif message.content is None:
        found["content"] = message.refusal or ""
    return {**found, "role": _TEMPLATE_ROLES.get(message.role, message.role)}
