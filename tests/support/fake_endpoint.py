"""An OpenAI-compatible endpoint with a toy language model. Its speculation is lossless or has one planted fault.

`FakeEndpoint` is a transport of `paceline.certify`; `listening` serves it over HTTP.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WORDS = [
    *(
        "the ",
        "boat ",
        "red ",
        "lamp ",
        "blue ",
        "map ",
        "green ",
        "kite ",
        "and ",
        "with ",
        "carries ",
        "home ",
        "two ",
    ),
    *(
        "seven ",
        "long ",
        "rope ",
        ". ",
        ", ",
        "so ",
        "Lima ",
        "Oslo ",
        "was ",
        "there ",
        "now ",
        "🚲 ",
        "日本 ",
        "👩‍🚀 ",
    ),
]
END = "</s>"
BLOCK = 4
FAULTS = {
    "always_accept": "accepts every drafted token",
    "accepts_runner_up": "accepts a draft that is within 1 nat of the most likely token",
    "one_percent": "commits 1 % of the drafted tokens without verification",
    "off_by_one_commit": "loses the token after a rejection",
    "repeated_token": "commits the last token of a full block twice",
    "stale_cache": "keeps the rejected token in the context",
    "late": "accepts every drafted token after the first 100 tokens",
    "long_prompt": "accepts every drafted token for prompts of more than 5,000 characters",
    "temperature_twice": "applies the temperature twice to drafted positions",
    "top_p_ignored": "ignores top_p on drafted positions",
    "drop_residual": "samples from p instead of the residual after a rejection",
    "greedy_sampling": "takes the most likely token at every second position of a sampled block",
    "stop_inside_block": "looks for stop strings only at the end of a block",
    "stop_across_tokens": "looks for stop strings only within a token",
    "over_max_tokens": "commits the whole last block",
    "under_max_tokens": "stops one token early, and reports the limit",
    "end_in_draft": "continues after a drafted end token",
    "wrong_finish": "reports length instead of stop inside a block",
    "draft_logprobs": "reports the drafter's log-probabilities",
    "shifted_top": "reports the top_logprobs of the previous position",
    "row_swap": "answers with another request's reply under load",
    "lost_chunk": "loses a chunk of a stream",
    "twice_chunk": "sends a chunk of a stream twice",
    "counts_drafts": "counts drafted tokens as generated",
    "second_choice": "drafts the second choice from the first without verification",
    "no_penalties": "ignores penalties on drafted positions",
    "no_bias": "ignores logit_bias on drafted positions",
    "no_schema": "ignores the schema on drafted positions",
    "broken_call": "drops a quotation mark in the arguments of a tool call",
    "stale_prefix": "reuses the cache of the previous prompt although a word was edited",
    "broken_characters": "splits multi-byte characters at the end of a block",
    "server_error": "fails if a request has a stop string",
    "late_sampling": "accepts every drafted token of a sampled reply after the first 8 tokens",
    "late_distribution": "samples from the drafter after the first 8 tokens, and reports its log-probabilities",
}
"""Name of a fault -> what speculation does wrong."""


_PLAIN: dict[str, list[Written]] = {}
"""Replies of plain decoding without noise, by the model's seed and the request."""


@dataclass
class Step:
    """A generated token with its log-probability, and the most likely tokens."""

    text: str
    logprob: float
    top: dict[str, float]


@dataclass
class Written:
    """A reply: its tokens, its text (which a stop string may cut), the finish reason, and the texts of its blocks."""

    steps: list[Step] = field(default_factory=list)
    text: str = ""
    finish: str = "length"
    drafted: int = 0
    chunks: list[str] = field(default_factory=list)


