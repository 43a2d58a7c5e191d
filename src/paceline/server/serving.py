"""The service behind the routes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from paceline.errors import TimedOut
from paceline.server import (
    chat,
    chat_completions,
    compaction,
    completions,
    embeddings,
    infilling,
    messages,
    ollama,
    options,
    properties,
    rerank,
    responses,
    schema,
    schema_completions,
    schema_tokens,
)
from paceline.server.answers import EventStream, GeneratedAnswer, RunningRequest
from paceline.server.bodies import BodyReader
from paceline.server.embeddings import EmbeddingJobs
from paceline.server.errors import LOG, REQUEST_ID, bad_request, retry_later
from paceline.server.items import listed
from paceline.server.limits import RequestLimit, Settings
from paceline.server.models import LoadedModel, Models
from paceline.server.ollama_models import OllamaModels
from paceline.server.preprocessing import LONG, PoolName, Preprocessor, client_of
from paceline.server.rerank import RerankJobs
from paceline.server.schema_embeddings import EmbeddingsRequest, OllamaEmbedRequest, OllamaPromptEmbedRequest
from paceline.server.schema_messages import CountTokensRequest, MessagesRequest
from paceline.server.schema_ollama import (
    NamedModelRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    PullRequest,
)
from paceline.server.schema_rerank import RerankRequest
from paceline.server.schema_responses import CompactRequest, ResponsesRequest
from paceline.server.stored import ResponseStore
from paceline.server.tracing import Tracer, tracer
from paceline.server.waiting import after, left, unless_disconnected
from paceline.server.writers import PreparedRequest, dumps, dumps_long
from paceline.text.template_text import TemplateText

T = TypeVar("T")
Prepared = TypeVar("Prepared", PreparedRequest, EmbeddingJobs, RerankJobs)
Body = TypeVar("Body", bound=schema.Generating)
Prepare = Callable[[LoadedModel, Settings, Body], PreparedRequest]


class Service:
    """State shared by all routes."""

    def __init__(self, models: Models, settings: Settings) -> None:
        self.loader, self.settings = models, settings
        self._started = int(time.time())
        self.tracer: Tracer = tracer(settings.trace_endpoint)
        self.limit = RequestLimit(settings.max_requests)
        # Half of all requests at most, so that models that are loaded go on answering.
        self.waiting = RequestLimit(max(1, settings.max_requests // 2), "already wait for a model to be loaded")
        self.preprocessor = Preprocessor()
        self.responses = ResponseStore()
        self.ollama = OllamaModels(models)
        self.bodies = BodyReader(self.preprocessor, settings.max_body, settings.max_bodies)

    def close(self) -> None:
        """Drop requests that are being prepared, and send the last traces."""
        self.preprocessor.close()
        self.tracer.close()

    async def chat_completions(self, request: Request) -> Response:
        """Generate the next message of a chat."""
        return await self._generate(request, schema.ChatRequest, chat_completions.prepare, "chatcmpl-")

    async def completions(self, request: Request) -> Response:
        """Continue a text."""
        return await self._generate(request, schema_completions.CompletionRequest, completions.prepare, "cmpl-")

    async def create_response(self, request: Request) -> Response:
        """Generate the next items of a conversation."""
        prepare = partial(responses.prepare, self.responses)
        return await self._generate(request, ResponsesRequest, prepare, "resp_")

    async def compact_response(self, request: Request) -> Response:
        """Summarise a conversation in an item with which it goes on."""
        prepare = partial(compaction.prepare, self.responses)
        return await self._generate(request, CompactRequest, prepare, "resp_")

    async def response(self, request: Request, response_id: str) -> Response:
        """Return a stored response."""
        document = self.responses.get(response_id).document
        return await self._document(request, lambda: document)

    async def delete_response(self, response_id: str) -> dict[str, Any]:
        """Forget a stored response."""
        self.responses.delete(response_id)
        return {"id": response_id, "object": "response.deleted", "deleted": True}

    async def input_items(self, request: Request, response_id: str) -> Response:
        """List the items of a stored response's request, the latest first."""
        items = self.responses.get(response_id).input

        def listing() -> bytes:
            ids = [f"{response_id}_{i}" for i in range(len(items))][::-1]
            ends = {"first_id": ids[0], "last_id": ids[-1]} if ids else {"first_id": None, "last_id": None}
            data = ({"id": name, **listed(item)} for name, item in zip(ids, reversed(items), strict=True))
            return dumps_long({"object": "list", "has_more": False, **ends}, "data", data)

        return await self._document(request, listing)

    async def messages(self, request: Request) -> Response:
        """Generate the next message of a chat (Anthropic's API)."""
        return await self._generate(request, MessagesRequest, messages.prepare, "msg_")

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a prompt (Anthropic's API)."""
        async with self.bodies.read(request, CountTokensRequest) as (body, _):
            work = partial(messages.count_tokens, settings=self.settings, body=body)
            return await self._compute(request, body.model, work)

    async def ollama_chat(self, request: Request) -> Response:
        """Generate the next message of a chat (Ollama's API)."""
        return await self._generate(request, OllamaChatRequest, ollama.prepare_chat, "")

    async def ollama_generate(self, request: Request) -> Response:
        """Answer or continue one prompt (Ollama's API)."""
        return await self._generate(request, OllamaGenerateRequest, ollama.prepare_text, "")

    async def ollama_show(self, request: Request) -> Response:
        """Describe a model (Ollama's API)."""
        async with self.bodies.read(request, NamedModelRequest) as (body, _):
            work = self.ollama.show(body.named)
            self.limit.acquire()
            try:
                return await self._document(request, work)
            finally:
                self.limit.release()

    async def ollama_tags(self, request: Request) -> Response:
        """List the models (Ollama's API)."""
        return await self._document(request, self.ollama.tags())

    async def ollama_ps(self, request: Request) -> Response:
        """List the models that are in memory (Ollama's API)."""
        return await self._document(request, self.ollama.ps())

    async def ollama_pull(self, request: Request) -> Response:
        """Fetch a model (Ollama's API)."""
        async with self.bodies.read(request, PullRequest) as (body, _):
            self.ollama.check_pull(body)
            return await self.ollama.pull(body)

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or a chat."""
        async with self.bodies.read(request, schema_tokens.TokenizeRequest) as (body, _):

            def work(model: LoadedModel) -> bytes:
                llm = model.llm
                if body.messages is None:
                    text, special = body.text
                    text = TemplateText(text) if body.parse_special is False else text
                    tokens = llm.tokenizer.encode(text, special=special)
                else:
                    text = chat.chat_text(llm, body, body.tools)
                    text = TemplateText.written(text) if body.parse_special else text
                    tokens = options.token_ids(llm, text, "messages", chat=True)
                pieces = ({"id": token, "piece": model.token_texts.text(token)} for token in tokens)
                about = {"count": len(tokens), "max_model_len": llm.model.target.context_length}
                return dumps_long(about, "tokens", pieces if body.with_pieces else tokens)

            return await self._compute(request, body.model, work)

    async def tokenizer_info(self, request: Request) -> Response:
        """Describe a model's tokenizer as vLLM does, by which lm-eval's `remote` backend begins."""
        name = request.query_params.get("model") or self.loader.names[0]

        def work(model: LoadedModel) -> dict[str, Any]:
            words, context = model.llm.tokenizer, model.llm.model.target.context_length
            about = {"tokenizer_class": words.kind, "model_max_length": context, "vocab_size": words.vocab_size}
            return {**about, **words.special_tokens, "chat_template": words.chat_template}

        return await self._compute(request, name, work)

    async def properties(self, request: Request) -> Response:
        """Describe a model and its default sampling (llama.cpp's API)."""
        name = request.query_params.get("model")
        return await self._compute(request, name, partial(properties.properties, source=self.loader.source(name)))

    async def slots(self, request: Request) -> Response:
        """List the slots of a loaded model; 503 if `fail_on_no_slot` is set and all are busy (llama.cpp's API)."""
        found = properties.slots(self.loader.get(request.query_params.get("model")))
        if request.query_params.get("fail_on_no_slot") and found and all(slot["is_processing"] for slot in found):
            raise retry_later(503, "no slot available", "no_slot")
        return Response(dumps(found), media_type="application/json")

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, under vLLM's name and llama.cpp's."""
        async with self.bodies.read(request, schema_tokens.DetokenizeRequest) as (body, _):

            def work(model: LoadedModel) -> dict[str, Any]:
                size = model.llm.model.target.vocab_size
                for i, token in enumerate(body.tokens):
                    if token >= size:
                        raise bad_request(f"token ids must be < {size}, got {token}", f"tokens.{i}")
                text = model.llm.tokenizer.decode(body.tokens, False)
                return {"prompt": text, "content": text}

            return await self._compute(request, body.model, work)

    async def apply_template(self, request: Request) -> Response:
        """Return a chat's prompt as text."""
        async with self.bodies.read(request, schema_tokens.ApplyTemplateRequest) as (body, _):

            def work(model: LoadedModel) -> dict[str, Any]:
                return {"prompt": chat.chat_text(model.llm, body, body.tools)}

            return await self._compute(request, body.model, work)

    async def embeddings(self, request: Request) -> Response:
        """Return a vector for each text."""
        return await self._embed(request, EmbeddingsRequest, embeddings.openai)

    async def ollama_embed(self, request: Request) -> Response:
        """Return a vector for each text (Ollama's API)."""
        return await self._embed(request, OllamaEmbedRequest, embeddings.ollama)

    async def ollama_embed_prompt(self, request: Request) -> Response:
        """Return a vector for one text (Ollama's older API)."""
        return await self._embed(request, OllamaPromptEmbedRequest, embeddings.ollama_prompt)

    async def rerank(self, request: Request) -> Response:
        """Judge how well documents fit a query, with a model that was trained for it."""
        async with self.bodies.read(request, RerankRequest) as (body, pool):
            work = partial(rerank.prepare, settings=self.settings, body=body)
            deadline = after(time.monotonic(), self.settings.timeout)
            running, done = await self._start(request, body, pool, work, "", deadline)
        return await self._read_prompts(request, running, partial(done.answer, running.model.name), deadline)

    async def _embed(
        self,
        request: Request,
        kind: type[EmbeddingsRequest] | type[OllamaEmbedRequest] | type[OllamaPromptEmbedRequest],
        shape: Callable[[str, EmbeddingJobs, float], dict[str, Any]],
    ) -> Response:
        began = time.monotonic()
        deadline = after(began, self.settings.timeout)
        async with self.bodies.read(request, kind) as (given, pool):
            body = given.as_embed() if isinstance(given, OllamaPromptEmbedRequest) else given
            work = partial(embeddings.prepare, settings=self.settings, body=body)
            running, done = await self._start(request, body, pool, work, "", deadline)
        del given, body, work  # the body, which may be large, no longer counts

        def answer() -> dict[str, Any]:
            return shape(running.model.name, done, time.monotonic() - began)

        return await self._read_prompts(request, running, answer, deadline)

    async def _read_prompts(
        self, request: Request, running: RunningRequest, answer: Callable[[], dict[str, Any]], deadline: float | None
    ) -> Response:
        """Answer with what `answer` returns once all prompts have been read."""
        try:
            await unless_disconnected(running.finish(), request.receive)
            data = await self._preprocess(request, "tokens", lambda: dumps(answer()), left(deadline))
        finally:
            running.close()
        return Response(data, media_type="application/json")

    async def infill(self, request: Request) -> Response:
        """Fill the gap between two texts (llama.cpp's API)."""
        return await self._generate(request, schema_tokens.InfillRequest, infilling.prepare, "")

    async def models(self, request: Request) -> dict[str, Any]:
        """List every model under each of its names, and its adapters. Clients of OpenAI and of Anthropic read it, and
        those of llama.cpp its `models`.

        To Codex, which sends its version, `models` would bring instructions and tools of their own, in place of
        Codex's: for it the list is empty.
        """
        data = [await self.model(name) for name in self.loader.names]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        names = [] if "client_version" in request.query_params else self.loader.names
        models = [{"name": name, "model": name} for name in names]
        return {"object": "list", "data": data, "models": models, **ends, "has_more": False}

    async def model(self, name: str) -> dict[str, Any]:
        """Describe the model under one of its names; a model that is not loaded in few words."""
        about: dict[str, Any] = {"loaded": False}
        if model := self.loader.get(name):
            policies, sampling = model.llm.engine.policies, model.llm.sampling()
            default = policies[model.worker.default_for(self.loader.adapter(name)).drafter]
            defaults = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            about = {
                "loaded": True,
                "drafters": [policy.name for policy in policies],
                "default": default.name if default else None,
                "guarantee": model.llm.guarantee,
                "context_length": model.llm.model.target.context_length,
                "sampling": {name: getattr(sampling, name) for name in defaults},
            }
        openai = {"object": "model", "created": self._started, "owned_by": "paceline"}
        created = datetime.fromtimestamp(self._started, timezone.utc).isoformat()
        anthropic = {"type": "model", "display_name": name, "created_at": created, "lifecycle": "active"}
        base = {"parent": self.loader.source(name).names[0]} if self.loader.adapter(name) else {}  # as in vLLM
        return {"id": name, **openai, **anthropic, **base, "paceline": about}

    async def _take(self, request: Request, name: str | None, timeout: float | None) -> LoadedModel:
        """Return a model, loaded first unless it is, with one user more: `release` must follow.

        Raises `ApiError` 404, and 429 if too many wait, `ClientDisconnect` and `TimedOut`, and what loading raises.
        """
        while (model := self.loader.take(name)) is None:
            self.waiting.acquire()
            try:
                await self._unless_ended(request, self.loader.ready(name), timeout)
            finally:
                self.waiting.release()
        return model

    async def _compute(self, request: Request, name: str | None, work: Callable[[LoadedModel], Any]) -> Response:
        """Answer with what `work` returns, for requests that generate nothing."""
        self.limit.acquire()
        try:
            model = await self._take(request, name, self.settings.timeout)
            try:
                return await self._document(request, partial(work, model))
            finally:
                model.release()
        finally:
            self.limit.release()

    async def _document(self, request: Request, work: Callable[[], Any]) -> Response:
        """Answer with what `work` returns: JSON, or what is to be JSON."""

        def made() -> bytes:
            found = work()
            return found if isinstance(found, bytes) else dumps(found)

        data = await self._preprocess(request, "tokens", made, self.settings.timeout)
        return Response(data, media_type="application/json")

    async def _preprocess(self, request: Request, pool: PoolName, work: Callable[[], T], timeout: float | None) -> T:
        """Run `work` in a thread. Raises as `_unless_ended`."""
        return await self._unless_ended(request, self.preprocessor.run(pool, client_of(request), work), timeout)

    async def _unless_ended(self, request: Request, work: Coroutine[Any, Any, T], timeout: float | None) -> T:
        """Return what `work` returns. Ends it and raises `ClientDisconnect` when the client leaves, `TimedOut` after
        `timeout` seconds."""
        try:
            return await unless_disconnected(asyncio.wait_for(work, timeout), request.receive)
        except asyncio.TimeoutError:  # another class until Python 3.11
            raise TimedOut("the request timed out before its reply began", "Increase timeout") from None

    async def _generate(self, request: Request, kind: type[Body], prepare: Prepare[Body], id_prefix: str) -> Response:
        answer, stream = await self._begin(request, kind, prepare, id_prefix)
        if isinstance(answer, dict):
            return Response(dumps(answer), media_type="application/json")
        if stream:
            return EventStream(answer, self.settings.stall)
        try:
            document = await unless_disconnected(answer.document(), request.receive)
        finally:
            answer.close()
        return Response(dumps(document), media_type="application/json")

    async def _begin(
        self, request: Request, kind: type[Body], prepare: Prepare[Body], id_prefix: str
    ) -> tuple[GeneratedAnswer | dict[str, Any], bool]:
        """Start the replies. Returns the answer, and whether it is to be streamed; without replies the whole answer.

        The body, which may be large, is released when this returns, and not when the replies end.
        """
        arrived = time.monotonic()
        async with self.bodies.read(request, kind) as (body, pool):
            deadline = after(arrived, self.settings.timeout if body.timeout is None else body.timeout)
            unloads = isinstance(body, OllamaRequest) and body.unloads
            if isinstance(body, OllamaRequest) and unloads and body.empty:
                self.loader.unload(body.model)
                return ollama.unloaded(body), False

            def work(model: LoadedModel) -> PreparedRequest:
                return prepare(model, self.settings, body)

            running, prepared = await self._start(request, body, self._pool(body, pool), work, id_prefix, deadline)
            if unloads:
                self.loader.unload(body.model)
            try:
                writer = prepared.writer(running.id)
                return GeneratedAnswer(running, writer, self.settings.heartbeat), bool(body.stream)
            except BaseException:
                running.close()
                raise

    def _pool(self, body: schema.Generating, pool: PoolName) -> PoolName:
        """Return the pool for a request. `pool`: for one with a body of its size, without what is stored."""
        if body.constrained:
            return "grammar"
        continues = isinstance(body, ResponsesRequest) and self.responses.length(body.previous_response_id) > LONG
        return "long" if continues else pool

    async def _start(
        self,
        request: Request,
        body: schema.Generating | EmbeddingsRequest | OllamaEmbedRequest | RerankRequest,
        pool: PoolName,
        prepare: Callable[[LoadedModel], Prepared],
        id_prefix: str,
        deadline: float | None,
    ) -> tuple[RunningRequest, Prepared]:
        """Start the replies to a request: `close` must follow. Raises what its preparation raises."""
        if self.settings.log_prompts:
            LOG.info("%s %s", REQUEST_ID.get(), body.model_dump_json(exclude_none=True))
        self.limit.acquire()
        try:
            model = await self._take(request, body.model, left(deadline))
        except BaseException:
            self.limit.release()
            raise
        trace = self.tracer.for_request(request.headers, model.name)
        running = RunningRequest(id_prefix + uuid.uuid4().hex, model, self.limit, trace)
        try:
            prepared = await self._preprocess(request, pool, partial(prepare, model), left(deadline))
            more: dict[str, Any] = {"client": client_of(request), "timeout": left(deadline), "adapter": model.adapter}
            running.start([replace(job, **more) for job in prepared.jobs])
        except BaseException:
            running.close()
            raise
        return running, prepared
