"""Input and output items of /v1/responses as messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.server.compat import left_out
from paceline.server.errors import bad_request
from paceline.server.schema import Samplers, ThinkingBudgets
from paceline.server.schema_responses import (
    AllowedFunctions,
    CallItem,
    CallOutputItem,
    Item,
    MessageItem,
    NamedFunction,
    OtherItem,
    ReasoningItem,
    ResponsesRequest,
    SchemaText,
    in_namespace,
    joined,
)

Messages = list[dict[str, Any]]


def chat_body(body: ResponsesRequest, items: Iterable[Item]) -> dict[str, Any]:
    """Return the request as the body of a chat completion. `items`: the whole conversation. Raises `ApiError` 400 as
    `_check_new` does."""
    _check_new(body)
    found: dict[str, Any] = {
        "messages": to_messages(items, body.instructions),
        "max_tokens": body.max_output_tokens,
        "response_format": _format(body),
        "tools": [{"type": "function", "function": function} for function in body.functions] or None,
        "tool_choice": _choice(body.tool_choice) if body.functions or body.tool_choice != "auto" else None,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "reasoning": {"max_tokens": limit} if body.reasoning and (limit := body.reasoning.max_tokens) else None,
        "logprobs": body.top_logprobs is not None or "message.output_text.logprobs" in (body.include or ()),
        "top_logprobs": body.top_logprobs,
    }
    same = (
        *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "parallel_tool_calls", "timeout"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "chat_template_kwargs"),
        *(*Samplers.model_fields, *ThinkingBudgets.model_fields),
    )
    found |= {name: getattr(body, name) for name in same}
    if body.speculation is not None:
        named = body.speculation if isinstance(body.speculation, str) else body.speculation.model_dump()
        found["speculation"] = named
    return {name: value for name, value in found.items() if value is not None}


def _check_new(body: ResponsesRequest) -> None:
    """Raise `ApiError` 400 if the last item is the user's message and has a part that is not text. In earlier items and
    in results of tools a note stands for it, since the agent that sent it cannot take it back."""
    last = body.input[-1] if body.input else None
    if isinstance(last, MessageItem) and not isinstance(last.content, str):
        for i, part in enumerate(last.content):
            if not part.textual:
                param = f"input.{len(body.input) - 1}.content.{i}"
                raise bad_request(f"{param}: a new part must be 'input_text', got {part.type!r}", param)


def listed(item: Item) -> dict[str, Any]:
    """Return an item as it is listed, a message with the parts of its content."""
    found = item.model_dump(exclude_none=True)
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        found["content"] = [{"type": kind, "text": item.content}]
    return found


def to_messages(items: Iterable[Item], instructions: str | None = None) -> Messages:
    """Return the messages of a chat. Reasoning, text and calls in a row are one message of the assistant; without any
    item there is one of the user, without text."""
    messages: Messages = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        match item:
            case ReasoningItem():
                messages.append(_reasoning(item))
            case MessageItem(role="assistant"):
                _assistant(messages)["content"] = joined(item.content)
            case MessageItem():
                role = "user" if item.role == "user" else "system"
                _append(messages, {"role": role, "content": joined(item.content)})
            case CallItem():
                name = in_namespace(item.namespace, item.name)
                call = {"id": item.call_id, "function": {"name": name, "arguments": item.arguments}}
                _assistant(messages, call=True).setdefault("tool_calls", []).append(call)
            case CallOutputItem():
                message = {"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)}
                messages.append(message)
            case OtherItem():
                message = _assistant(messages, call=True)
                message["content"] = "\n".join(filter(None, [message.get("content"), left_out(item.type)]))
    return [m for m in messages if m.keys() & {"content", "tool_calls"}] or [{"role": "user", "content": ""}]


def _reasoning(item: ReasoningItem) -> dict[str, Any]:
    """Return a message that text or calls may be added to; without them it is dropped."""
    thought = joined(item.content or item.summary or [])
    return {"role": "assistant", **({"reasoning_content": thought} if thought else {})}


def _assistant(messages: Messages, call: bool = False) -> dict[str, Any]:
    """Return the message of the assistant that the next text, or call, belongs to."""
    last = messages[-1] if messages else {}
    taken = {"content", "tool_calls"} if not call else set()
    if last.get("role") != "assistant" or last.keys() & taken:
        messages.append({"role": "assistant"})
    return messages[-1]


def _append(messages: Messages, message: dict[str, Any]) -> None:
    """Add a message. Instructions in a row are one message, since templates expect one."""
    if messages and messages[-1]["role"] == message["role"] == "system":
        messages[-1]["content"] += "\n\n" + message["content"]
    else:
        messages.append(message)


def _named(tool: NamedFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def _choice(choice: str | NamedFunction | AllowedFunctions | None) -> Any:
    if isinstance(choice, NamedFunction):
        return _named(choice)
    if isinstance(choice, AllowedFunctions):
        allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _format(body: ResponsesRequest) -> dict[str, Any] | None:
    form = body.format
    if isinstance(form, SchemaText):
        return {"type": form.type, "json_schema": form.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)}
    return {"type": form.type}
