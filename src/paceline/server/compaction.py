"""/v1/responses/compact: a conversation as one item, with which it goes on. Codex asks for it of OpenAI's provider."""

from __future__ import annotations

import time
import uuid
from typing import Any

from paceline.server import chat
from paceline.server.bodies import validated
from paceline.server.errors import ApiError, bad_request
from paceline.server.items import chat_body, listed
from paceline.server.limits import Settings
from paceline.server.models import LoadedModel
from paceline.server.replies import ChatReply
from paceline.server.responses import conversation, usage_of
from paceline.server.schema import ChatRequest
from paceline.server.schema_responses import CompactRequest, Item, MessageItem, packed
from paceline.server.stored import ResponseStore
from paceline.server.usage import Usage
from paceline.server.worker import ReplyRound
from paceline.server.writers import Event, PreparedRequest, Writer

_ASK = """Another assistant will continue this conversation and sees nothing of it but your summary. Write that summary:
what the user asked for, in the user's words; what has been done; what was found, with the names of files, commands and
values; what was decided; what is left to do. Write nothing else."""
_SHARE = 4
"""A summary may take this part of the context."""


def prepare(store: ResponseStore, model: LoadedModel, settings: Settings, body: CompactRequest) -> PreparedRequest:
    """Prepare the summary of a conversation. The oldest messages are left out if it does not fit.

    Raises `PacelineError` and `ApiError`.
    """
    before, new = conversation(store, settings, body)
    items = [*before, *new]
    asked = chat_body(body, [*items, MessageItem(role="user", content=_ASK)])
    kept = {"model", "messages", "seed", "timeout", "speculation"}
    plain = {name: value for name, value in asked.items() if name in kept}
    room = model.llm.model.target.context_length // _SHARE
    request = validated({**plain, "max_tokens": room, "reasoning": "off"}, ChatRequest)
    prepared = chat.prepare(model, settings, request, truncate=True)
    last = next((item for item in reversed(items) if isinstance(item, MessageItem) and item.role == "user"), None)
    return PreparedRequest(prepared.jobs, lambda answer_id: CompactionWriter(answer_id, prepared.reply(), last))


class CompactionWriter(Writer):
    """The user's last message, and the summary as an item that only this server reads."""

    def __init__(self, answer_id: str, reply: ChatReply, last: Item | None) -> None:
        self._id, self._reply, self._last = answer_id, reply, last

    def begin(self, usage: Usage) -> list[Event]:
        """Return nothing: the answer is no stream."""
        return []

    def add(self, round_: ReplyRound) -> list[Event]:
        """Add a round."""
        self._reply.add(round_)
        return []

    def heartbeat(self) -> Event:
        """Return an event that adds nothing."""
        return {"type": "response.in_progress"}

    def end(self, usage: Usage) -> list[Event]:
        """Return the whole answer, for clients that ask for a stream."""
        return [{"type": "response.compaction", **self.document(usage)}]

    def document(self, usage: Usage) -> dict[str, Any]:
        """Return the whole answer. Raises `ApiError` without a summary: the conversation would be lost."""
        if not self._reply.text.strip():
            raise bad_request("the model wrote no summary. Start a new conversation, or send a shorter one", "input")
        summary = {"type": "compaction", "id": f"cmp_{uuid.uuid4().hex}", "encrypted_content": packed(self._reply.text)}
        return {
            "id": self._id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*([listed(self._last)] if self._last else []), summary],
            "usage": usage_of(usage, self._reply.reasoning_tokens),
        }

    def failed(self, error: ApiError) -> Event:
        """Return the event of an answer that failed."""
        return {"type": "error", "code": error.code, "message": error.message}
