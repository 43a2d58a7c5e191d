"""A fake server for the page: the endpoints that the page calls, with recorded replies instead of a model.

To look at the page by hand: `python -m tests.support.fake_server`, then http://127.0.0.1:8017/.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from paceline.server.app import PAGE, add_page

MODEL = "SmolLM2-360M-Instruct"
# (drafted, tokens) of each round. The last token is the target's own, so a round accepts one token less than it yields.
SKY = [
    (4, ["The", " sky", " looks"]),
    (5, [" blue", " because", " sunlight", " is", " scattered", " by"]),
    (4, [" the", " air", ":", " short"]),
    (0, [" wavelengths"]),
    (6, [",", " like", " blue", ",", " are", " scattered", " more"]),
    (3, [" than", " long", " ones", "."]),
    (5, ["\n\n", "-", " blue", ":", " 450"]),
    (2, [" nm", "\n"]),
    (6, ["-", " red", ":", " 700", " nm", "\n", "\n"]),
    (4, ["At", " sunset", " the"]),
    (0, [" light"]),
    (7, [" travels", " further", " through", " the", " air", ",", " so", " what"]),
    (5, [" reaches", " us", " is", " mostly"]),
    (4, [" red", " and", " orange", "", "."]),
]
MARKUP = [
    (3, ["<img src=x", " onerror=", '"document.title=', '1">']),
    (2, ["<script>document.title=2</script>", "</p>", "&amp;"]),
]


@dataclass
class Fake:
    """Instructions for the server, and the requests that it received."""

    pause: float = 0.0
    """Seconds that each round takes."""
    key: str | None = None
    fail: tuple[int, str] | None = None
    """Status and message with which to answer every chat request."""
    hold_at: int | None = None
    """Round before which every reply waits, until this is None again."""
    break_after: int | None = None
    """Round after which to send an error event."""
    differ_at: int | None = None
    """Position of a token that differs in the reply without speculation."""
    guarantee: str = "bits"
    text: str | None = None
    """Text to reply with, instead of the recorded replies."""
    reasoning: str = ""
    """Reasoning text before the reply."""
    read: tuple[int, int] | None = None
    """Prompt tokens read so far and in total. They are sent before the reply to clients that request progress."""
    size: int = 40
    """Characters of `text` in each event."""
    cut_after: int | None = None
    """Number of events after which to close the connection without an error event."""
    others: tuple[str, ...] = ()
    """Other models, which are not loaded until they get a request."""
    sees: bool = False
    """True if the models accept images."""
    loaded: set[str] = field(default_factory=lambda: {MODEL})
    load_until: threading.Event | None = None
    """Event that delays loading a model until it is set."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)
    """Start and end time of each streamed reply."""
    gone: threading.Event = field(default_factory=threading.Event)
    """Set when a client has disconnected before the end of its reply."""

    def app(self) -> FastAPI:
        app = FastAPI()
        app.add_route("/v1/models", self.models)
        app.add_route("/v1/chat/completions", self.chat, methods=["POST"])
        add_page(app, PAGE)
        return app

    def refuse(self, request: Request) -> Response | None:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return error(401, "The API key is missing or wrong.")
        return None

    async def models(self, request: Request) -> Response:
        data = [{"id": name, "object": "model", "paceline": self.about(name)} for name in (MODEL, *self.others)]
        return self.refuse(request) or JSONResponse({"data": data})

    def about(self, name: str) -> dict[str, Any]:
        if name not in self.loaded:
            return {"loaded": False}
        return {
            "loaded": True,
            "modalities": ["text", "image"] if self.sees else ["text"],
            "drafters": ["suffix", "ngram", "eagle3"],
            "default": "suffix",
            "guarantee": self.guarantee,
            "context_length": 8192,
            "sampling": {"temperature": 0.6, "top_p": 0.95},
        }

    async def chat(self, request: Request) -> Response:
        if refused := self.refuse(request):
            return refused
        body = await request.json()
        self.bodies.append(body)
        if self.fail:
            headers = {"Retry-After": "3"} if self.fail[0] == 429 else None
            return error(*self.fail, headers)
        while self.load_until and not self.load_until.is_set() and body["model"] not in self.loaded:
            await asyncio.sleep(0.01)
        self.loaded.add(body["model"])
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        asked, done = body.get("speculation", "auto"), False
        began = time.monotonic()
        rounds = MARKUP if "markup" in body["messages"][-1]["content"] else SKY
        if self.text is not None:
            rounds = [(3, [self.text[i : i + self.size], ""]) for i in range(0, len(self.text), self.size)]
        events = plain_rounds(rounds, self.differ_at) if asked == "off" else drafted_rounds(rounds, drafter_of(asked))
        if body.get("continue_final_message"):
            events = rest_of(events, body["messages"][-1]["content"])
        cut = self.text is None and len(events) > body["max_tokens"]
        events = events[: body["max_tokens"]] if cut else events
        try:
            yield ": a comment, as servers send them to keep a connection\n\n"
            if self.read and body["return_progress"]:
                progress = {"prompt_progress": {"processed": self.read[0], "total": self.read[1], "cache": 0}}
                yield line({"choices": [{"index": 0, "delta": {}}], **progress})
            if self.reasoning:
                yield line({"choices": [{"index": 0, "delta": {"reasoning_content": self.reasoning}}]})
            for number, event in enumerate(events):
                if number == self.cut_after:
                    return
                if number == self.break_after:
                    yield line(
                        {"error": {"message": "Non-finite logits: the reply was ended.", "type": "server_error"}}
                    )
                    return
                while number == self.hold_at:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(self.pause)
                yield line({"choices": [{"index": 0, "finish_reason": None, **event}]})
            yield line({"choices": [{"index": 0, "delta": {}, "finish_reason": "length" if cut else "stop"}]})
            yield line({"choices": [], "usage": usage(events)})
            yield "data: [DONE]\n\n"
            done = True
        finally:
            if not done and self.break_after is None and self.cut_after is None:
                self.gone.set()
            self.times.append((began, time.monotonic()))


