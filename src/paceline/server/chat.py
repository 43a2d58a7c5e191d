"""/v1/chat/completions: from messages to a prompt, and from a reply to a message, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import PacelineError, TimedOut
from paceline.llm import LLM
from paceline.server import options, tools
from paceline.server.errors import bad_request
from paceline.server.limits import Settings
from paceline.server.running import Plan, Round
from paceline.server.schema import ChatRequest, Message, NamedTool, Tool
from paceline.server.trials import Trials
from paceline.server.words import Words

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}


@dataclass(slots=True)
class Choice:
    """One reply of a chat, as it grows."""

    index: int
    words: Words
    logprobs: bool
    trace: bool
    reader: tools.Reader | None
    opener: tuple[int, str] | None
    """The token that begins a call without being shown, and what it stands for."""
    text: str = ""
    calls: list[tools.Call] = field(default_factory=list)
    said: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None

    def opening(self) -> dict[str, Any]:
        """The first event of a stream."""
        return self._event({"role": "assistant", "content": ""})

    def take(self, round_: Round) -> dict[str, Any] | None:
        """Takes a round in. Returns its event, None where there is nothing to show."""
        ended = round_.chunks[-1].finish_reason
        text, calls = self._read(round_)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": len(self.calls) + at, **call.as_dict()} for at, call in enumerate(calls)]
        self.text += text
        self.calls += calls
        event = self._event(delta)
        if ended:
            self.finish = "tool_calls" if self.calls and ended != "length" else FINISH.get(ended, ended)
            event["finish_reason"] = self.finish
        if self.logprobs:
            said = [self.words.chat_logprobs(chunk) for chunk in round_.chunks]
            self.said += said
            event["logprobs"] = {"content": said, "refusal": None}
        if self.trace:
            self.rounds.append(self.words.trace(round_))
            event |= self.rounds[-1]
        return event if delta or ended or self.logprobs or self.trace else None

    def _read(self, round_: Round) -> tuple[str, list[tools.Call]]:
        if self.reader is None:
            return "".join(chunk.text for chunk in round_.chunks), []
        opener, sign = self.opener or (None, "")
        text = "".join(chunk.text + (sign if chunk.token_id == opener else "") for chunk in round_.chunks)
        shown, calls = self.reader.push(text)
        if round_.chunks[-1].finish_reason:
            rest, last = self.reader.flush()
            shown, calls = shown + rest, calls + last
        return shown, calls

    def _event(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def whole(self) -> dict[str, Any]:
        """The reply as a choice of a `chat.completion`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text, "refusal": None}
        if self.calls:
            message["content"] = self.text or None
            message["tool_calls"] = [call.as_dict() for call in self.calls]
        choice = {
            "index": self.index,
            "message": message,
            "logprobs": {"content": self.said, "refusal": None} if self.logprobs else None,
            "finish_reason": self.finish,
        }
        if self.trace:
            choice["trace"] = [token for made in self.rounds for token in made["trace"]]
        return choice


def plan(llm: LLM, settings: Settings, words: Words, trials: Trials, body: ChatRequest) -> Plan:
    """Tokens, sampling and drafting of every reply. Raises `PacelineError` and `ApiError`."""
    options.check_model(settings, body.model)
    family = tools.family(llm.tokenizer.chat_template)
    offered = [] if body.tool_choice == "none" else list(body.tools or ())
    forced = _forced(body, offered)
    opener = _opener(llm, family) if offered else None
    lark = family.grammar(forced, opener[0] if opener else None) if forced else None
    if offered and not forced and options.wants_grammar(body):
        raise bad_request(
            "tools and structured output exclude each other. Send tool_choice none, or one of them", "tools"
        )
    grammar = options.grammar(trials, body, lark)
    text = chat_text(llm, body.messages, body.tools if offered else None, body.chat_template_kwargs or {})
    options.check_fits(llm, settings, text, "messages")
    tokens = chat_ids(llm, text)
    options.check_length(llm, settings, tokens, "messages")
    asked = body.max_completion_tokens or body.max_tokens or llm.model.target.context_length - len(tokens)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = options.sampling(llm, body, asked, logprobs, grammar)
    names = [tool.function.name for tool in offered]

    def choice(index: int) -> Choice:
        reader = tools.Reader(family, names, single=body.parallel_tool_calls is False) if names else None
        return Choice(index, words, bool(body.logprobs), bool(body.trace), reader, opener)

    return Plan(options.jobs(llm, settings, body, [tokens], sampling), choice)


def _forced(body: ChatRequest, offered: Sequence[Tool]) -> list[tuple[str, dict[str, Any] | None]]:
    """The functions of which one must be called."""
    wanted = body.tool_choice
    if isinstance(wanted, NamedTool):
        offered = [tool for tool in offered if tool.function.name == wanted.function.name]
    elif wanted != "required":
        return []
    return [(tool.function.name, tool.function.parameters) for tool in offered]


def _opener(llm: LLM, family: tools.Family) -> tuple[int, str] | None:
    token = llm.tokenizer.token_id(family.opens)
    return (token, family.opens) if token is not None and token in llm.tokenizer.special_ids else None


def chat_text(
    llm: LLM,
    messages: Sequence[Message],
    offered: Sequence[Tool] | None,
    values: dict[str, Any],
    *,
    generation: bool = True,
) -> str:
    """The chat's prompt. `values`: further names for the template. Raises `ApiError` 400 naming the messages."""
    chat = [_plain(message) for message in messages]
    given = [tool.model_dump(exclude_none=True) for tool in offered or ()]
    clash = values.keys() & {"messages", "tools", "add_generation_prompt", "self"}
    if clash:
        raise bad_request(
            f"chat_template_kwargs holds {clash.pop()!r}, which has a place of its own", "chat_template_kwargs"
        )
    try:
        if given and not tools.knows_tools(llm.tokenizer.chat_template):
            from paceline.chat_template import check_messages

            chat, given = tools.with_tools(check_messages(chat), given), []
        return llm.tokenizer.apply_chat_template(chat, generation, tools=given or None, **values)
    except TimedOut:
        raise
    except PacelineError as error:
        raise bad_request(str(error), "messages") from error


def chat_ids(llm: LLM, text: str) -> list[int]:
    """The tokens of a chat's prompt. Raises `ApiError` 400 naming the messages."""
    try:
        return llm.encode(llm.tokenizer.encode(text, special=False))
    except PacelineError as error:
        raise bad_request(str(error), "messages") from error


def _plain(message: Message) -> dict[str, Any]:
    """As chat templates know messages."""
    found = message.model_dump(include=_TOLD, exclude_none=True)
    if message.content is None:
        found["content"] = None
    return {**found, "role": "system" if message.role == "developer" else message.role}


_TOLD = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
