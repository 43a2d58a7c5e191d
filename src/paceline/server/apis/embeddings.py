"""/v1/embeddings, /api/embed and /api/embeddings: vectors of texts.

A vector is the mean of the model's last hidden states, with length 1.
"""

from __future__ import annotations

import base64
import math
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from paceline.engine.prompt_logprobs import PooledStates
from paceline.llm import LLM
from paceline.models.decoder import Decoder
from paceline.sampling.sampler import not_finite
from paceline.server.compat import Ignored, Naming, PlainAnswer, Strict, accepts, ignored
from paceline.server.errors import bad_request
from paceline.server.fields import ModelName, Text, TokenIds
from paceline.server.limits import Settings
from paceline.server.models import LoadedModel
from paceline.server.prepare import check_length, prompt_limit, reading_job, token_ids
from paceline.server.preprocessing import after
from paceline.server.serving import Service
from paceline.server.worker import ReplyJob, ServerStopping

_MOST_TEXTS = 128
"""Texts of one request; more may not fit into the queue."""

Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
Dimensions = Annotated[int, Field(ge=1, lt=2**20, description="Numbers of each vector that are kept.")]


class EmbeddingsRequest(Strict):
    """Body of /v1/embeddings."""

    model: ModelName | None = None
    input: Text | TokenIds | Texts | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    user: Ignored = None


@accepts(ignored("options keep_alive", "the model is loaded already"))
class OllamaEmbedRequest(Naming):
    """Body of /api/embed."""

    model: ModelName | None = None
    input: Text | Texts
    truncate: Annotated[bool, Field(description="Cut texts that are too long. True unless said otherwise.")] | None = (
        None
    )
    dimensions: Dimensions | None = None


@accepts(ignored("options keep_alive", "the model is loaded already"))
class OllamaPromptEmbedRequest(Naming):
    """Body of /api/embeddings, the older form of /api/embed, for one text."""

    model: ModelName | None = None
    prompt: Text

    def as_embed(self) -> OllamaEmbedRequest:
        """Return the same in the newer form."""
        return OllamaEmbedRequest(model=self.model, input=self.prompt)


class Embedding(PlainAnswer):
    """One vector of length 1, as numbers or as little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(PlainAnswer):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(PlainAnswer):
    """Body of the answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class OllamaPromptEmbedding(PlainAnswer):
    """Body of the answer of /api/embeddings."""

    embedding: list[float]


