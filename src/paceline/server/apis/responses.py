"""/v1/responses and /v1/responses/compact: chats in the shape of OpenAI's Responses API, and their summaries.

Codex sends a conversation to /v1/responses/compact, and continues with the summary item that replaces it.
"""

from __future__ import annotations

import time
import uuid
from copy import deepcopy
from typing import Any, TypeVar

from pydantic import TypeAdapter

from paceline.server.api import Api, Encoder, Event, dumps
from paceline.server.apis.openai_chat import CustomTool, text_of
from paceline.server.apis.responses_request import (
    FunctionTool,
    Item,
    MessageItem,
    ResponsesRequest,
    SchemaText,
    chat_messages_of,
    listed_item,
    pack_summary,
)
from paceline.server.apis.stored import ResponseStore, StoredResponse, estimated_bytes
from paceline.server.errors import LOG, REQUEST_ID, ApiError, ContextExceeded, bad_request
from paceline.server.prepare import PreparedRequest
from paceline.server.preprocessing import MAX_SHORT_BODY, PoolName
from paceline.server.replies import BlockBegun, BlockEnded, BlockEvent, ChatReply, ReplyBlock, Usage
from paceline.server.request import ChatPrompt, GenerateRequest, reasoning_values, refuse_media
from paceline.server.schema import JsonSchema, schema_constraint, without_none
from paceline.server.worker import ReplyRound

_CONVERSATION = 4
"""Maximum bytes in memory of a stored conversation, per byte of the maximum size of a body."""
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])
_ASK = """Another assistant will continue this conversation and sees nothing of it but your summary. Write that summary:
what the user asked for, in the user's words; what has been done; what was found, with the names of files, commands and
values; what was decided; what is left to do. Write nothing else."""
_SUMMARY_DIVISOR = 4
"""A summary may take 1 / `_SUMMARY_DIVISOR` of the context."""

Asked = TypeVar("Asked", bound=ResponsesRequest)


class _Continuing(Api[Asked]):
    """An API whose requests may continue stored responses."""

    def __init__(self, store: ResponseStore, max_body: int) -> None:
        """Make the API.

        Args:
            store: The responses that requests may continue.
            max_body: Maximum bytes of a body.
        """
        self._store, self._limit = store, _CONVERSATION * max_body

    def pool(self, body: Asked, by_size: PoolName) -> PoolName:
        """Return the pool, which also depends on the stored conversation that the request continues."""
        if self._store.has_images(body.previous_response_id):
            return "images"
        is_long = self._store.length(body.previous_response_id) > MAX_SHORT_BODY
        return super().pool(body, "long" if is_long else by_size)

    def conversation(self, body: Asked) -> list[Item]:
        """Return the stored items that a request continues, and its own items. Raises `ApiError` 400, also for a new
        part that is not text."""
        last = body.input[-1] if body.input else None
        if isinstance(last, MessageItem) and not isinstance(last.content, str):
            kinds = ["" if part.textual else part.type for part in last.content]
            refuse_media(
                f"input.{len(body.input) - 1}.content", kinds, ("", "input_image"), "a new part must be 'input_text'"
            )
        items: list[Item] = []
        for before in self._store.conversation(body.previous_response_id, self._limit):
            items += [*before.input, *_ITEMS.validate_python(before.document["output"])]
        return [*items, *body.items]


class Responses(_Continuing[ResponsesRequest]):
    """OpenAI's responses."""

    path = "/v1/responses"
    body = ResponsesRequest
    id_prefix = "resp_"
    about = "Generate the next items of a conversation."

    def decode(self, body: ResponsesRequest) -> GenerateRequest:
        items = self.conversation(body)
        prompt = ChatPrompt(
            messages=chat_messages_of(items, body.instructions, earlier=len(items) - len(body.items)),
            tools=body.tool_offer,
            values={
                **reasoning_values(body.reasoning.effort if body.reasoning else None),
                **(body.chat_template_kwargs or {}),
            },
            may_truncate=body.truncation == "auto",
        )
        form = body.format
        asked = form if isinstance(form, SchemaText) else JsonSchema()
        return GenerateRequest(
            prompt=prompt,
            sampling=body.sampling,
            constraints={} if form.type == "text" else {"text.format": schema_constraint(asked)},
            max_tokens=-1 if body.max_output_tokens is None else body.max_output_tokens,
            logprobs=(body.top_logprobs or 0) if body.with_logprobs else None,
            thinking_budget=body.budget(reasoning=body.reasoning.max_tokens if body.reasoning else None),
            speculation=body.speculation,
        )

    def encoder(self, body: ResponsesRequest, prepared: PreparedRequest) -> ResponsesEncoder:
        return ResponsesEncoder(body, prepared, None if body.store is False else self._store)

    def overflown(self, body: ResponsesRequest, prepared: PreparedRequest, error: ContextExceeded) -> Encoder:
        """Return a stream with a failed response, as OpenAI's API does. Codex looks for the error there."""
        if not body.stream:
            raise error
        LOG.info("%s refused: %s", REQUEST_ID.get(), error.message)
        return FailingEncoder(body, prepared, error)


