"""/v1/responses/compact: a summary item that replaces a conversation. Codex sends it to OpenAI's provider."""

from __future__ import annotations

import time
import uuid
from typing import Any

from paceline.server.api import Api, Encoder, Event
from paceline.server.apis.response_items import Item, MessageItem, chat_messages_of, listed, packed
from paceline.server.apis.responses import Responses, ResponsesRequest, usage_of
from paceline.server.errors import ApiError, bad_request
from paceline.server.fields import without_none
from paceline.server.prepare import Prepared
from paceline.server.replies import ChatReply
from paceline.server.request import ChatPrompt, GenerateRequest, reasoning_values
from paceline.server.usage import Usage
from paceline.server.worker import ReplyRound

_ASK = """Another assistant will continue this conversation and sees nothing of it but your summary. Write that summary:
what the user asked for, in the user's words; what has been done; what was found, with the names of files, commands and
values; what was decided; what is left to do. Write nothing else."""
_SHARE = 4
"""A summary may take this part of the context."""


class CompactRequest(ResponsesRequest):
    """Body of /v1/responses/compact: the conversation that is to be summarised."""


class Compaction(Api[CompactRequest]):
    """Summaries of conversations."""

    path = "/v1/responses/compact"
    body = CompactRequest
    id_prefix = "resp_"
    about = "Summarise a conversation in an item that replaces it."
    media_type = ""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses

    def decode(self, body: CompactRequest) -> GenerateRequest:
        """Return the request of a summary. The oldest messages are left out if the conversation does not fit."""
        items = [*self._responses.conversation(body), MessageItem(role="user", content=_ASK)]
        messages = chat_messages_of(items, body.instructions)
        return GenerateRequest(
            prompt=ChatPrompt(messages=messages, values=reasoning_values("none"), truncated=True),
            sampling=without_none(seed=body.seed),
            share=_SHARE,
            speculation=body.speculation,
        )

    def encoder(self, body: CompactRequest, prepared: Prepared) -> Encoder:
        """Return the encoder of the summary."""
        items = reversed(self._responses.conversation(body))
        last = next((item for item in items if isinstance(item, MessageItem) and item.role == "user"), None)
        [reply] = prepared.replies
        return CompactionEncoder(prepared.id, reply, last)


class CompactionEncoder(Encoder):
    """The user's last message, and the summary as an item that only this server reads."""

    def __init__(self, answer_id: str, reply: ChatReply, last: Item | None) -> None:
        self._id, self._reply, self._last = answer_id, reply, last

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
