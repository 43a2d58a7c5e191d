"""/v1/embeddings, /api/embed and /api/embeddings: vectors of texts.

A vector is the mean of the model's last hidden states, with length 1.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.engine.prompt_logprobs import PooledStates
from paceline.llm import LLM
from paceline.models.decoder import Decoder
from paceline.server.compat import Ignored, OllamaObject, PlainAnswer, accepts, ignored
from paceline.server.errors import bad_request
from paceline.server.limits import Settings
from paceline.server.models import LoadedModel
from paceline.server.prepare import check_length, check_reading, prompt_limit, reading_job, token_ids
from paceline.server.schema import NamedBody, Text, TokenIds
from paceline.server.worker import ReplyJob

_MOST_TEXTS = 128
"""Texts of one request; more may not fit into the queue."""

Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
Dimensions = Annotated[int, Field(ge=1, lt=2**20, description="Numbers of each vector that are kept.")]


class EmbeddingsRequest(NamedBody):
    """Body of /v1/embeddings."""

    input: Text | TokenIds | Texts | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    user: Ignored = None


@accepts(ignored("options keep_alive", "the model is loaded already"))
class OllamaEmbedRequest(OllamaObject, NamedBody, extra="ignore"):
    """Body of /api/embed."""

    input: Text | Texts
    truncate: Annotated[bool, Field(description="Cut texts that are too long. True unless said otherwise.")] | None = (
        None
    )
    dimensions: Dimensions | None = None


@accepts(ignored("options keep_alive", "the model is loaded already"))
class OllamaPromptEmbedRequest(OllamaObject, NamedBody, extra="ignore"):
    """Body of /api/embeddings, the older form of /api/embed, for one text."""

    prompt: Text


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
    """A job for each text, and the reader of its states.

    Attributes:
        jobs: The jobs.
        states: The reader of each job.
        size: Numbers of each vector. None for all.
        shape: Writes the answer from the model's name, these jobs and the seconds that they took.
    """

    jobs: Sequence[ReplyJob]
    states: Sequence[PooledStates]
    size: int | None
    shape: Shape

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(job.prompt_tokens for job in self.jobs)

    def answer(self, model: str, seconds: float) -> dict[str, Any]:
        """Return the answer, once all jobs are over. Raises as `vectors`."""
        return self.shape(model, self, seconds)

    def vectors(self) -> list[list[float]]:
        """Return the vectors. Raises as `check_reading`, and `ApiError` 400 for too many dimensions."""
        found = []
        for job, states in zip(self.jobs, self.states, strict=True):
            vector = states.vector(self.size) if states.count else []
            check_reading(job, states.count, sum(vector))
            found.append(vector)
        _check_size(self.size, len(found[0]))
        return found


Shape = Callable[[str, EmbeddingJobs, float], dict[str, Any]]


def embeddings(model: LoadedModel, settings: Settings, body: EmbeddingsRequest) -> EmbeddingJobs:
    """Compute a vector for each text."""
    shape = partial(openai, packed=body.encoding_format == "base64")
    return _prepare(model, settings, body.input, body.dimensions, False, shape)


def ollama_embed(model: LoadedModel, settings: Settings, body: OllamaEmbedRequest) -> EmbeddingJobs:
    """Compute a vector for each text (Ollama's API)."""
    return _prepare(model, settings, body.input, body.dimensions, body.truncate is not False, ollama)


def ollama_embed_prompt(model: LoadedModel, settings: Settings, body: OllamaPromptEmbedRequest) -> EmbeddingJobs:
    """Compute a vector for one text (Ollama's older API)."""
    return _prepare(model, settings, body.prompt, None, True, ollama_prompt)


def _prepare(
    model: LoadedModel, settings: Settings, given: Any, size: int | None, cut: bool, shape: Shape
) -> EmbeddingJobs:
    """Return the jobs of a request. `cut`: shorten texts that are too long. Raises `ApiError` 400."""
    llm = model.llm
    if isinstance(llm.model.target, Decoder):  # others show the size of their states when these are there
        _check_size(size, llm.model.target.config.hidden)
    texts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if len(texts) > _MOST_TEXTS:
        raise bad_request(f"input must have at most {_MOST_TEXTS} texts, got {len(texts)}", "input")
    sampling = llm.sampling(max_new_tokens=0).seeded()
    jobs, states = [], []
    for i, text in enumerate(texts):
        param = "input" if text is given else f"input.{i}"
        tokens = _tokens(llm, settings, text, param, cut)
        states.append(PooledStates())
        jobs.append(reading_job(tokens, sampling, states[-1]))
    return EmbeddingJobs(jobs, states, size, shape)


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


def openai(name: str, done: EmbeddingJobs, _: float, packed: bool) -> dict[str, Any]:
    """Return the answer in OpenAI's shape. `packed`: write vectors in base64."""
    shown = _packed if packed else list
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