def error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "type": "x", "param": None, "code": None}}, status, headers)


def line(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event)}\n\n"


def drafter_of(asked: str | dict[str, Any]) -> str:
    return "suffix" if isinstance(asked, str) else str(asked["drafter"])


def token(text: str, origin: str, drafter: str | None) -> dict[str, Any]:
    ident = sum(ord(char) * 31**i for i, char in enumerate(text)) % 49152
    return {"text": text, "id": ident, "origin": origin, "p": 0.05 + (ident % 95) / 100, "drafter": drafter}


def event(tokens: list[dict[str, Any]], drafted: int, accepted: int) -> dict[str, Any]:
    content = "".join(token["text"] for token in tokens)
    return {
        "delta": {"content": content},
        "trace": tokens,
        "round": {"drafted": drafted, "accepted": accepted, "ms": 31.25},
    }


def drafted_rounds(rounds: list[tuple[int, list[str]]], drafter: str) -> list[dict[str, Any]]:
    events = []
    for drafted, texts in rounds:
        accepted = len(texts) - 1
        own = "plain" if not drafted else "bonus" if accepted == drafted else "correction"
        tokens = [token(text, "draft", drafter) for text in texts[:-1]] + [token(texts[-1], own, None)]
        events.append(event(tokens, drafted, accepted))
    return events


def plain_rounds(rounds: list[tuple[int, list[str]]], differ_at: int | None) -> list[dict[str, Any]]:
    texts = [text for _, texts in rounds for text in texts]
    if differ_at is not None:
        texts[differ_at] = " different"
    return [event([token(text, "plain", None)], 0, 0) for text in texts]


def rest_of(events: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the events that follow the first part of a reply."""
    sizes = accumulate(len(event["delta"]["content"]) for event in events)
    return [event for event, size in zip(events, sizes, strict=True) if size > len(text)]


def usage(events: list[dict[str, Any]]) -> dict[str, Any]:
    count = sum(len(event["trace"]) for event in events)
    drafted, accepted = (sum(event["round"][name] for event in events) for name in ("drafted", "accepted"))
    speculation = {
        "rounds": len(events),
        "drafted": drafted,
        "accepted": accepted,
        "tokens_per_round": count / len(events),
    }
    return {"prompt_tokens": 12, "completion_tokens": count, "total_tokens": 12 + count, "speculation": speculation}


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an ASGI application on a free local port. Yield its address."""
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the server did not start; its log says why")
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    uvicorn.run(Fake(pause=0.1).app(), host="127.0.0.1", port=8017)