def _document(body: ResponsesRequest, prepared: PreparedRequest) -> dict[str, Any]:
    """Return a response without output, with the parameters that it repeats from its request."""
    dumped = body.model_dump(include={"text", "tool_choice"}, exclude_none=True, by_alias=True)
    sampling = prepared.sampling
    return {
        "id": prepared.id,
        "created_at": int(time.time()),
        "model": prepared.model.name,
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


class ResponsesEncoder(Encoder):
    """A response: items of reasoning, text and calls, each with the events of its beginning, growth and end."""

    def __init__(self, body: ResponsesRequest, prepared: PreparedRequest, store: ResponseStore | None) -> None:
        """Make an encoder. `store`: keeps the response. None if it is not kept."""
        [self._reply] = prepared.replies
        self._document = _document(body, prepared)
        self._origins, self._custom = body.origins, body.custom
        self._token_texts = prepared.model.token_texts if body.with_logprobs else None
        self._store, self._stored = store, None
        if store is not None:
            size = estimated_bytes(body.model_dump_json()) + estimated_bytes(dumps(self._document).decode())
            length = len(_ITEMS.dump_json(body.items))
            self._stored = StoredResponse(self._document, body.items, body.previous_response_id, size, length)
        self._sequence = -1
        self._output: list[dict[str, Any]] = []

    def begin(self, usage: Usage) -> list[Event]:
        """Return the events of a response without output."""
        return [self._event(f"response.{step}", response=self._document) for step in ("created", "in_progress")]

    def add(self, round_: ReplyRound) -> list[Event]:
        return [event for block_event in self._reply.add(round_) for event in self._events(block_event, round_)]

    def heartbeat(self) -> Event:
        """Return an empty delta of the last item. Before the first item, return `response.in_progress` again, without
        its long fields. Every client knows this event, but some clients take it for the whole output so far."""
        if not self._reply.open:
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
        if self._store and self._stored:
            self._stored.size += estimated_bytes(dumps(ended).decode())
            self._store.put(self._stored)
        return [self._event("response.incomplete" if cut else "response.completed", response=self._document)]

    def document(self, usage: Usage) -> dict[str, Any]:
        return self._document

    def failed(self, error: ApiError) -> Event:
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

    def _events(self, event: BlockEvent, round_: ReplyRound) -> list[Event]:
        """Return the events of a block's beginning, growth or end. Each block is an item."""
        if isinstance(event, BlockEnded):
            return self._ended(event.block)
        begun = self._begun(event.block) if isinstance(event, BlockBegun) else []
        self._count(event.text)
        if event.block.kind == "call":
            return [*begun, *self._called(event.block, event.text)]
        content = self._output[-1]["content"][0]
        content["text"] = event.block.text
        if event.block.kind == "reasoning":
            return [*begun, self._of_item("response.reasoning_text.delta", content_index=0, delta=event.text)]
        logprobs = [self._token_texts.chat_logprobs(chunk) for chunk in round_.chunks] if self._token_texts else []
        if logprobs:
            content["logprobs"] += logprobs
            self._count(logprobs)
        more: dict[str, Any] = {"content_index": 0, "delta": event.text, "logprobs": logprobs}
        return [*begun, self._of_item("response.output_text.delta", **more)]

    def _called(self, block: ReplyBlock, text: str) -> list[Event]:
        """Return the event for more arguments of a call. For a custom tool, there is none, because the text of its call
        is known only once the JSON is complete."""
        item = self._output[-1]
        if item["type"] == "custom_tool_call":
            return []
        item["arguments"] = block.text
        return [self._of_item("response.function_call_arguments.delta", delta=text)] if text else []

    def _count(self, more: Any) -> None:
        """Count more of the output, so that it need not be measured as a whole at the end."""
        if self._stored:
            self._stored.count(dumps(more).decode())

    def _begun(self, block: ReplyBlock) -> list[Event]:
        """Add the item of a block."""
        item = _item(block, block.name in self._custom) | self._origins.get(block.name, {})
        self._output.append(item)
        self._count(item)
        first = {**item, "content": []} if "content" in item else dict(item)
        added = [self._event("response.output_item.added", output_index=block.index, item=first)]
        if "content" in item:
            part = deepcopy(item["content"][0])
            added.append(self._of_item("response.content_part.added", content_index=0, part=part))
        return added

    def _ended(self, block: ReplyBlock) -> list[Event]:
        """Complete the item of a block."""
        item = self._output[-1]
        item["status"] = "incomplete" if self._reply.finish_reason == "length" else "completed"
        if item["type"] == "function_call":
            arguments = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._of_item("response.function_call_arguments.done", **arguments)]
        elif item["type"] == "custom_tool_call":
            item["input"] = text_of(block.text)
            events = [
                self._of_item("response.custom_tool_call_input.delta", delta=item["input"]),
                self._of_item("response.custom_tool_call_input.done", input=item["input"]),
            ]
        else:
            part = item["content"][0]
            kind = "reasoning_text" if block.kind == "reasoning" else "output_text"
            whole = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = [
                self._of_item(f"response.{kind}.done", content_index=0, **whole),
                self._of_item("response.content_part.done", content_index=0, part=part),
            ]
        return [*events, self._event("response.output_item.done", output_index=block.index, item=item)]


