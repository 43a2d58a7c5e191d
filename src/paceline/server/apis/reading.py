"""Embeddings and reranking: requests that run prompts through the model and generate no text.

/v1/embeddings, /api/embed and /api/embeddings return embeddings. An embedding is the mean of the model's last hidden
states, normalised to length 1.

/v1/rerank ranks documents by their relevance to a query, with a model that was trained for it. Qwen3-Reranker answers
"yes" or "no" to each document; the score is the probability of "yes" among the two. The prompt follows the model card
(huggingface.co/Qwen/Qwen3-Reranker-0.6B).
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from paceline.engine.draft_policy import SPECULATION_OFF
from paceline.engine.prompt_logprobs import PooledStates
from paceline.llm import LLM
from paceline.models.decoder import Decoder
from paceline.sampling.sampler import not_finite
from paceline.server.compat import Ignored, Lenient, OllamaObject, PlainAnswer, accepts, ignored_parameters
from paceline.server.errors import bad_request
from paceline.server.limits import Settings
from paceline.server.models import LoadedModel
from paceline.server.prepare import check_length, prompt_limit, token_ids
from paceline.server.schema import NamedBody, Text, TokenIds
from paceline.server.worker import ReplyJob, ServerStopping
from paceline.text.template_text import TemplateText
from paceline.types import Forward, Want

Answer = Callable[[str, float], dict[str, Any]]
"""Takes the model's name and the seconds since the request arrived. Returns the answer once all jobs are over."""
PromptJobs = tuple[Sequence[ReplyJob], Answer]
"""The jobs that read the prompts of a request, and the function that makes its answer. The function must not refer to
the request's body, which may be large."""

_MAX_TEXTS = 128
"""Maximum number of texts or documents in a request. More might not fit into the queue."""


def _reading_job(llm: LLM, tokens: Sequence[int], reader: PooledStates | RelevanceReader) -> ReplyJob:
    """Return a job that runs a prompt through the model for a reader, and generates nothing."""
    sampling = llm.sampling(max_new_tokens=0).seeded()
    # In other jobs, the first round runs the last token of the prompt. This job has no rounds, so the last token is
    # repeated: prefill then covers the whole prompt.
    return ReplyJob(
        [*tokens, tokens[-1]], sampling, speculation=SPECULATION_OFF, scores=reader, prompt_only=True, padding=1
    )


def _check_reading(job: ReplyJob, count: int, value: float) -> None:
    """Check that a prompt was read. `count`: tokens that were read. `value`: a value computed from them.

    Raises:
        ServerStopping: If the server stopped before all tokens had been read.
        NonFiniteLogits: If the value is not finite.
    """
    if count < job.prompt_tokens:
        raise ServerStopping
    if not math.isfinite(value):
        raise not_finite(job.prompt_tokens)


def _num_tokens(jobs: Sequence[ReplyJob]) -> int:
    return sum(job.prompt_tokens for job in jobs)


def _usage(jobs: Sequence[ReplyJob]) -> dict[str, int]:
    return {"prompt_tokens": _num_tokens(jobs), "total_tokens": _num_tokens(jobs)}


# Embeddings

Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]
Dimensions = Annotated[int, Field(ge=1, lt=2**20, description="Numbers of each vector that are kept.")]


class EmbeddingsRequest(NamedBody):
    """Body of /v1/embeddings."""

    input: Text | TokenIds | Texts | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    user: Ignored = None


@accepts(ignored_parameters("options keep_alive", "the model is already loaded"))
class OllamaEmbedRequest(OllamaObject, NamedBody, extra="ignore"):
    """Body of /api/embed."""

    input: Text | Texts
    truncate: Annotated[bool, Field(description="Cut texts that are too long. True by default.")] | None = None
    dimensions: Dimensions | None = None


@accepts(ignored_parameters("options keep_alive", "the model is already loaded"))
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


def embeddings(model: LoadedModel, settings: Settings, body: EmbeddingsRequest) -> PromptJobs:
    """Compute a vector for each text."""
    jobs, vectors = _vectors(model.llm, settings, body.input, body.dimensions, cut=False)
    shown = _packed if body.encoding_format == "base64" else list

    def answer(name: str, _: float) -> dict[str, Any]:
        data = [{"object": "embedding", "index": i, "embedding": shown(x)} for i, x in enumerate(vectors())]
        return {"object": "list", "data": data, "model": name, "usage": _usage(jobs)}

    return jobs, answer


