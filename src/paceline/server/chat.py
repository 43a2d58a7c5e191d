"""/v1/chat/completions: from messages to a prompt, and from a reply to a message, whole or piece by piece."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.errors import InvalidPrompt, PacelineError, TimedOut
from paceline.llm import LLM
from paceline.server import options, tools
from paceline.server.calls import Call, CallReader, ForcedReader, Piece
from paceline.server.errors import bad_request
from paceline.server.grammar_trials import Trials
from paceline.server.limits import Settings
from paceline.server.running import ReplyRound, RequestPlan
from paceline.server.schema import ChatRequest, Message, NamedTool, Tool
from paceline.server.token_text import TokenTexts
from paceline.server.tools import CallFormat
from paceline.server.worker import Busy
from paceline.text.chat_template import check_messages

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}


@dataclass(slots=True)
class ChatChoice:
    """One reply of a chat, as it grows. `former`: calls are shown as OpenAI's `function_call`."""

    index: int
    words: TokenTexts
    logprobs: bool
    trace: bool
    reader: CallReader | ForcedReader | None
    opener: tuple[int, str] | None
    """The token that begins a call without being shown, and what it stands for."""
    former: bool = False
    text: str = ""
    calls: list[Call] = field(default_factory=list)
    said: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None

    def opening(self) -> dict[str, Any]:
        """The first event of a stream."""
        return self._event({"role": "assistant", "content": None if isinstance(self.reader, ForcedReader) else ""})

    def take(self, round_: ReplyRound) -> list[dict[str, Any]]:
        """Takes a round in. Returns its events; the one that says why the reply ended has nothing else to show."""
        ended = round_.chunks[-1].finish_reason
        text, pieces = self._read(round_)
        self.text += text
        events = [self._event({"content": text})] if text else []
        events += [self._event(self._call(piece)) for piece in pieces]
        if self.logprobs or self.trace:
            events = events or [self._event({})]
            events[0] |= self._about(round_)
        if ended:
            self.finish = self._finish(ended)
            events.append({**self._event({}), "finish_reason": self.finish})
        return events

    def _read(self, round_: ReplyRound) -> tuple[str, list[Piece]]:
        if self.reader is None:
            return "".join(chunk.text for chunk in round_.chunks), []
        opener, sign = self.opener or (None, "")
        text = "".join(chunk.text + (sign if chunk.token_id == opener else "") for chunk in round_.chunks)
        shown, pieces = self.reader.push(text)
        rest, last = self.reader.flush() if round_.chunks[-1].finish_reason else ("", [])
        return shown + rest, [*pieces, *last]

    def _call(self, piece: Piece) -> dict[str, Any]:
        """What of a call is new, as a delta."""
        if isinstance(piece, str):
            self.calls[-1] = replace(self.calls[-1], arguments=self.calls[-1].arguments + piece)
            new: dict[str, Any] = {"function": {"arguments": piece}}
        else:
            self.calls.append(piece)
            new = piece.as_dict()
        return {"function_call": new["function"]} if self.former else {"tool_calls": [_numbered(self.calls, new)]}

    def _about(self, round_: ReplyRound) -> dict[str, Any]:
        """What was asked for beside the text."""
        found: dict[str, Any] = {}
        if self.logprobs:
            said = [self.words.chat_logprobs(chunk) for chunk in round_.chunks]
            self.said += said
            found["logprobs"] = {"content": said, "refusal": None}
        if self.trace:
            self.rounds.append(self.words.trace(round_))
            found |= self.rounds[-1]
        return found

    def _finish(self, ended: str) -> str:
        cut = isinstance(self.reader, ForcedReader) and not self.reader.complete
        if self.calls and ended != "length" and not cut:
            return "function_call" if self.former else "tool_calls"
        return FINISH.get(ended, ended)

    def _event(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def whole(self) -> dict[str, Any]:
        """The reply as a choice of a `chat.completion`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.calls:
            made = [call.as_dict() for call in self.calls]
            message["content"] = self.text or None
            message |= {"function_call": made[0]["function"]} if self.former else {"tool_calls": made}
        choice = {
            "index": self.index,
            "message": message,
            "logprobs": {"content": self.said, "refusal": None} if self.logprobs else None,
            "finish_reason": self.finish,
        }
        if self.trace:
            choice["trace"] = [token for made in self.rounds for token in made["trace"]]
        return choice


def _numbered(made: Sequence[Call], new: dict[str, Any]) -> dict[str, Any]:
    return {"index": len(made) - 1, **new}


@dataclass(frozen=True, slots=True)
class Calling:
    """Functions that a reply may call, or must: `forced`. `told`: those that the prompt shows."""

    told: Sequence[Tool] = ()
    tools: Sequence[Tool] = ()
    forced: bool = False

    @staticmethod
    def of(body: ChatRequest) -> Calling:
        offered, choice = body.offered, body.choice
        if choice == "none":
            return Calling()
        if isinstance(choice, str):
            return Calling(offered, offered, choice == "required")
        allowed = [choice] if isinstance(choice, NamedTool) else choice.allowed_tools.tools
        names = {tool.function.name for tool in allowed}
        forced = isinstance(choice, NamedTool) or choice.allowed_tools.mode == "required"
        return Calling(offered, [tool for tool in offered if tool.function.name in names], forced)

    @property
    def names(self) -> list[str]:
        return [tool.function.name for tool in self.tools]

    def grammar(self, family: CallFormat, marker: int | None, body: ChatRequest) -> str | None:
        """Of a reply that must be a call, or is one or JSON of a form; None: it may be any text, or there are no tools.

        A form asked for besides is that of the content, of which a forced call has none.
        """
        if not self.tools:
            return None
        content = options.content_schema(body)
        if not self.forced and content is None:
            return None
        functions = [(tool.function.name, tool.function.parameters) for tool in self.tools]
        return family.grammar(functions, marker, None if self.forced else content)


def plan(llm: LLM, settings: Settings, words: TokenTexts, trials: Trials, body: ChatRequest) -> RequestPlan:
    """Tokens, sampling and drafting of every reply. Raises `PacelineError` and `ApiError`."""
    options.check_model(settings, body.model)
    family = tools.family(llm.tokenizer.chat_template)
    calling = Calling.of(body)
    opener = _opener(llm, family) if calling.tools else None
    grammar = options.grammar(trials, body, calling.grammar(family, opener[0] if opener else None, body))
    text = _prompt(llm, body, calling)
    options.check_fits(llm, settings, text, "messages")
    tokens = chat_ids(llm, text)
    options.check_length(llm, settings, tokens, "messages")
    length = options.length(llm, body)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = options.sampling(llm, body, length, logprobs, grammar)
    former = bool(body.functions)
    single = former or body.parallel_tool_calls is False

    def reader() -> CallReader | ForcedReader | None:
        if calling.forced:
            return ForcedReader(family, calling.names)
        return CallReader(family, calling.names, single) if calling.tools else None

    def choice(index: int) -> ChatChoice:
        return ChatChoice(index, words, bool(body.logprobs), bool(body.trace), reader(), opener, former)

    return RequestPlan(options.jobs(llm, settings, body, [tokens], sampling), choice)


def _opener(llm: LLM, family: CallFormat) -> tuple[int, str] | None:
    token = llm.tokenizer.token_id(family.opens)
    return (token, family.opens) if token is not None and token in llm.tokenizer.special_ids else None


def _prompt(llm: LLM, body: ChatRequest, calling: Calling) -> str:
    thinking = {"enable_thinking": False} if body.reasoning_effort == "none" else {}
    return chat_text(
        llm,
        body.messages,
        calling.told,
        {**thinking, **(body.chat_template_kwargs or {})},
        generation=body.add_generation_prompt is not False,
        continued=bool(body.continue_final_message),
    )


def chat_text(
    llm: LLM,
    messages: Sequence[Message],
    offered: Sequence[Tool] | None,
    values: dict[str, Any],
    *,
    generation: bool = True,
    continued: bool = False,
) -> str:
    """The chat's prompt. `values`: further names for the template. `continued`: it ends within the last message.

    Raises `ApiError` 400 naming the messages.
    """
    chat = [_plain(message) for message in messages]
    given = [tool.model_dump(exclude_none=True) for tool in offered or ()]
    clash = values.keys() & {"messages", "tools", "add_generation_prompt", "self"}
    if clash:
        raise bad_request(
            f"chat_template_kwargs holds {clash.pop()!r}, which has a place of its own", "chat_template_kwargs"
        )
    try:
        if given and not tools.knows_tools(llm.tokenizer.chat_template):
            chat, given = tools.with_tools(check_messages(chat), given), []
        return _rendered(llm, chat, {"tools": given or None, **values}, generation, continued)
    except TimedOut as error:
        raise Busy(error.cause, error.fix) from error
    except PacelineError as error:
        raise bad_request(str(error), "messages") from error


def chat_ids(llm: LLM, text: str) -> list[int]:
    """The tokens of a chat's prompt. Raises `ApiError` 400 naming the messages."""
    try:
        return llm.encode(llm.tokenizer.encode(text, special=False))
    except PacelineError as error:
        raise bad_request(str(error), "messages") from error


def _rendered(llm: LLM, chat: list[dict[str, Any]], values: dict[str, Any], generation: bool, continued: bool) -> str:
    if not continued:
        return llm.tokenizer.apply_chat_template(chat, generation, **values)
    # A mark at the message's end shows where the template goes on to close it.
    mark = f"[{uuid.uuid4().hex}]"
    content = check_messages(chat[-1:])[0]["content"]
    text = llm.tokenizer.apply_chat_template([*chat[:-1], {**chat[-1], "content": content + mark}], False, **values)
    before, found, _ = text.partition(mark)
    if not found:
        raise InvalidPrompt(
            "the chat template does not show the last message, which the reply is to continue",
            "Send it as the user's, or leave out continue_final_message",
        )
    return before


def _plain(message: Message) -> dict[str, Any]:
    """As chat templates know messages."""
    found = message.model_dump(include=_TOLD, exclude_none=True)
    if message.calls:
        found["tool_calls"] = [call.model_dump(exclude_none=True) for call in message.calls]
    found["content"] = message.refusal if message.content is None else found["content"]
    return {**found, "role": _ROLES.get(message.role, message.role)}


_TOLD = {"role", "content", "name", "tool_call_id", "reasoning_content"}
_ROLES = {"developer": "system", "function": "tool"}
