"""/v1/messages: chats in the shape of Anthropic's Messages API."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from paceline.server import chat, options
from paceline.server.blocks import chat_body
from paceline.server.bodies import validated
from paceline.server.calls import Call
from paceline.server.errors import ApiError
from paceline.server.limits import Settings
from paceline.server.models import LoadedModel
from paceline.server.replies import Arguments, ChatReply, Part, Reasoning, ReplyText
from paceline.server.schema import ChatRequest
from paceline.server.schema_messages import CountTokensRequest, MessagesRequest
from paceline.server.usage import Usage
from paceline.server.worker import ReplyRound
from paceline.server.writers import Event, PreparedRequest, Writer


def prepare(model: LoadedModel, settings: Settings, body: MessagesRequest) -> PreparedRequest:
    """Prepare the reply's tokens, sampling and speculation. Raises `PacelineError` and `ApiError`."""
    prepared = chat.prepare(model, settings, validated(chat_body(body), ChatRequest))
    full = body.max_tokens > model.llm.model.target.context_length - len(prepared.jobs[0].tokens)

    def writer(answer_id: str) -> MessagesWriter:
        return MessagesWriter({"id": answer_id, "model": model.name}, prepared.reply(), full)

    return PreparedRequest(prepared.jobs, writer)


def count_tokens(model: LoadedModel, settings: Settings, body: CountTokensRequest) -> dict[str, Any]:
    """Return the tokens of a prompt. Raises `ApiError`."""
    llm, request = model.llm, validated(chat_body(body), ChatRequest)
    text = chat.chat_text(llm, request, chat.CallOptions.of(request).shown)
    options.check_length(llm, settings, text, "messages")
    return {"input_tokens": len(options.token_ids(llm, text, "messages", chat=True))}


class MessagesWriter(Writer):
    """A message: blocks of thinking, text and tool use, one after the other. `full`: the reply may fill the context."""

    def __init__(self, head: dict[str, Any], reply: ChatReply, full: bool) -> None:
        self._head = {"type": "message", "role": "assistant", **head}
        self._reply, self._full = reply, full
        self._content: list[dict[str, Any]] = []
        self._arguments = ""
        self._open = False
        """Whether the last block may grow."""

    def begin(self, usage: Usage) -> list[Event]:
        """Return the event of a message without content."""
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(usage)}
        return [{"type": "message_start", "message": message}]

    def add(self, round_: ReplyRound) -> list[Event]:
        """Add a round."""
        events: list[Event] = []
        for part in self._reply.add(round_):
            events += self._grow(part)
        return [*events, *(self._close() if self._reply.finish_reason else [])]

    def heartbeat(self) -> Event:
        """Return Anthropic's own event for a silent stream."""
        return {"type": "ping"}

    def end(self, usage: Usage) -> list[Event]:
        """Return the events with the stop reason and the usage."""
        counts = {**_usage(usage), "speculation": usage.speculation()}
        return [{"type": "message_delta", "delta": self._stop(), "usage": counts}, {"type": "message_stop"}]

    def document(self, usage: Usage) -> dict[str, Any]:
        """Return the whole message."""
        counts = {**_usage(usage), "speculation": usage.speculation()}
        return {**self._head, "content": self._content, **self._stop(), "usage": counts, "metrics": usage.vllm()}

    def failed(self, error: ApiError) -> Event:
        """Return Anthropic's error."""
        return error.anthropic

    def _stop(self) -> dict[str, Any]:
        reply = self._reply
        reasons = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
        reason = "stop_sequence" if reply.stop is not None else reasons.get(str(reply.finish_reason), "end_turn")
        if reason == "max_tokens" and self._full:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": reply.stop}

    def _grow(self, part: Part) -> list[Event]:
        match part:
            case Reasoning():
                return self._more("thinking", "thinking_delta", part.text)
            case ReplyText():
                return self._more("text", "text_delta", part.text)
            case Call():
                events = self._begin({"type": "tool_use", "id": part.id, "name": part.name, "input": {}})
                text = part.arguments
            case Arguments():
                events, text = [], part.text
        self._arguments += text
        return [*events, *([self._delta("input_json_delta", partial_json=text)] if text else [])]

    def _more(self, kind: str, delta: str, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._open or self._content[-1]["type"] != kind:
            events = self._begin({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._content[-1][kind] += text
        return [*events, self._delta(delta, **{kind: text})]

    def _delta(self, kind: str, **more: str) -> Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": {"type": kind, **more}}

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        """End the last block, and add one."""
        events = self._close()
        self._content.append(block)
        self._open, self._arguments = True, ""
        return [*events, {"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(block)}]

    def _close(self) -> list[Event]:
        """End the last block."""
        if not self._open:
            return []
        self._open, block, events = False, self._content[-1], []
        if block["type"] == "thinking":
            # Clients drop thinking that is not signed. This server accepts it back without a signature as well.
            block["signature"] = hashlib.sha256(block["thinking"].encode()).hexdigest()
            events.append(self._delta("signature_delta", signature=block["signature"]))
        elif block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        return [*events, {"type": "content_block_stop", "index": len(self._content) - 1}]


def _object(arguments: str) -> Any:
    """Return the arguments of a call; none if they were cut short."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's token counts, whose `input_tokens` leave out those from the cache."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.written,
    }