def ollama_embed(model: LoadedModel, settings: Settings, body: OllamaEmbedRequest) -> PromptJobs:
    """Compute a vector for each text (Ollama's API)."""
    jobs, vectors = _vectors(model.llm, settings, body.input, body.dimensions, cut=body.truncate is not False)

    def answer(name: str, seconds: float) -> dict[str, Any]:
        counts = {"total_duration": int(1e9 * seconds), "load_duration": 0, "prompt_eval_count": _num_tokens(jobs)}
        return {"model": name, "embeddings": vectors(), **counts}

    return jobs, answer


def ollama_embed_prompt(model: LoadedModel, settings: Settings, body: OllamaPromptEmbedRequest) -> PromptJobs:
    """Compute a vector for one text (Ollama's older API)."""
    jobs, vectors = _vectors(model.llm, settings, body.prompt, None, cut=True)
    return jobs, lambda _name, _seconds: {"embedding": vectors()[0]}


def _vectors(
    llm: LLM, settings: Settings, given: Any, size: int | None, cut: bool
) -> tuple[Sequence[ReplyJob], Callable[[], list[list[float]]]]:
    """Return the jobs that read texts, and a function that returns the vectors of the texts once the jobs are over.

    Args:
        llm: The model.
        settings: The server's settings.
        given: One text or several, each as text or token ids.
        size: Numbers of each vector. None for all.
        cut: True to shorten texts that are too long.

    Raises:
        ApiError: 400 if there are too many texts or dimensions, or a text is too long. The function raises it too, for
            models whose number of dimensions is known only then.
    """
    if isinstance(llm.model.target, Decoder):  # with other targets, the size of a state is known after the first pass
        _check_dimensions(size, llm.model.target.config.hidden)
    texts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    if len(texts) > _MAX_TEXTS:
        raise bad_request(f"input must have at most {_MAX_TEXTS} texts, got {len(texts)}", "input")
    params = ["input" if text is given else f"input.{i}" for i, text in enumerate(texts)]
    prompts = [_tokens(llm, settings, text, param, cut) for text, param in zip(texts, params, strict=True)]
    states = [PooledStates() for _ in prompts]
    jobs = [_reading_job(llm, prompt, reader) for prompt, reader in zip(prompts, states, strict=True)]

    def vectors() -> list[list[float]]:
        found = []
        for job, reader in zip(jobs, states, strict=True):
            found.append(reader.vector(size) if reader.count else [])
            _check_reading(job, reader.count, sum(found[-1]))
        _check_dimensions(size, len(found[0]))
        return found

    return jobs, vectors


def _check_dimensions(size: int | None, most: int) -> None:
    if size and size > most:
        raise bad_request(f"dimensions must be <= {most}, as many as the model has, got {size}", "dimensions")


def _tokens(llm: LLM, settings: Settings, text: Any, param: str, cut: bool) -> list[int]:
    limit = prompt_limit(llm, settings)
    if cut and llm.tokenizer.max_token_chars is not None:
        text = text[: limit * llm.tokenizer.max_token_chars]
    if not cut:
        check_length(llm, settings, text, param)
    tokens = token_ids(llm, text, param)[: limit if cut else None]
    check_length(llm, settings, tokens, param)
    return tokens


