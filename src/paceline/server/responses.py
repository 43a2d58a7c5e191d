"""/v1/responses: chats in the shape of OpenAI's Responses API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from pydantic import TypeAdapter

from paceline.server import chat
from paceline.server.bodies import validated
from paceline.server.calls import Call
from paceline.server.choices import TokenTexts
from paceline.server.custom_tools import CustomTool, text_of
from paceline.server.errors import LOG, REQUEST_ID, ApiError, ContextExceeded
from paceline.server.items import chat_body
from paceline.server.limits import Settings
from paceline.server.models import LoadedModel
from paceline.server.replies import Arguments, ChatReply, Part, Reasoning, ReplyText
from paceline.server.schema import ChatRequest
from paceline.server.schema_responses import FunctionTool, Item, MessageItem, ResponsesRequest
from paceline.server.stored import ResponseStore, StoredResponse, memory
from paceline.server.usage import Usage
from paceline.server.worker import ReplyRound
from paceline.server.writers import Event, PreparedRequest, Writer, dumps

_CONVERSATION = 4
"""Size of a stored conversation in memory, for each byte that a body may have."""
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def prepare(store: ResponseStore, model: LoadedModel, settings: Settings, body: ResponsesRequest) -> PreparedRequest:
    """Prepare the reply's tokens, sampling and speculation. Raises `PacelineError` and `ApiError`."""
    items, new = conversation(store, settings, body)
    request = validated(chat_body(body, [*items, *new]), ChatRequest)
    try:
        prepared = chat.prepare(model, settings, request, truncate=body.truncation == "auto")
    except ContextExceeded as error:
        if not body.stream:
            raise
        return _overflown(model, body, error)
    head, origins, custom = _head(body, prepared.sampling), body.origins, body.custom
    logprobs = model.token_texts if request.logprobs else None
    kept = store if body.store is not False else None
    size = memory(body.model_dump_json()) + memory(dumps(head).decode()) if kept else 0
    length = len(_ITEMS.dump_json(list(new))) if kept else 0

    def writer(answer_id: str) -> ResponsesWriter:
        document = {"id": answer_id, "created_at": int(time.time()), "model": model.name, **head}
        return ResponsesWriter(document, prepared.reply(), origins, custom, logprobs, kept, new, size, length)

    return PreparedRequest(prepared.jobs, writer)


def conversation(
    store: ResponseStore, settings: Settings, body: ResponsesRequest
) -> tuple[Sequence[Item], Sequence[Item]]:
    """Return the stored items that a request continues, and its own. Raises `ApiError`."""
    new: Sequence[Item] = body.input if isinstance(body.input, list) else [MessageItem(role="user", content=body.input)]
    items: list[Item] = []
    for before in store.conversation(body.previous_response_id, _CONVERSATION * settings.max_body):
        items += [*before.input, *_ITEMS.validate_python(before.document["output"])]
    return items, new


def _overflown(model: LoadedModel, body: ResponsesRequest, error: ContextExceeded) -> PreparedRequest:
    """Return a stream whose response fails: as in OpenAI's API, and where Codex looks for this error."""
    LOG.info("%s refused: %s", REQUEST_ID.get(), error.message)
    head = _head(body, model.llm.sampling())

    def writer(answer_id: str) -> FailingWriter:
        return FailingWriter({"id": answer_id, "created_at": int(time.time()), "model": model.name, **head}, error)

    return PreparedRequest([], writer)


def _head(body: ResponsesRequest, sampling: Any) -> dict[str, Any]:
    """Return what a response repeats of its request."""
    dumped = body.model_dump(include={"tools", "text", "tool_choice"}, exclude_none=True, by_alias=True)
    return {
        "object": "response",
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}} | dumped.get("text", {}),
        "tool_choice": dumped.get("tool_choice", "auto"),
        "tools": [_shown(tool) for tool in body.callable_tools],
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }


def _shown(tool: FunctionTool | CustomTool) -> dict[str, Any]:
    if isinstance(tool, CustomTool):
        return tool.model_dump(exclude_none=True)
    return {"parameters": None, "strict": None, **tool.model_dump()}


