"""From the messages of a chat to a prompt and the jobs of its replies."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.engine.prediction import predicted_ids
from paceline.errors import InvalidPrompt, PacelineError, TimedOut
from paceline.llm import LLM
from paceline.sampling.json_schema import guide
from paceline.sampling.parameters import Sampling
from paceline.server import options, thinking, tools
from paceline.server.calls import CallParser, ForcedCallParser
from paceline.server.errors import bad_request
from paceline.server.limits import Settings
from paceline.server.models import LoadedModel
from paceline.server.replies import ChatReply
from paceline.server.schema import ChatRequest, Message, NamedTool, Schema, Tool
from paceline.server.schema_tokens import PromptRequest
from paceline.server.tools import CallFormat
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


def prepare(model: LoadedModel, settings: Settings, body: ChatRequest, orderly: bool = False) -> PreparedChat:
    """Prepare every reply's tokens, sampling and speculation. `orderly`: see `chat_text`.

    Raises `PacelineError` and `ApiError`.
    """
    llm = model.llm
    family, calling = tools.family(llm.tokenizer.chat_template), CallOptions.of(body)
    functions = calling.functions
    text = chat_text(llm, body, calling.shown, orderly)
    options.check_length(llm, settings, text, "messages")
    form = thinking.family(llm.tokenizer.chat_template)
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
    tokens = options.token_ids(llm, text, "messages", chat=True)
    options.check_length(llm, settings, tokens, "messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = options.sampling(llm, body, options.length(llm, body), logprobs, grammar)
    if body.prediction:
        # Here, and not where the reply begins, which holds up all others.
        predicted = predicted_ids(
            body.prediction.text, llm.tokenizer.encode, sampling.max_new_tokens, llm.model.target.vocab_size
        )
        sampling = replace(sampling, prediction=predicted)

    def parser() -> CallParser | ForcedCallParser | None:
        if calling.forced:
            return ForcedCallParser(family, functions)
        single = bool(body.functions) or body.parallel_tool_calls is False
        return CallParser(family, functions, single) if functions else None

    def reply() -> ChatReply:
        return ChatReply(
            parser=parser(),
            thoughts=form.parser(inside) if form else None,
            markers={token: marker for marker, token in markers.items()},
        )

    return PreparedChat(options.jobs(llm, settings, body, [tokens], sampling), reply, sampling)


def _special(llm: LLM, *markers: str) -> dict[str, int]:
    """Return those markers that are special tokens, which a reply's text leaves out, with their ids."""
    ids = {marker: llm.tokenizer.token_id(marker) for marker in markers}
    return {marker: token for marker, token in ids.items() if token is not None and token in llm.tokenizer.special_ids}


def chat_text(
    llm: LLM, body: ChatRequest | PromptRequest, offered: Sequence[Tool] | None, orderly: bool = False
) -> str:
    """Return a chat's prompt as text. `orderly`: messages that the template refuses are tried again in the order that
    every template expects. Raises `ApiError` 400 naming the messages.
    """
    chat = [_as_template_message(message) for message in body.messages or ()]
    given = [tool.model_dump(exclude_none=True) for tool in offered or ()]
    reserved = body.template_values.keys() & {"messages", "tools", "add_generation_prompt", "self"}
    if reserved:
        raise bad_request(f"chat_template_kwargs must not contain {reserved.pop()!r}", "chat_template_kwargs")
    try:
        try:
            return _rendered(llm, body, chat, given)
        except InvalidPrompt:
            if not orderly or (ordered := _ordered(chat)) == chat:
                raise
            return _rendered(llm, body, ordered, given)
    except TimedOut as error:
        raise Busy(error.cause, error.fix) from error
    except PacelineError as error:
        raise bad_request(str(error), "messages") from error


def _rendered(
    llm: LLM, body: ChatRequest | PromptRequest, chat: list[dict[str, Any]], given: list[dict[str, Any]]
) -> str:
    template = llm.tokenizer.chat_template
    if given and not tools.knows_tools(template):
        chat, given = tools.with_tools(check_messages(chat), given), []
    values = {"tools": given or None, **body.template_values}
    if body.continue_final_message:
        return _continued(llm, chat, values)
    text = llm.tokenizer.apply_chat_template(chat, body.add_generation_prompt is not False, **values)
    form = thinking.family(template)
    return form.skip(text) if form and values.get("enable_thinking") is False else text


def _ordered(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat with all instructions in one message at its beginning, and no two of the user's in a row."""
    system = [message for message in chat if message["role"] == "system"]
    ordered: list[dict[str, Any]] = []
    for message in (*system, *(message for message in chat if message["role"] != "system")):
        last = ordered[-1] if ordered else None
        if last and last["role"] == message["role"] in ("system", "user"):
            ordered[-1] = {**last, "content": f"{_text_of(last)}\n\n{_text_of(message)}"}
        else:
            ordered.append(message)
    return ordered


def _text_of(message: dict[str, Any]) -> str:
    return str(check_messages([message])[0]["content"])


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
    if message.calls and not message.content and message.reasoning_content:
        found["thinking"] = message.reasoning_content  # its name in gpt-oss's template
    found["content"] = message.refusal if message.content is None else found["content"]
    return {**found, "role": _TEMPLATE_ROLES.get(message.role, message.role)}