class FailingEncoder(ResponsesEncoder):
    """A response that fails before it has any output."""

    def __init__(self, body: ResponsesRequest, prepared: PreparedRequest, error: ApiError) -> None:
        super().__init__(body, prepared, None)
        self._error = error

    def end(self, usage: Usage) -> list[Event]:
        """Raise the error, which ends the stream."""
        raise self._error


def _item(block: ReplyBlock, custom: bool) -> dict[str, Any]:
    """Return the item of a block without its text. `custom`: it calls a custom tool."""
    if block.kind == "reasoning":
        content: list[Any] = [{"type": "reasoning_text", "text": ""}]
        return {"id": _id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": content}
    if block.kind == "text":
        content = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
        about: dict[str, Any] = {"role": "assistant", "content": content}
        return {"id": _id("msg"), "type": "message", "status": "in_progress", **about}
    kind, prefix, text = ("custom_tool_call", "ctc", "input") if custom else ("function_call", "fc", "arguments")
    about = {"call_id": block.id, "name": block.name, text: ""}
    return {"id": _id(prefix), "type": kind, "status": "in_progress", **about}


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


class CompactRequest(ResponsesRequest):
    """Body of /v1/responses/compact: the conversation that is to be summarised."""


class Compaction(_Continuing[CompactRequest]):
    """Summaries of conversations."""

    path = "/v1/responses/compact"
    body = CompactRequest
    id_prefix = "resp_"
    about = "Summarise a conversation in an item that replaces it."
    media_type = ""

    def decode(self, body: CompactRequest) -> GenerateRequest:
        """Return the request of a summary. The oldest messages are left out if the conversation does not fit."""
        items = [*self.conversation(body), MessageItem(role="user", content=_ASK)]
        messages = chat_messages_of(items, body.instructions)
        return GenerateRequest(
            prompt=ChatPrompt(messages=messages, values=reasoning_values("none"), may_truncate=True),
            sampling=without_none(seed=body.seed),
            share=_SUMMARY_DIVISOR,
            speculation=body.speculation,
        )

    def encoder(self, body: CompactRequest, prepared: PreparedRequest) -> Encoder:
        items = reversed(self.conversation(body))
        last = next((item for item in items if isinstance(item, MessageItem) and item.role == "user"), None)
        [reply] = prepared.replies
        return CompactionEncoder(prepared.id, reply, last)


class CompactionEncoder(Encoder):
    """The user's last message, and the summary as an item that only this server reads."""

    def __init__(self, answer_id: str, reply: ChatReply, last: Item | None) -> None:
        self._id, self._reply, self._last = answer_id, reply, last

    def add(self, round_: ReplyRound) -> list[Event]:
        self._reply.add(round_)
        return []

    def heartbeat(self) -> Event:
        return {"type": "response.in_progress"}

    def end(self, usage: Usage) -> list[Event]:
        """Return the whole answer, for clients that ask for a stream."""
        return [{"type": "response.compaction", **self.document(usage)}]

    def document(self, usage: Usage) -> dict[str, Any]:
        """Return the whole answer. Raises `ApiError` without a summary, because the conversation would be lost."""
        if not self._reply.text.strip():
            raise bad_request("the model wrote no summary. Start a new conversation, or send a shorter one", "input")
        summary = {
            "type": "compaction",
            "id": f"cmp_{uuid.uuid4().hex}",
            "encrypted_content": pack_summary(self._reply.text),
        }
        return {
            "id": self._id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*([listed_item(self._last)] if self._last else []), summary],
            "usage": usage_of(usage, self._reply.reasoning_tokens),
        }

    def failed(self, error: ApiError) -> Event:
        return {"type": "error", "code": error.code, "message": error.message}
