"""An OpenAI-compatible server without a model. Replies are derived from the request. Options make it fail in ways that
the load tools must detect: `python stub_server.py --host H --port P [--wrong N] ...`"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

KNOWN = {
    *("model", "messages", "prompt", "max_tokens", "temperature", "seed", "stream", "stream_options", "speculation"),
    *("n", "logprobs", "top_logprobs", "response_format", "guided_regex", "stop", "presence_penalty", "top_p"),
}


class Stub:
    """Every `wrong`-th reply has another text, every `broken`-th breaks off; with `leak`, requests never finish."""

    def __init__(self, wrong: int = 0, broken: int = 0, leak: bool = False, delay: float = 0.002) -> None:
        self.wrong, self.broken, self.leak, self.delay = wrong, broken, leak, delay
        self.running, self.count = 0, 0

    def pieces(self, body: dict[str, Any], sample: int) -> list[str]:
        """Return the reply, which depends only on the request unless an option changes it."""
        asked = [body.get(key) for key in ("messages", "prompt", "temperature", "seed")]
        digest = hashlib.sha256(json.dumps([asked, sample]).encode()).hexdigest()
        found = [f"{digest[i % 60 : i % 60 + 3]} " for i in range(body.get("max_tokens") or 16)]
        if self.wrong and self.count % self.wrong == 0:
            found[-1] = "oops "
        return found

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        pieces = self.pieces(body, 0)
        try:
            for i in range(0, len(pieces), 2):
                await asyncio.sleep(self.delay)
                if self.broken and self.count % self.broken == 0 and i > 4:
                    raise RuntimeError("told to break off")
                yield event({"choices": [choice(body, "delta", "".join(pieces[i : i + 2]), None)]})
            yield event({"choices": [choice(body, "delta", "", "length")]})
            yield event({"choices": [], "usage": usage(len(pieces))})
            yield "data: [DONE]\n\n"
        finally:
            self.running -= not self.leak

    async def whole(self, body: dict[str, Any]) -> JSONResponse:
        samples = [self.pieces(body, i) for i in range(body.get("n") or 1)]
        await asyncio.sleep(self.delay * len(samples[0]))
        self.running -= not self.leak
        choices = [choice(body, "message", "".join(pieces), "length") for pieces in samples]
        return JSONResponse({"choices": choices, "usage": usage(sum(map(len, samples)))})


def event(said: dict[str, Any]) -> str:
    return f"data: {json.dumps(said)}\n\n"


def choice(body: dict[str, Any], part: str, text: str, finish: str | None) -> dict[str, Any]:
    said = {"text": text} if "prompt" in body else {part: {"role": "assistant", "content": text}}
    return {"index": 0, "finish_reason": finish} | said


def usage(tokens: int) -> dict[str, Any]:
    return {"completion_tokens": tokens, "prompt_tokens": 10, "speculation": {"rounds": -(-tokens // 2)}}


def refused(why: str) -> JSONResponse:
    return JSONResponse({"error": {"message": why, "type": "invalid_request_error", "param": None, "code": None}}, 400)


def out_of_range(body: dict[str, Any]) -> str | None:
    """Return the name of a field with a value that must be refused, or None."""
    speculation = body.get("speculation", "auto")
    good = {
        "max_tokens": isinstance(body.get("max_tokens", 1), int),
        "temperature": body.get("temperature", 0.0) in (0.0, 0.7, 0.8, 0.9, 1.0),
        "messages": isinstance(body.get("messages", []), list),
        "prompt": isinstance(body.get("prompt", ""), str),
        "stop": isinstance(body.get("stop", []), list),
        "n": body.get("n", 1) >= 1,
        "model": body.get("model", "stub") == "stub",
        "speculation": isinstance(speculation, dict) or speculation in ("auto", "off"),
    }
    return next((name for name, fine in good.items() if not fine), None)


def application(stub: Stub) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": "stub"}]}

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        lines = [f'vllm:num_requests_running{{model="stub"}} {stub.running}', "vllm:num_requests_waiting 0.0"]
        return PlainTextResponse("\n".join(["# HELP nothing", *lines, "vllm:kv_cache_usage_perc 0.0"]) + "\n")

    async def answer(request: Request) -> Any:
        try:
            body = await request.json()
        except ValueError:
            return refused("not JSON")
        if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
            return refused("no prompt")
        if unknown := set(body) - KNOWN:
            return refused(f"unknown: {sorted(unknown)[0]}")
        if why := out_of_range(body):
            return refused(f"{why} is out of range")
        stub.count += 1
        stub.running += 1
        return (
            StreamingResponse(stub.stream(body), media_type="text/event-stream")
            if body.get("stream")
            else await stub.whole(body)
        )

    app.post("/v1/chat/completions", response_model=None)(answer)
    app.post("/v1/completions", response_model=None)(answer)
    return app


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--wrong", type=int, default=0)
    parser.add_argument("--broken", type=int, default=0)
    parser.add_argument("--leak", action="store_true")
    parser.add_argument("--delay", type=float, default=0.002)
    args = vars(parser.parse_args())
    host, port = args.pop("host"), args.pop("port")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again once it has stopped
    uvicorn.run(application(Stub(**args)), host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)


if __name__ == "__main__":
    main()
