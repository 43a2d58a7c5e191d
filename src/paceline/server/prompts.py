"""Prompts of chats: what a chat template makes of messages and tools, and which messages fit."""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paceline.chat import thinking, tools
from paceline.chat.tools import CallFormat
from paceline.errors import InvalidPrompt, PacelineError, TimedOut
from paceline.llm import LLM
from paceline.server.errors import LOG, REQUEST_ID, bad_request
from paceline.server.request import ChatMessage, ChatPrompt
from paceline.server.worker import Busy
from paceline.text.chat_template import check_messages

_RESERVED = {"messages", "tools", "add_generation_prompt", "self"}
"""Variables of a template that a request cannot set."""
_SHARE = 4
"""A reply of any length gets this part of the context, where messages must be left out anyway."""


def call_format(llm: LLM) -> CallFormat:
    """Return the format in which a model writes calls."""
    template, token_id = llm.tokenizer.template_for(tools=True), llm.tokenizer.token_id
    return tools.family(template if tools.knows_tools(template) else None, lambda text: token_id(text) is not None)


def chat_text(llm: LLM, prompt: ChatPrompt) -> str:
    """Return a chat's prompt as text. Raises `ApiError` 400 naming the messages."""
    if reserved := prompt.values.keys() & _RESERVED:
        raise bad_request(f"chat_template_kwargs must not contain {reserved.pop()!r}", "chat_template_kwargs")
    try:
        return _rendered(llm, prompt)
    except TimedOut as error:
        raise Busy(error.cause, error.fix) from error
    except PacelineError as error:
        raise bad_request(str(error), "messages") from error


def _rendered(llm: LLM, prompt: ChatPrompt) -> str:
    chat = [message.as_dict() for message in prompt.messages]
    given = [function.shown for function in prompt.tools.offered]
    template = llm.tokenizer.template_for(bool(given))
    if tools.knows_tools(template):
        chat, given = tools.fitted(template, call_format(llm), check_messages(chat), given)
        return _applied(llm, prompt, chat, given)
    if given:
        return _applied(llm, prompt, tools.with_tools(check_messages(chat), given), [])
    try:
        return _applied(llm, prompt, chat, [])
    except InvalidPrompt:
        if not any(message["role"] == "tool" or "tool_calls" in message for message in chat):
            raise
        return _applied(llm, prompt, tools.with_tools(check_messages(chat), []), [])


def _applied(llm: LLM, prompt: ChatPrompt, chat: list[dict[str, Any]], given: list[dict[str, Any]]) -> str:
    values = {"tools": given or None, **prompt.values}
    if prompt.continued:
        return _continued(llm, chat, values)
    text = llm.tokenizer.apply_chat_template(chat, prompt.answered, **values)
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


def truncated(prompt: ChatPrompt, size: Callable[[ChatPrompt], int], limit: int, wanted: int) -> ChatPrompt:
    """Return a chat without its oldest messages, as few as it takes for the prompt and a reply to fit.

    Instructions and the last message stay, and the first message that stays is no tool result.

    Args:
        prompt: A chat that is too long.
        size: Returns the tokens of a chat's prompt.
        limit: The most tokens of a prompt.
        wanted: The most tokens of the reply; -1: as many as fit.
    """
    messages = prompt.messages
    room = limit - min(limit // _SHARE, wanted if wanted > 0 else limit)
    last = len(messages) - 1
    starts = [i for i in range(1, last + 1) if i == last or messages[i].role in ("user", "assistant")]

    def without(start: int) -> ChatPrompt:
        return replace(prompt, messages=_from(messages, start))

    # The later the start, the shorter the prompt.
    index = bisect_left(starts, True, key=lambda start: size(without(start)) <= room)
    if not starts:
        return prompt
    shorter = without(starts[min(index, len(starts) - 1)])
    LOG.warning(
        "%s the prompt exceeds %d tokens: the oldest %d of %d messages are left out",
        REQUEST_ID.get(),
        limit,
        len(messages) - len(shorter.messages),
        len(messages),
    )
    return shorter


def _from(messages: Sequence[ChatMessage], start: int) -> list[ChatMessage]:
    """Return the messages from `start` on, after all instructions."""
    return [message for i, message in enumerate(messages) if i >= start or message.role == "system"]
