"""Warm-up prompts: prefilled before the server starts, so that requests with the same prefix start faster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import InvalidOption, PromptTooLong
from paceline.sampling.parameters import Sampling
from paceline.server.apis.chat_completions import ChatCompletions, ChatRequest
from paceline.server.apis.messages import CountTokensRequest, MessagesRequest, chat_prompt
from paceline.server.errors import ApiError
from paceline.server.limits import Settings
from paceline.server.prepare import chat_tokens
from paceline.server.request import ChatMessage, ChatPrompt
from paceline.server.worker import Worker


@dataclass(frozen=True, slots=True)
class WarmPrompt:
    """A warm-up prompt, and the file that it comes from."""

    path: Path
    prompt: ChatPrompt


def warm_prompt(path: Path) -> WarmPrompt:
    """Read a file.

    Args:
        path: A JSON file is a request to OpenAI's or Anthropic's chat API, or a list of messages. Any other file is a
            system prompt.

    Raises:
        InvalidOption: If the file cannot be read or is not such a request.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix != ".json":
            return WarmPrompt(path, ChatPrompt(messages=[ChatMessage(role="system", content=text)]))
        return WarmPrompt(path, _chat(json.loads(text)))
    except (OSError, ValueError, ApiError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise InvalidOption(
            f"--warm cannot read {path}: {reason:.300}", "Give a system prompt as text, or a chat request as FILE.json"
        ) from error


def _chat(body: Any) -> ChatPrompt:
    body = {"messages": body} if isinstance(body, list) else body
    if isinstance(body, dict) and "system" in body:
        return chat_prompt((MessagesRequest if "max_tokens" in body else CountTokensRequest).model_validate(body))
    prompt = ChatCompletions().decode(ChatRequest.model_validate(body)).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def read_prompt(worker: Worker, settings: Settings, warm: WarmPrompt) -> tuple[int, int]:
    """Prefill a prompt, so that it enters the prefix cache. The worker must not have started.

    Returns:
        The number of tokens, and the number of tokens that were already cached.

    Raises:
        InvalidOption: If the model's template refuses the prompt, or the prompt is too long.
        OutOfMemory: If there is no memory for the prompt.
    """
    llm = worker.llm
    try:
        tokens = _shared_tokens(worker, settings, warm.prompt)
        request = llm.start(tokens, Sampling(max_new_tokens=1), speculation=worker.default)
    except (ApiError, PromptTooLong) as error:
        raise InvalidOption(f"--warm cannot use {warm.path}: {error}", "Change the file") from error
    try:
        llm.engine.prefill(request)
    finally:
        llm.engine.finish(request)
    return len(tokens), request.stats.cached


def _shared_tokens(worker: Worker, settings: Settings, prompt: ChatPrompt) -> Sequence[int]:
    """Return the longest prefix, in tokens, that all requests share that continue a chat with a message of the user.

    A chat that already ends with a message of the user or of a tool is used as it is.
    """
    if prompt.messages[-1].role in ("user", "tool"):
        return chat_tokens(worker.llm, settings, prompt)
    users = [ChatMessage(role="user", content=text) for text in ("a", "b")]
    chats = [replace(prompt, messages=[*prompt.messages, user], continues_last=False) for user in users]
    one, other = (chat_tokens(worker.llm, settings, chat) for chat in chats)
    return one[: [a == b for a, b in zip(one, other, strict=False)].index(False)]
