"""The OpenAPI document: bodies, answers and errors of every route."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from paceline.server import embeddings, errors, ollama_models, rerank, schema_answers, tokens
from paceline.server.messages import CountTokensRequest
from paceline.server.schema_answers import AnthropicErrorBody, ErrorBody, OllamaErrorBody

_REF = "#/components/schemas/{model}"
_BODIES = (
    *(CountTokensRequest, ollama_models.NamedModelRequest, ollama_models.PullRequest),
    *(tokens.TokenizeRequest, tokens.DetokenizeRequest, tokens.ApplyTemplateRequest),
    rerank.RerankRequest,
    *(embeddings.EmbeddingsRequest, embeddings.OllamaEmbedRequest, embeddings.OllamaPromptEmbedRequest),
)
"""Bodies of requests that generate no text."""
ANSWERS: tuple[type[BaseModel], ...] = (
    *(schema_answers.Tokens, schema_answers.DecodedText, schema_answers.RenderedPrompt, schema_answers.TokenCount),
    *(schema_answers.ModelListing, schema_answers.ServedModel, schema_answers.DeletedResponse, schema_answers.Health),
    *(
        schema_answers.TokenizerInfo,
        schema_answers.Properties,
        schema_answers.Slots,
        schema_answers.OllamaVersion,
        schema_answers.OllamaModelList,
    ),
    *(schema_answers.OllamaModelAbout, ErrorBody, AnthropicErrorBody, OllamaErrorBody),
    rerank.Ranking,
    *(embeddings.Embeddings, embeddings.OllamaEmbeddings, embeddings.OllamaPromptEmbedding),
)
"""Bodies of answers."""
_MEANINGS = {
    400: "The body is malformed, or the parameter in `param` is unknown or out of range.",
    401: "The API key is missing or wrong.",
    403: "The Host header is not allowed.",
    404: "No such model or path.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "The server is full. Retry-After gives the seconds to wait.",
    500: "Internal error.",
    503: "The server is stopping, or out of memory.",
    504: "The request took longer than `timeout`.",
}


def errors_of(path: str) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of the API that `path` belongs to."""
    shape = {"messages": AnthropicErrorBody, "api": OllamaErrorBody}.get(errors.dialect(path), ErrorBody)
    return {
        status: {"description": meaning, "content": content(shape.__name__)} for status, meaning in _MEANINGS.items()
    }


def content(model: str) -> dict[str, Any]:
    """Describe a JSON body. FastAPI would build a validator from a class in each of some 300 places; a name is free."""
    return {"application/json": {"schema": {"$ref": _REF.format(model=model)}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document. FastAPI does not know the models of bodies that `BodyReader` reads: `app.state.apis`
    has those of requests for text."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        models = [(body, "validation") for body in (*(api.body for api in app.state.apis), *_BODIES, *ANSWERS)]
        _, schemas = models_json_schema(models, ref_template=_REF)  # type: ignore[arg-type]
        document["components"]["schemas"] |= schemas["$defs"]
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # FastAPI's own, which this server never sends
        app.openapi_schema = document
    return app.openapi_schema
