"""/v1/chat/completions: chats in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.server import chat
from paceline.server.calls import Call
from paceline.server.choices import Choice, ChoicesWriter
from paceline.server.custom_tools import text_of
from paceline.server.limits import Settings
from paceline.server.models import LoadedModel
from paceline.server.replies import Arguments, ChatReply, Part, Reasoning, ReplyText
from paceline.server.schema import ChatRequest
from paceline.server.worker import ReplyRound
from paceline.server.writers import PreparedRequest


@dataclass(slots=True, kw_only=True)
class ChatChoice(Choice):
    """A choice of a chat completion. `legacy`: calls are sent as `function_call`. `custom`: names of custom tools."""

    reply: ChatReply
    legacy: bool = False
    custom: frozenset[str] = frozenset()
    token_logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning."""
        return self.reply.reasoning_tokens

    def first_event(self) -> dict[str, Any]:
        """Return the event with the assistant's role."""
        return self._event({"role": "assistant", "content": None if self.reply.forced else ""})

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

    def _event(self, delta: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return {"index": self.index, "delta": delta or {}, "logprobs": None, "finish_reason": None}

    def _events(self, round_: ReplyRound) -> list[dict[str, Any]]:
        count = len(self.reply.calls)
        events = []
        for part in self.reply.add(round_):
            count += isinstance(part, Call)
            if not isinstance(part, Call | Arguments) or self.reply.calls[count - 1].name not in self.custom:
                events.append(self._event(self._delta(part, count - 1)))
        if self.reply.finish_reason:
            # The text of a call is known once its JSON is complete.
            whole = [(i, call) for i, call in enumerate(self.reply.calls) if call.name in self.custom]
            events += [self._event({"tool_calls": [{"index": i, **self._call(call)}]}) for i, call in whole]
        if self.logprobs or self.trace:
            events = events or [self._event()]
            events[0] |= self._trace(round_)
        if self.logprobs:
            new = [self.token_texts.chat_logprobs(chunk) for chunk in round_.chunks]
            self.token_logprobs += new
            events[0]["logprobs"] = {"content": new, "refusal": None}
        return events

    def _delta(self, part: Part, call: int) -> dict[str, Any]:
        """Return a part as a delta. `call`: index of the call that it belongs to."""
        match part:
            case Reasoning():
                return {"reasoning_content": part.text}
            case ReplyText():
                return {"content": part.text}
            case Arguments():
                new: dict[str, Any] = {"function": {"arguments": part.text}}
            case Call():
                new = part.as_dict()
        return {"function_call": new["function"]} if self.legacy else {"tool_calls": [{"index": call, **new}]}

    def _call(self, call: Call) -> dict[str, Any]:
        if call.name not in self.custom:
            return call.as_dict()
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text_of(call.arguments)}}

    def _finish(self, reason: str) -> str:
        finished = self.reply.finish_reason or Choice._finish(self, reason)
        return "function_call" if finished == "tool_calls" and self.legacy else finished


def prepare(model: LoadedModel, settings: Settings, body: ChatRequest) -> PreparedRequest:
    """Prepare every reply's tokens, sampling and speculation. Raises `PacelineError` and `ApiError`."""
    prepared = chat.prepare(model, settings, body)
    kinds = ("chat.completion", "chat.completion.chunk")
    usage = bool(body.stream_options and body.stream_options.include_usage)

    def choice(index: int) -> ChatChoice:
        return ChatChoice(
            index=index,
            token_texts=model.token_texts,
            logprobs=bool(body.logprobs),
            trace=bool(body.trace),
            reply=prepared.reply(),
            legacy=bool(body.functions),
            custom=body.custom,
        )

    def writer(answer_id: str) -> ChoicesWriter:
        head = {"id": answer_id, "model": model.name}
        return ChoicesWriter(head, kinds, [choice(i) for i in range(len(prepared.jobs))], usage)

    return PreparedRequest(prepared.jobs, writer)
