"""Bodies of /v1/rerank and of its answer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from paceline.server.compat import Ignored, Lenient, Strict
from paceline.server.schema import ModelName, Text
from paceline.server.schema_answers import PlainAnswer
from paceline.server.schema_embeddings import EmbeddingUsage

MOST_DOCUMENTS = 128
"""Documents of one request; more may not fit into the queue."""


class RerankDocument(Lenient):
    """A document that is an object."""

    text: Text


class RerankRequest(Strict):
    """Body of /v1/rerank."""

    model: ModelName | None = None
    query: Text
    documents: Annotated[list[Text | RerankDocument], Field(min_length=1, max_length=MOST_DOCUMENTS, fail_fast=True)]
    top_n: Annotated[int | None, Field(ge=1, description="Results to return; all unless set.")] = None
    return_documents: bool | None = None
    instruction: Annotated[Text | None, Field(description="What the query asks for, for the model.")] = None
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