class ResponsesWriter(Writer):
    """A response: items of reasoning, text and calls, each with the events of its beginning, growth and end."""

    def __init__(
        self,
        document: dict[str, Any],
        reply: ChatReply,
        origins: Mapping[str, dict[str, str]],
        custom: frozenset[str],
        token_texts: TokenTexts | None,
        store: ResponseStore | None,
        new: Sequence[Item],
        size: int,
        length: int,
    ) -> None:
        """`origins`: names and namespaces of functions in namespaces. `custom`: names of custom tools, whose calls are
        text. `token_texts`: None without log-probabilities.
        `store`: where the response is kept with its `new` items; None if it is not kept. `size`: bytes of memory of the
        items and the document; `length`: characters of the items."""
        self._document, self._reply, self._origins, self._token_texts = document, reply, origins, token_texts
        self._custom, self._arguments = custom, ""
        self._store, self._new, self._size, self._length = store, new, size, length
        self._sequence = -1
        self._output: list[dict[str, Any]] = []
        self._open = False
        """Whether the last item may grow."""

    def begin(self, usage: Usage) -> list[Event]:
        """Return the events of a response without output."""
        return [self._event(f"response.{step}", response=self._document) for step in ("created", "in_progress")]

    def add(self, round_: ReplyRound) -> list[Event]:
        """Add a round."""
        events: list[Event] = []
        for part in self._reply.add(round_):
            events += self._grow(part, round_)
        return [*events, *(self._close() if self._reply.finish_reason else [])]

    def heartbeat(self) -> Event:
        """Return an empty delta of the last item. Before there is one, the response is in progress once more: an event
        that every client knows, but which some take for the whole output so far. What may be long is left out."""
        if not self._open:
            short = {**self._document, "instructions": None, "tools": []}
            return self._event("response.in_progress", response={**short, "output": self._output})
        kind = self._output[-1]["type"]
        if kind == "function_call":
            return self._of_item("response.function_call_arguments.delta", delta="")
        if kind == "custom_tool_call":
            return self._of_item("response.custom_tool_call_input.delta", delta="")
        if kind == "reasoning":
            return self._of_item("response.reasoning_text.delta", content_index=0, delta="")
        return self._of_item("response.output_text.delta", content_index=0, delta="", logprobs=[])

    def end(self, usage: Usage) -> list[Event]:
        """Return the event with the whole response, which is stored."""
        cut = self._reply.finish_reason == "length"
        ended = {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": usage_of(usage, self._reply.reasoning_tokens),
            "metrics": usage.vllm(),
        }
        self._document |= {**ended, "output": self._output}
        if self._store is not None:
            size, previous = self._size + memory(dumps(ended).decode()), self._document["previous_response_id"]
            self._store.put(StoredResponse(self._document, self._new, previous, size, self._length))
        return [self._event("response.incomplete" if cut else "response.completed", response=self._document)]

    def document(self, usage: Usage) -> dict[str, Any]:
        """Return the whole response."""
        return self._document

    def failed(self, error: ApiError) -> Event:
        """Return the event of a response that failed."""
        details = {"code": error.code or "server_error", "message": error.message}
        self._document |= {"status": "failed", "error": details, "output": self._output}
        return self._event("response.failed", response=self._document)

    def _event(self, kind: str, **more: Any) -> Event:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence, **more}

    def _of_item(self, kind: str, **more: Any) -> Event:
        """Return an event about the last item."""
        item_id, index = self._output[-1]["id"], len(self._output) - 1
        return self._event(kind, item_id=item_id, output_index=index, **more)

    def _grow(self, part: Part, round_: ReplyRound) -> list[Event]:
        match part:
            case Reasoning():
                events = [] if self._in("reasoning") else self._begin(_reasoning())
                self._content["text"] += part.text
                self._count(part.text)
                return [*events, self._of_item("response.reasoning_text.delta", content_index=0, delta=part.text)]
            case ReplyText():
                events = [] if self._in("message") else self._begin(_message())
                return [*events, self._text(part, round_)]
            case Call():
                made = _custom_call(part) if part.name in self._custom else _call(part)
                events = self._begin(made | self._origins.get(part.name, {}))
                text, self._arguments = part.arguments, ""
            case Arguments():
                events, text = [], part.text
        self._arguments += text
        self._count(text)
        if self._output[-1]["type"] == "custom_tool_call":
            return events  # its text is known once its JSON is complete
        self._output[-1]["arguments"] = self._arguments
        delta = [self._of_item("response.function_call_arguments.delta", delta=text)] if text else []
        return [*events, *delta]

    def _text(self, part: ReplyText, round_: ReplyRound) -> Event:
        logprobs = [self._token_texts.chat_logprobs(chunk) for chunk in round_.chunks] if self._token_texts else []
        self._content["text"] += part.text
        self._content["logprobs"] += logprobs
        self._count(part.text)
        if logprobs:
            self._count(logprobs)
        return self._of_item("response.output_text.delta", content_index=0, delta=part.text, logprobs=logprobs)

    def _count(self, more: Any) -> None:
        """Count more of the output, so that the whole need not be measured at the end."""
        if self._store is not None:
            text = dumps(more).decode()
            self._size += memory(text)
            self._length += len(text)

    def _in(self, kind: str) -> bool:
        return self._open and self._output[-1]["type"] == kind

    @property
    def _content(self) -> dict[str, Any]:
        """The content of the last item, which has one part."""
        content: dict[str, Any] = self._output[-1]["content"][0]
        return content

    def _begin(self, item: dict[str, Any]) -> list[Event]:
        """End the last item, and add one."""
        events = self._close()
        self._output.append(item)
        self._count(item)
        self._open = True
        first = {**item, "content": []} if "content" in item else dict(item)
        added = [self._event("response.output_item.added", output_index=len(self._output) - 1, item=first)]
        if "content" in item:
            added.append(self._of_item("response.content_part.added", content_index=0, part=deepcopy(self._content)))
        return [*events, *added]

    def _close(self) -> list[Event]:
        """End the last item."""
        if not self._open:
            return []
        self._open, item = False, self._output[-1]
        item["status"] = "incomplete" if self._reply.finish_reason == "length" else "completed"
        if item["type"] == "function_call":
            arguments = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._of_item("response.function_call_arguments.done", **arguments)]
        elif item["type"] == "custom_tool_call":
            item["input"] = text_of(self._arguments)
            events = [
                self._of_item("response.custom_tool_call_input.delta", delta=item["input"]),
                self._of_item("response.custom_tool_call_input.done", input=item["input"]),
            ]
        else:
            part = self._content
            kind = "reasoning_text" if item["type"] == "reasoning" else "output_text"
            whole = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = [
                self._of_item(f"response.{kind}.done", content_index=0, **whole),
                self._of_item("response.content_part.done", content_index=0, part=part),
            ]
        return [*events, self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)]


class FailingWriter(ResponsesWriter):
    """A response that fails before it has any output."""

    def __init__(self, document: dict[str, Any], error: ApiError) -> None:
        super().__init__(document, ChatReply(), {}, frozenset(), None, None, (), 0, 0)
        self._error = error

    def end(self, usage: Usage) -> list[Event]:
        """Raise the error, which ends the stream."""
        raise self._error


def _reasoning() -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": ""}]
    return {"id": _id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": content}


def _message() -> dict[str, Any]:
    content = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
    return {"id": _id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": content}


def _call(call: Call) -> dict[str, Any]:
    about = {"call_id": call.id, "name": call.name, "arguments": ""}
    return {"id": _id("fc"), "type": "function_call", "status": "in_progress", **about}


def _custom_call(call: Call) -> dict[str, Any]:
    about = {"call_id": call.id, "name": call.name, "input": ""}
    return {"id": _id("ctc"), "type": "custom_tool_call", "status": "in_progress", **about}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def usage_of(usage: Usage, reasoning: int) -> dict[str, Any]:
    """Return the token counts of a response."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.written,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage.prompt + usage.written,
        "speculation": usage.speculation(),
    }
