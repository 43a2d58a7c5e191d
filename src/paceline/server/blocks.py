"""Messages of /v1/messages, whose contents are blocks, as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.server.compat import left_out
from paceline.server.errors import ApiError, bad_request
from paceline.server.schema import ThinkingBudgets
from paceline.server.schema_messages import (
    BILLING,
    AnthropicMessage,
    Block,
    ClientTool,
    CountTokensRequest,
    DocumentBlock,
    MessagesRequest,
    OtherBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)

_NO_THREADS = "thread: this server keeps no conversations. Send the whole conversation without thread"
_THREAD_DETAILS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Anthropic's SDK (`beta.messages.tool_runner`) and Claude Code go on without threads after an error with these."""


def chat_body(body: CountTokensRequest) -> dict[str, Any]:
    """Return the request as the body of a chat completion. Raises `ApiError` 400 for a thread, and as `_check_new`."""
    if body.thread is not None:
        raise ApiError(400, _NO_THREADS, param="thread", details=_THREAD_DETAILS)
    _check_new(body.messages)
    messages = [message for given in body.messages for message in _messages(given)]
    if system := _system(body.system):
        messages.insert(0, {"role": "system", "content": system})
    found: dict[str, Any] = {
        "messages": messages,
        "continue_final_message": (messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]) or None,
        "tools": [_tool(tool) for tool in body.functions] or None,
        "response_format": _format(body),
        **_choice(body.tool_choice, bool(body.functions)),
        **_reasoning(body),
        **{name: getattr(body, name) for name in ThinkingBudgets.model_fields},
        **_budget(body),
        **body.own_samplers,
    }
    found |= {name: getattr(body, name) for name in ("model", "seed", "timeout", "chat_template_kwargs")}
    if body.speculation is not None:
        named = body.speculation if isinstance(body.speculation, str) else body.speculation.model_dump()
        found["speculation"] = named
    if isinstance(body, MessagesRequest):
        found |= {name: getattr(body, name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
        found["stop"] = body.stop_sequences
    return {name: value for name, value in found.items() if value is not None}


def _system(system: str | Sequence[TextBlock] | None) -> str:
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    return "\n\n".join(filter(None, map(_without_billing, texts)))


def _without_billing(text: str) -> str:
    return text.partition("\n")[2].lstrip("\n") if text.startswith(BILLING) else text


def _check_new(messages: Sequence[AnthropicMessage]) -> None:
    """Raise `ApiError` 400 if the last message is the user's and has a block that is not text. In earlier messages,
    beside results of tools and in them a note stands for it, since the agent that sent it cannot take it back."""
    last = messages[-1]
    blocks = last.content if last.role == "user" and not isinstance(last.content, str) else []
    results = any(isinstance(block, ToolResultBlock) for block in blocks)
    for i, block in enumerate(blocks):
        if isinstance(block, OtherBlock) and not results:
            param = f"messages.{len(messages) - 1}.content.{i}"
            raise bad_request(f"{param}: a new block must be text or a document of text, got {block.type!r}", param)


def _messages(message: AnthropicMessage) -> list[dict[str, Any]]:
    """Return a message, after the tool results that it holds."""
    blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
        for block in blocks
        if isinstance(block, ToolResultBlock)
    ]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    text = _text(blocks)
    found: dict[str, Any] = {"role": message.role}
    found |= {"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {}
    found |= {"tool_calls": calls} if calls else {}
    found |= {"content": text} if text or not (calls or results) else {}
    return [*results, *([found] if found.keys() & {"content", "tool_calls"} else [])]


def _text(blocks: Sequence[Block]) -> str:
    texts = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, DocumentBlock):
            texts.append(f"{block.title}\n\n{block.source.data}" if block.title else block.source.data)
        elif isinstance(block, OtherBlock):
            texts.append(left_out(block.type))
    return "\n".join(texts)


def _result(block: ToolResultBlock) -> str:
    text = block.content if isinstance(block.content, str) else _text(block.content or [])
    return f"Error: {text}" if block.is_error else text


def _tool(tool: ClientTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _choice(choice: ToolChoice | None, tools: bool) -> dict[str, Any]:
    """Return the parameters of a tool choice. "auto" may stand beside tools that were all skipped."""
    if choice is None or (choice.type in ("auto", "none") and not tools):
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    made = {"tool_choice": {"any": "required", "tool": named}.get(choice.type, choice.type)}
    return made | ({"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {})


def _reasoning(body: CountTokensRequest) -> dict[str, Any]:
    if body.thinking and body.thinking.type == "disabled":
        return {"reasoning": "off"}
    effort = body.output_config.effort if body.output_config else None
    if effort is not None:
        return {"reasoning_effort": effort}
    return {"reasoning": "auto"}


def _budget(body: CountTokensRequest) -> dict[str, Any]:
    limit = body.thinking.budget_tokens if body.thinking and body.thinking.type == "enabled" else None
    return {} if limit is None else {"thinking_budget": limit}


def _format(body: CountTokensRequest) -> dict[str, Any] | None:
    if body.format is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": body.format.schema_}}