class FakeEndpoint:
    """Answers requests. `{"speculation": "off"}` disables speculation.

    Args:
        fault: Name of a planted fault, or "".
        noise: Standard deviation of logit noise that differs between requests, with and without speculation.
        rounding: Standard deviation of fixed logit noise with speculation only.
        own_noise: True if speculation samples with different random numbers than plain decoding.
        refused: Fields that are answered with 400.
        longest: Longest prompt, in characters. Longer ones are answered with 400.
        counts: True to report the number of drafted tokens, as llama.cpp does.
        stuck: True to ignore the switch, and always speculate.
        broken: Fields that are answered with 500.
        seed: Seed of the language model and of the noise.
    """

    def __init__(
        self,
        fault: str = "",
        noise: float = 0.0,
        rounding: float = 0.0,
        own_noise: bool = False,
        refused: tuple[str, ...] = (),
        longest: int = 1_000_000,
        counts: bool = False,
        stuck: bool = False,
        broken: tuple[str, ...] = (),
        seed: int = 0,
    ) -> None:
        assert not fault or fault in FAULTS
        self.fault, self.noise, self.rounding, self.own_noise, self.refused = fault, noise, rounding, own_noise, refused
        self.seed, self.draw = seed, random.Random(seed)
        self.longest, self.counts, self.stuck = longest, counts, stuck
        self.completed: set[str] = set()
        self.broken = broken
        self.last_prompt, self.active, self.last_reply = "", 0, {}
        self.lock = threading.Lock()

    def __call__(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        if path == "/models":
            return 200, json.dumps({"data": [{"id": "toy", "owned_by": "nobody"}]}).encode()
        if method != "POST" or path not in ("/chat/completions", "/completions") or body is None:
            return 404, b'{"error": {"message": "no such path"}}'
        if bad := [name for name in self.refused if name in body]:
            return 400, json.dumps({"error": {"message": f"{bad[0]} is not supported"}}).encode()
        if any(name in body for name in self.broken):
            return 500, b"Internal Server Error"
        if body.get("echo"):
            return 200, self._echo(dict(body))
        prompt = body.get("prompt") or body["messages"][-1]["content"]
        if path == "/completions":
            self.completed.add(prompt)
        if len(prompt) > self.longest:
            return 400, b'{"error": {"message": "the prompt is too long"}}'
        speculates = self.stuck or body.get("speculation") != "off"
        if speculates and self.fault == "server_error" and body.get("stop"):
            return 500, b"Internal Server Error"
        with self.lock:
            self.active += 1
        try:
            if self.fault == "row_swap":
                time.sleep(0.002)
            return 200, self._answer(dict(body), prompt, speculates)
        finally:
            with self.lock:
                self.active -= 1

    def _echo(self, body: dict[str, Any]) -> bytes:
        """Score the text after the prompt of an earlier request."""
        given = body["prompt"]
        prompt = max((one for one in tuple(self.completed) if given.startswith(one)), key=len, default=given[:16])
        writer = Writer(self, prompt, body | {"top_logprobs": body["logprobs"], "max_tokens": 10**6}, False, 0)
        for word in re.findall("|".join(map(re.escape, [*WORDS, *writer.forced, "."])), given[len(prompt) :]):
            writer._commit(word, writer._logits(), False)
        steps = writer.written.steps
        scores: dict[str, list[Any]] = {"tokens": [prompt, *(step.text for step in steps)]}
        scores["token_logprobs"] = [None, *(step.logprob for step in steps)]
        scores["top_logprobs"] = [None, *(step.top for step in steps)]
        return json.dumps({"choices": [{"index": 0, "text": "".join(scores["tokens"]), "logprobs": scores}]}).encode()

    def _answer(self, body: dict[str, Any], prompt: str, speculates: bool) -> bytes:
        if self.fault == "stale_prefix" and speculates:
            before, self.last_prompt = self.last_prompt, prompt
            if before != prompt and before[:100] == prompt[:100] and len(prompt) > 100:
                prompt = before
        replies = self._replies(body, prompt, speculates)
        first = replies[0]
        if speculates and self.fault == "second_choice" and len(replies) > 1:
            replies[1].text = replies[1].text.replace("red", "blue")
        if speculates and self.fault == "row_swap":
            with self.lock:
                if self.active > 1 and self.last_reply:
                    replies[0] = self.last_reply.pop("one")
                else:
                    self.last_reply["one"] = first
        tokens = sum(len(reply.steps) for reply in replies)
        tokens += first.drafted if speculates and self.fault == "counts_drafts" else 0
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": tokens}
        if body.get("stream"):
            return self._stream(replies[0], usage, speculates)
        choices = [_choice(i, reply, body, self.fault if speculates else "") for i, reply in enumerate(replies)]
        timings = {"draft_n": first.drafted} if first.drafted else {"prompt_n": 1}
        return json.dumps({"choices": choices, "usage": usage} | ({"timings": timings} if self.counts else {})).encode()

    def _replies(self, body: dict[str, Any], prompt: str, speculates: bool) -> list[Written]:
        """Write the replies to a request. Those of plain decoding, which no fault changes, are written once."""

        def written() -> list[Written]:
            return [Writer(self, prompt, body, speculates, choice).write() for choice in range(body.get("n") or 1)]

        drawn = body.get("temperature") != 0 and body.get("seed") is None
        if speculates or self.noise or drawn:
            return written()
        key = json.dumps([self.seed, prompt, body], sort_keys=True)
        if key not in _PLAIN:
            _PLAIN[key] = written()
        return _PLAIN[key]

    def _stream(self, reply: Written, usage: dict[str, int], speculates: bool) -> bytes:
        chunks = list(reply.chunks)
        if speculates and len(chunks) > 2:
            if self.fault == "lost_chunk":
                del chunks[1]
            if self.fault == "twice_chunk":
                chunks.insert(1, chunks[1])
        events = [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} for text in chunks]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reply.finish}]})
        events.append({"choices": [], "usage": usage})
        return b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events) + b"data: [DONE]\n\n"