class OllamaEmbeddings(PlainAnswer):
    """Body of the answer of /api/embed. Durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


@dataclass(frozen=True, slots=True)
class EmbeddingJobs:
    """A job for each text, and what collects its states. `size`: numbers of each vector; None: all. `packed`: they are
    sent in base64."""

    jobs: Sequence[ReplyJob]
    states: Sequence[PooledStates]
    size: int | None
    packed: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(job.prompt_tokens for job in self.jobs)

    def vectors(self) -> list[list[float]]:
        """Return the vectors, once all jobs are over.

        Raises:
            ServerStopping: If the server stopped before.
            NonFiniteLogits: If a vector is not finite.
            ApiError: 400 if there are fewer dimensions than requested.
        """
        for job, states in zip(self.jobs, self.states, strict=True):
            if states.count < job.prompt_tokens:
                raise ServerStopping
        found = [states.vector(self.size) for states in self.states]
        for job, vector in zip(self.jobs, found, strict=True):
            if not math.isfinite(sum(vector)):
                raise not_finite(job.prompt_tokens)
        _check_size(self.size, len(found[0]))
        return found


def prepare(model: LoadedModel, settings: Settings, body: EmbeddingsRequest | OllamaEmbedRequest) -> EmbeddingJobs:
    """Return the jobs of a request. Raises `ApiError` 400."""
    llm = model.llm
    if isinstance(llm.model.target, Decoder):  # others show the size of their states when these are there
        _check_size(body.dimensions, llm.model.target.config.hidden)
    cut = isinstance(body, OllamaEmbedRequest) and body.truncate is not False
    texts = [body.input] if isinstance(body.input, str) or isinstance(body.input[0], int) else body.input
    if len(texts) > _MOST_TEXTS:
        raise bad_request(f"input must have at most {_MOST_TEXTS} texts, got {len(texts)}", "input")
    sampling = llm.sampling(max_new_tokens=0).seeded()
    jobs, states = [], []
    for i, text in enumerate(texts):
        param = "input" if text is body.input else f"input.{i}"
        tokens = _tokens(llm, settings, text, param, cut)
        states.append(PooledStates())
        jobs.append(reading_job(tokens, sampling, states[-1]))
    packed = isinstance(body, EmbeddingsRequest) and body.encoding_format == "base64"
    return EmbeddingJobs(jobs, states, body.dimensions, packed)


def _prepared(
    model: LoadedModel, _: str, *, settings: Settings, body: EmbeddingsRequest | OllamaEmbedRequest
) -> tuple[EmbeddingJobs, EmbeddingJobs]:
    jobs = prepare(model, settings, body)
    return jobs, jobs


def _check_size(size: int | None, most: int) -> None:
    if size and size > most:
        raise bad_request(f"dimensions must be <= {most}, the model's, got {size}", "dimensions")


def _tokens(llm: LLM, settings: Settings, text: Any, param: str, cut: bool) -> list[int]:
    limit = prompt_limit(llm, settings)
    if cut and llm.tokenizer.max_token_chars is not None:
        text = text[: limit * llm.tokenizer.max_token_chars]
    if not cut:
        check_length(llm, settings, text, param)
    tokens = token_ids(llm, text, param)[: limit if cut else None]
    check_length(llm, settings, tokens, param)
    return tokens


def openai(name: str, done: EmbeddingJobs, _: float) -> dict[str, Any]:
    """Return the answer in OpenAI's shape."""
    shown = _packed if done.packed else list
    data = [{"object": "embedding", "index": i, "embedding": shown(x)} for i, x in enumerate(done.vectors())]
    usage = {"prompt_tokens": done.num_tokens, "total_tokens": done.num_tokens}
    return {"object": "list", "data": data, "model": name, "usage": usage}


def ollama(name: str, done: EmbeddingJobs, seconds: float) -> dict[str, Any]:
    """Return the answer in Ollama's shape. `seconds`: what the request took."""
    times = {"total_duration": int(1e9 * seconds), "load_duration": 0, "prompt_eval_count": done.num_tokens}
    return {"model": name, "embeddings": done.vectors(), **times}


def ollama_prompt(_: str, done: EmbeddingJobs, __: float) -> dict[str, Any]:
    """Return the answer for one text in Ollama's older shape."""
    return {"embedding": done.vectors()[0]}


def _packed(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


class EmbeddingRoutes:
    """Vectors of texts, in the shapes of OpenAI's API and of Ollama's."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def embeddings(self, request: Request) -> Response:
        """Return a vector for each text."""
        return await self._embed(request, EmbeddingsRequest, openai)

    async def ollama_embed(self, request: Request) -> Response:
        """Return a vector for each text (Ollama's API)."""
        return await self._embed(request, OllamaEmbedRequest, ollama)

    async def ollama_embed_prompt(self, request: Request) -> Response:
        """Return a vector for one text (Ollama's older API)."""
        return await self._embed(request, OllamaPromptEmbedRequest, ollama_prompt)

    async def _embed(
        self,
        request: Request,
        kind: type[EmbeddingsRequest] | type[OllamaEmbedRequest] | type[OllamaPromptEmbedRequest],
        shape: Callable[[str, EmbeddingJobs, float], dict[str, Any]],
    ) -> Response:
        began = time.monotonic()
        deadline = after(began, self._service.settings.timeout)
        async with self._service.bodies.read(request, kind) as (given, pool):
            body = given.as_embed() if isinstance(given, OllamaPromptEmbedRequest) else given
            work = partial(_prepared, settings=self._service.settings, body=body)
            running, done = await self._service.start(request, body, pool, work, deadline)
        del given, body, work  # the body, which may be large, no longer counts

        def answer() -> dict[str, Any]:
            return shape(running.model.name, done, time.monotonic() - began)

        return await self._service.read_prompts(request, running, answer, deadline)
