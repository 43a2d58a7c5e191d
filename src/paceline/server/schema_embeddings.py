"""Bodies of /v1/embeddings, /api/embed and /api/embeddings, and of their answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.server.compat import Ignored, Naming, Strict, accepts, ignored
from paceline.server.schema import ModelName, Text, TokenIds
from paceline.server.schema_answers import PlainAnswer

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