def _packed(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


# Relevance

_MARK = "reranker"
"""Text that the names of reranking models contain."""
_TOKENS = ("yes", "no", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
"""Tokens that every model of the family Qwen3-Reranker has."""
_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: '
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class RerankDocument(Lenient):
    """A document that is an object."""

    text: Text


class RerankRequest(NamedBody):
    """Body of /v1/rerank."""

    query: Text
    documents: Annotated[list[Text | RerankDocument], Field(min_length=1, max_length=_MAX_TEXTS, fail_fast=True)]
    top_n: Annotated[int | None, Field(ge=1, description="Results to return; all unless set.")] = None
    return_documents: bool | None = None
    instruction: Annotated[Text | None, Field(description="The task to tell the model.")] = None
    user: Ignored = None

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [one if isinstance(one, str) else one.text for one in self.documents]

    @model_validator(mode="after")
    def _has_texts(self) -> RerankRequest:
        if not self.query.strip():
            raise ValueError("query must not be empty")
        return self


class RankedText(PlainAnswer):
    """A document that was sent."""

    text: str


class RankedDocument(PlainAnswer):
    """A document by its index in the request, with its probability of being relevant."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(PlainAnswer):
    """Body of the answer of /v1/rerank, the most relevant first."""

    object: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


@dataclass(slots=True)
class RelevanceReader:
    """Reads the score of a document from its prompt's last row.

    Attributes:
        tokens: Tokens of "yes" and "no".
        count: Number of prompt tokens read so far.
        score: Probability of "yes" among the two.
    """

    want: ClassVar[Want] = Want("all")

    tokens: tuple[int, int]
    count: int = 0
    score: float = 0.0

    def read(self, start: int, following: Sequence[int], out: Forward) -> None:
        """See `PromptReader`."""
        if following:
            row = out.logits[0, len(following) - 1, list(self.tokens)].double()
            self.score, self.count = float(row.softmax(-1)[0]), start + len(following)


def rerank(model: LoadedModel, settings: Settings, body: RerankRequest) -> PromptJobs:
    """Order documents by how well they fit a query (Jina's and Cohere's shape)."""
    tokens = _answers(model)
    _check_size(settings, body)
    texts = body.texts
    prompts = [_prompt(model.llm, settings, body, text, f"documents.{i}") for i, text in enumerate(texts)]
    verdicts = [RelevanceReader(tokens) for _ in prompts]
    jobs = [_reading_job(model.llm, prompt, verdict) for prompt, verdict in zip(prompts, verdicts, strict=True)]
    top, shown = body.top_n, texts if body.return_documents else None

    def answer(name: str, _: float) -> dict[str, Any]:
        for job, verdict in zip(jobs, verdicts, strict=True):
            _check_reading(job, verdict.count, verdict.score)
        results = [
            {"index": i, "relevance_score": verdicts[i].score, **({"document": {"text": shown[i]}} if shown else {})}
            for i in sorted(range(len(verdicts)), key=lambda i: -verdicts[i].score)[:top]
        ]
        return {"object": "list", "model": name, "results": results, "usage": _usage(jobs)}

    return jobs, answer


def _answers(model: LoadedModel) -> tuple[int, int]:
    """Return the model's tokens of "yes" and "no". Raises `ApiError` 400 for a model that was not trained to judge."""
    words, names = model.llm.tokenizer, f"{model.name} {model.llm.model.path}".lower()
    yes, no, *others = map(words.token_id, _TOKENS)
    if _MARK not in names or yes is None or no is None or None in others:
        raise bad_request(
            f"the model {model.name!r} was not trained to judge documents. Use a model of the family Qwen3-Reranker "
            "(with 'reranker' in its name), or compare the vectors of /v1/embeddings",
            "model",
        )
    return yes, no


def _check_size(settings: Settings, body: RerankRequest) -> None:
    """Raise `ApiError` 400 if the prompts, each with the query, are larger than the limit of a body."""
    count = len(body.texts)
    size = sum(map(len, body.texts)) + count * len(body.query + (body.instruction or ""))
    if size > settings.max_body:
        raise bad_request(
            f"the query and {count} documents make prompts of {size} characters, more than {settings.max_body}. "
            "Send fewer documents in one request",
            "documents",
        )


def _prompt(llm: LLM, settings: Settings, body: RerankRequest, document: str, param: str) -> list[int]:
    """Return the token ids of the prompt for one document. The request's texts form no control tokens in it."""
    asked = f"{body.instruction or _TASK}\n<Query>: {body.query}\n<Document>: {document}"
    text = TemplateText.written(_BEFORE) + asked + TemplateText.written(_AFTER)
    check_length(llm, settings, text, param)
    tokens = token_ids(llm, text, param, chat=True)
    check_length(llm, settings, tokens, param)
    return tokens