def _choice(index: int, reply: Written, body: dict[str, Any], fault: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if body.get("tools"):
        text = reply.text.replace('"', "", 1) if fault == "broken_call" else reply.text
        message = {"content": None, "tool_calls": [{"function": {"name": "weather", "arguments": text}}]}
    choice = {"index": index, "message": message, "finish_reason": reply.finish}
    if body.get("logprobs"):
        shifted = fault == "shifted_top"
        rows = []
        for i, step in enumerate(reply.steps):
            top = reply.steps[max(0, i - shifted)].top
            rows.append({"token": step.text, "logprob": step.logprob, "top_logprobs": []})
            rows[-1]["top_logprobs"] = [{"token": text, "logprob": value} for text, value in top.items()]
        choice["logprobs"] = {"content": rows}
    return choice


def forced(prompt: str, body: dict[str, Any], seed: int) -> list[str]:
    """Return the tokens that the toy prefers at the start of a reply: answers, echoes, JSON. May be empty."""
    if body.get("response_format"):
        rows = '[{"city": "Oslo", "count": 4}, {"city": "Lima", "count": 7}, {"city": "Oslo", "count": 4}]'
        return [*re.findall(r"\w+|\W", rows), END]
    if body.get("tools"):
        return [*re.findall(r"\w+|\W", '{"city": "Lima", "days": 3}'), END]
    if found := re.search(r"has (\d+) boxes with (\d+) .* finds (\d+) more", prompt):
        a, b, c = map(int, found.groups())
        wrong = hashlib.md5(f"{prompt} {seed}".encode()).digest()[0] < 40
        return ["So ", "it ", "is ", "easy ", "Answer: ", str(a * b + c + wrong), END]
    if found := re.search(r"person with id (\d+)", prompt):
        row = re.search(rf'"id": {found[1]}, "name": "\w+", "city": "(\w+)"', prompt)
        return ["It ", "is ", "here ", "Answer: ", row[1] if row else "Lima", END]
    if prompt.startswith("Repeat this line"):
        return re.findall(r"\S+\s", prompt.partition("\n")[2]) * 6
    return []


@lru_cache(100_000)
def scores(digest: str, context: tuple[str, ...]) -> dict[str, float]:
    """Return token -> logit, from the prompt and the last three tokens."""
    draw = random.Random(f"{digest} {context}")
    return {word: draw.gauss(0, 1.6) for word in WORDS}


class Writer:
    """Generates one reply, block by block."""

    def __init__(self, server: FakeEndpoint, prompt: str, body: dict[str, Any], speculates: bool, choice: int) -> None:
        self.server, self.body, self.speculates = server, body, speculates
        self.fault = server.fault if speculates else ""
        self.digest = hashlib.md5(f"{server.seed} {prompt}".encode()).hexdigest()
        self.prompt, self.forced = prompt, forced(prompt, body, server.seed)
        self.temperature = float(body.get("temperature", 1.0))
        self.limit = int(body.get("max_tokens") or 64)
        given = body.get("seed")
        self.seed = server.draw.random() if given is None else given
        if choice:
            self.seed = f"{self.seed} {choice}"
        self.salt = "own" if speculates and (server.own_noise or self.fault == "drop_residual") else ""
        self.context: list[str] = []
        self.written = Written()
        self.cut = False

    def write(self) -> Written:
        """Generate the reply."""
        out, size, over = self.written, 0, self.fault == "over_max_tokens"
        chunk_start = 0
        while len(out.steps) < self.limit and not self.cut:
            size = BLOCK if self.speculates else 1
            for place in range(size + 1 if self.speculates else 1):
                drafted = self.speculates and place < size
                if not self._position(drafted, place) or self.cut:
                    break
                if len(out.steps) >= self.limit and not over:
                    break
            self._check_block()
            text = out.text if self.cut else "".join(step.text for step in out.steps)
            out.chunks.append(text[chunk_start:])
            chunk_start = len(text)
        if not self.cut:
            out.text = "".join(step.text for step in out.steps)
            if self.fault == "under_max_tokens" and len(out.steps) > 3:
                out.text = out.text[: -len(out.steps.pop().text)]
        return out

    def _position(self, drafted: bool, place: int) -> bool:
        """Generate one token. Returns True if a drafted token was accepted."""
        out, position = self.written, len(self.written.steps)
        raw = self._logits()
        draft = self._draft(raw, position) if drafted else ""
        probabilities = self._shaped(raw, drafted)
        token = self._choose(probabilities, position, drafted, place, draft)
        accepted = drafted and token == draft
        out.drafted += drafted
        if token == END and not (self.fault == "end_in_draft" and accepted):
            out.text, self.cut = "".join(step.text for step in out.steps), True
            out.finish = "length" if self.fault == "wrong_finish" and place else "stop"
            return False
        token = ". " if token == END else token
        if self.fault == "off_by_one_commit" and drafted and not accepted and place == 2:
            self.context.append(token)
            return False
        self._commit(token, raw, drafted)
        if self.fault == "repeated_token" and accepted and place == BLOCK - 1 and position % 3 == 0:
            self._commit(token, raw, drafted)
        if self.fault == "stale_cache" and drafted and not accepted:
            self.context[-1] = draft
        return accepted

    def _commit(self, token: str, raw: dict[str, float], drafted: bool) -> None:
        shown = (
            {word: value * 0.5 for word, value in raw.items()} if self.fault == "draft_logprobs" and drafted else raw
        )
        total = math.log(sum(map(math.exp, shown.values())))
        count = self.body.get("top_logprobs") or 0
        most = sorted(shown, key=shown.__getitem__, reverse=True)[:count] if count else []
        logprob = shown.get(token, -20.0) - total
        if self.fault == "broken_characters" and ord(token[0]) > 0x2000 and len(self.written.steps) % 2:
            token = "\ufffd" + token[1:]
        self.written.steps.append(Step(token, logprob, {word: shown[word] - total for word in most}))
        self.context.append(token)
        self._check_stops(token)

    def _check_stops(self, token: str) -> None:
        if self.fault == "stop_inside_block" or not self.body.get("stop"):
            return
        text = "".join(step.text for step in self.written.steps)
        looked = token if self.fault == "stop_across_tokens" else text
        found = [text.find(stop) for stop in self.body.get("stop") or () if stop in looked]
        if found:
            self.written.text, self.written.finish, self.cut = text[: min(found)], "stop", True

    def _check_block(self) -> None:
        text = "".join(step.text for step in self.written.steps) if self.fault == "stop_inside_block" else ""
        if text and any(text.endswith(stop) for stop in self.body.get("stop") or ()):
            self.written.text, self.written.finish, self.cut = text, "stop", True

    def _logits(self) -> dict[str, float]:
        """Return the model's logits for the next token, with the server's noise."""
        found = dict(scores(self.digest, tuple(self.context[-3:])))
        position = len(self.context)
        if self.context:  # prefer the token that followed the last token earlier, as n-gram drafters predict
            for i in range(len(self.context) - 2, -1, -1):
                if self.context[i] == self.context[-1]:
                    found[self.context[i + 1]] = found.get(self.context[i + 1], 0.0) + 1.5
                    break
        found[END] = -4.0 + (7 if len(self.prompt) < 50 and position > 3 else 0) + (position > 30)
        if position < len(self.forced):
            found[self.forced[position]] = found.get(self.forced[position], 0.0) + 12
        if self.fault == "late_distribution" and self.temperature and position >= 8:
            found = {word: value / 2 for word, value in found.items()}
        amplitude = self.server.noise
        for word in found if amplitude else ():
            found[word] += self.server.draw.gauss(0, amplitude)
        if self.server.rounding and self.speculates:
            draw = random.Random(f"{self.digest} {position}")
            for word in found:
                found[word] += draw.gauss(0, self.server.rounding)
        return found

    def _draft(self, raw: dict[str, float], position: int) -> str:
        """Return the drafter's token: the model's first or second choice."""
        first, second = sorted(raw, key=raw.__getitem__, reverse=True)[:2]
        right = hashlib.md5(f"{self.digest} {position} draft".encode()).digest()[0] < 150
        return first if right else second

    def _shaped(self, raw: dict[str, float], drafted: bool) -> dict[str, float]:
        """Return token -> probability with the request's sampling parameters applied."""
        logits = dict(raw)
        if not (drafted and self.fault == "no_penalties"):
            each, once = self.body.get("frequency_penalty", 0), self.body.get("presence_penalty", 0)
            for token, count in Counter(step.text for step in self.written.steps).items() if each or once else ():
                logits[token] = logits.get(token, 0.0) - 3 * (count * each + once)
        if not (drafted and self.fault == "no_bias"):
            for token, value in (self.body.get("logit_bias") or {}).items():
                if int(token) % 4 == 0:
                    word = list(logits)[int(token) % len(logits)]
                    logits[word] += value / 20
        temperature = self.temperature or 1.0
        if drafted and self.fault == "temperature_twice":
            temperature *= temperature
        top = max(logits.values())
        weights = {word: math.exp((value - top) / temperature) for word, value in logits.items()}
        total = sum(weights.values())
        if self.temperature == 0:
            best = max(weights, key=weights.__getitem__)
            return {best: weights[best]} | weights
        limit = 1.0 if drafted and self.fault == "top_p_ignored" else float(self.body.get("top_p", 1.0))
        kept, mass = {}, 0.0
        for word in sorted(weights, key=weights.__getitem__, reverse=True):
            kept[word] = weights[word] / total
            mass += kept[word]
            if mass >= limit:
                break
        return {word: value / mass for word, value in kept.items()}

    def _choose(self, p: dict[str, float], position: int, drafted: bool, place: int, draft: str) -> str:
        """Return the token to commit: the choice of plain decoding, unless the fault changes it."""
        best = next(iter(p))
        if drafted and self._accepts_anyway(p, position, draft, best):
            return draft
        if self.temperature == 0:
            return best
        if self.fault == "greedy_sampling" and place % 2:
            return best
        draw = random.Random(f"{self.seed} {position} {self.salt}")
        if self.fault == "drop_residual" and drafted and draw.random() < p.get(draft, 0.0):
            return draft
        return draw.choices(list(p), list(p.values()))[0]

    def _accepts_anyway(self, p: dict[str, float], position: int, draft: str, best: str) -> bool:
        if self.fault == "no_schema" and self.body.get("response_format"):
            return position % 5 == 3
        near = p.get(draft, 0.0) > p[best] / math.e
        return (
            self.fault == "always_accept"
            or (self.fault == "accepts_runner_up" and near)
            or (self.fault == "one_percent" and random.Random(f"{self.digest} {position}").random() < 0.01)
            or (self.fault == "late" and position >= 100)
            or (self.fault == "late_sampling" and self.temperature > 0 and position >= 8)
            or (self.fault == "long_prompt" and len(self.prompt) > 5000)
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    endpoint: FakeEndpoint
    seen: list[str]

    def _respond(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        self.seen.append(self.headers.get("Authorization") or "")
        status, data = self.endpoint(self.command, self.path.removeprefix("/v1"), body)
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = _respond

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def listening(endpoint: FakeEndpoint) -> Iterator[tuple[str, list[str]]]:
    """Serve an endpoint on a free local port. Yield the API's address, and the Authorization headers so far."""
    handler = type("Handler", (_Handler,), {"endpoint": endpoint, "seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", handler.seen  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
