"""/v1/rerank: ranks documents by their relevance to a query, with a model that was trained for it.

Qwen3-Reranker answers "yes" or "no" to each document; the score is the probability of "yes" among the two. The prompt
follows its model card (huggingface.co/Qwen/Qwen3-Reranker-0.6B).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from paceline.llm import LLM
from paceline.server.apis.embeddings import EmbeddingUsage
from paceline.server.compat import Ignored, Lenient, PlainAnswer
from paceline.server.errors import bad_request
from paceline.server.limits import Settings
from paceline.server.models import LoadedModel
from paceline.server.prepare import check_length, check_reading, reading_job, token_ids
from paceline.server.schema import NamedBody, Text
from paceline.server.worker import ReplyJob
from paceline.text.template_text import TemplateText
from paceline.types import Forward, Want

_MARK = "reranker"
"""Part of the names of models that can judge."""
_TOKENS = ("yes", "no", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
"""Tokens of the family."""
_TASK = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: '
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
MOST_DOCUMENTS = 128
"""Documents of one request; more may not fit into the queue."""


class RerankDocument(Lenient):
    """A document that is an object."""

    text: Text


class RerankRequest(NamedBody):
    """Body of /v1/rerank."""

    query: Text
    documents: Annotated[list[Text | RerankDocument], Field(min_length=1, max_length=MOST_DOCUMENTS, fail_fast=True)]
    top_n: Annotated[int | None, Field(ge=1, description="Results to return; all unless set.")] = None
    return_documents: bool | None = None
    instruction: Annotated[Text | None, Field(description="The task that the model is told.")] = None
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
class Verdicts:
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


@dataclass(frozen=True, slots=True)
class RerankJobs:
    """A job for each document, and the reader of its score."""

    jobs: Sequence[ReplyJob]
    verdicts: Sequence[Verdicts]
    body: RerankRequest = field(repr=False)

    def answer(self, model: str, _: float) -> dict[str, Any]:
        """Return the answer in Jina's and Cohere's format, once all jobs are over. Raises as `check_reading`."""
        for job, verdict in zip(self.jobs, self.verdicts, strict=True):
            check_reading(job, verdict.count, verdict.score)
        order = sorted(range(len(self.verdicts)), key=lambda i: -self.verdicts[i].score)
        shown = self.body.texts if self.body.return_documents else None
        results = [
            {
                "index": i,
                "relevance_score": self.verdicts[i].score,
                **({"document": {"text": shown[i]}} if shown else {}),
            }
            for i in order[: self.body.top_n]
        ]
        size = sum(job.prompt_tokens for job in self.jobs)
        usage = {"prompt_tokens": size, "total_tokens": size}
        return {"object": "list", "model": model, "results": results, "usage": usage}


def rerank(model: LoadedModel, settings: Settings, body: RerankRequest) -> RerankJobs:
    """Order documents by how well they fit a query (Jina's and Cohere's shape)."""
    tokens = _answers(model)
    _check_size(settings, body)
    sampling = model.llm.sampling(max_new_tokens=0).seeded()
    jobs, verdicts = [], []
    for i, text in enumerate(body.texts):
        prompt = _prompt(model.llm, settings, body, text, f"documents.{i}")
        verdicts.append(Verdicts(tokens))
        jobs.append(reading_job(prompt, sampling, verdicts[-1]))
    return RerankJobs(jobs, verdicts, body)


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
    """Return a prompt. The request's texts form no control tokens in it."""
    asked = f"{body.instruction or _TASK}\n<Query>: {body.query}\n<Document>: {document}"
    text = TemplateText.written(_BEFORE) + asked + TemplateText.written(_AFTER)
    check_length(llm, settings, text, param)
    tokens = token_ids(llm, text, param, chat=True)
    check_length(llm, settings, tokens, param)
    return tokens
