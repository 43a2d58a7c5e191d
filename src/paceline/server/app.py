"""The application: routes, authentication, the web page, the API's description. Needs the extra "serve"."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.security import HTTPBearer
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

import paceline
from paceline.server import (
    errors,
    schema,
    schema_answers,
    schema_completions,
    schema_embeddings,
    schema_messages,
    schema_ollama,
    schema_rerank,
    schema_responses,
    schema_tokens,
)
from paceline.server.limits import RequestLog, Settings, authorization, check_host, check_key
from paceline.server.models import Models
from paceline.server.ollama_models import refuse_change
from paceline.server.serving import Service

PAGE = Path(__file__).parent / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_TYPES = {
    "": "text/plain",  # licences
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
_BODIES = (
    *(schema.ChatRequest, schema_completions.CompletionRequest),
    *(schema_responses.ResponsesRequest, schema_responses.CompactRequest),
    *(schema_messages.MessagesRequest, schema_messages.CountTokensRequest),
    *(schema_ollama.OllamaChatRequest, schema_ollama.OllamaGenerateRequest),
    *(schema_ollama.NamedModelRequest, schema_ollama.PullRequest),
    *(schema_tokens.TokenizeRequest, schema_tokens.DetokenizeRequest),
    *(schema_tokens.ApplyTemplateRequest, schema_tokens.InfillRequest),
    *(schema_embeddings.EmbeddingsRequest, schema_embeddings.OllamaEmbedRequest),
    schema_embeddings.OllamaPromptEmbedRequest,
    schema_rerank.RerankRequest,
)
_REF = "#/components/schemas/{model}"


class ErrorDetail(BaseModel):
    """OpenAI's error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of an error response."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """Anthropic's error, with OpenAI's parameter and code. `details`: by which its client goes on without a feature."""

    type: str
    message: str
    param: str | None
    code: str | None
    details: dict[str, Any] | None = None


class AnthropicErrorBody(BaseModel):
    """Body of an error response of Anthropic's endpoints."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class OllamaErrorBody(BaseModel):
    """Body of an error response of Ollama's endpoints."""

    error: str


_ANSWERS = (
    *(schema_answers.Tokens, schema_answers.DecodedText, schema_answers.RenderedPrompt, schema_answers.TokenCount),
    *(schema_answers.ModelListing, schema_answers.ServedModel, schema_answers.DeletedResponse, schema_answers.Health),
    *(
        schema_answers.TokenizerInfo,
        schema_answers.Properties,
        schema_answers.Slots,
        schema_answers.OllamaVersion,
        schema_answers.OllamaModelList,
        schema_answers.OllamaModelAbout,
    ),
    *(schema_embeddings.Embeddings, schema_embeddings.OllamaEmbeddings, schema_embeddings.OllamaPromptEmbedding),
    schema_rerank.Ranking,
    *(ErrorBody, AnthropicErrorBody, OllamaErrorBody),
)
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


def _errors(path: str) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of the API that `path` belongs to."""
    shape = {"messages": AnthropicErrorBody, "api": OllamaErrorBody}.get(errors.dialect(path), ErrorBody)
    return {
        status: {"description": meaning, "content": _content(shape.__name__)} for status, meaning in _MEANINGS.items()
    }


def _content(model: str) -> dict[str, Any]:
    """Describe a JSON body. FastAPI would build a validator from a class in each of some 300 places; a name is free."""
    return {"application/json": {"schema": {"$ref": _REF.format(model=model)}}}


def create_app(models: Models, settings: Settings) -> FastAPI:
    """Return the application, for any ASGI server. It starts and stops the models' workers itself."""
    service = Service(models, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        models.start()
        try:
            yield
        finally:
            await models.stop(0.0)
            service.close()

    app = FastAPI(
        title="Paceline",
        version=paceline.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        openapi_url=None,
        lifespan=lifespan,
    )
    app.include_router(_api(service, app))
    _add_health(app, service)
    add_page(app, PAGE)
    errors.install(app)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # OpenAI's clients send a dozen of their own
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestLog)
    return app


def _api(service: Service, app: FastAPI) -> APIRouter:
    """The routes that require authentication."""
    bearer = Depends(HTTPBearer(auto_error=False))  # for the OpenAPI document alone

    async def authorise(request: Request) -> None:  # if it were not async, each request would need a thread
        check_host(service.settings.hosts, request.headers.get("host", ""))
        check_key(service.settings.api_keys, authorization(request.headers))

    router = APIRouter(dependencies=[Depends(authorise), bearer])
    _add_post(router, "/v1/chat/completions", service.chat_completions, "ChatRequest", stream="text/event-stream")
    _add_post(router, "/v1/completions", service.completions, "CompletionRequest", stream="text/event-stream")
    _add_post(router, "/v1/responses", service.create_response, "ResponsesRequest", stream="text/event-stream")
    _add_post(router, "/v1/responses/compact", service.compact_response, "CompactRequest")
    _add_post(router, "/v1/messages", service.messages, "MessagesRequest", stream="text/event-stream")
    _add_post(router, "/v1/messages/count_tokens", service.count_tokens, "CountTokensRequest", "TokenCount")
    _add_ollama(router, service)
    _add_post(router, "/v1/embeddings", service.embeddings, "EmbeddingsRequest", "Embeddings")
    for path in ("/v1/rerank", "/rerank"):
        _add_post(router, path, service.rerank, "RerankRequest", "Ranking")
    _add_post(router, "/tokenize", service.tokenize, "TokenizeRequest", "Tokens")
    _add_get(router, "/tokenizer_info", service.tokenizer_info, "TokenizerInfo")
    _add_get(router, "/props", service.properties, "Properties")
    _add_get(router, "/slots", service.slots, "Slots")
    _add_post(router, "/apply-template", service.apply_template, "ApplyTemplateRequest", "RenderedPrompt")
    _add_post(router, "/infill", service.infill, "InfillRequest", stream="text/event-stream")
    _add_post(router, "/detokenize", service.detokenize, "DetokenizeRequest", "DecodedText")
    _add_get(router, "/v1/responses/{response_id}", service.response)
    deleted: dict[int | str, dict[str, Any]] = {200: {"content": _content("DeletedResponse")}, **_errors("/v1")}
    router.add_api_route(
        "/v1/responses/{response_id}",
        service.delete_response,
        methods=["DELETE"],
        response_model=None,
        responses=deleted,
    )
    _add_get(router, "/v1/responses/{response_id}/input_items", service.input_items)
    _add_get(router, "/v1/models", service.models, "ModelListing")
    _add_get(router, "/v1/models/{name:path}", service.model, "ServedModel")

    @router.get("/metrics", response_class=Response, responses=_errors("/metrics"))
    async def metrics() -> Response:
        """Return metrics in Prometheus' text format."""
        return Response(service.loader.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/openapi.json", include_in_schema=False)
    async def description() -> JSONResponse:
        return JSONResponse(describe(app))

    return router


def _add_health(app: FastAPI, service: Service) -> None:
    answers: dict[int | str, dict[str, Any]] = {
        200: {"content": _content("Health")},
        503: {"description": "The server is stopping.", "content": _content("Health")},
    }

    @app.get("/health", responses=answers)
    async def health() -> JSONResponse:
        """Report whether the server accepts requests and answers them; 503 if it does not."""
        load, status = service.loader.load, "ok"
        if not service.loader.alive:
            status = "stopping"
        elif service.loader.failing:
            status = "failing"
        content = {"status": status, "running": load.running, "waiting": load.waiting}
        return JSONResponse(content, 200 if status == "ok" else 503)


def _add_ollama(router: APIRouter, service: Service) -> None:
    _add_post(router, "/api/chat", service.ollama_chat, "OllamaChatRequest", stream="application/x-ndjson")
    _add_post(router, "/api/generate", service.ollama_generate, "OllamaGenerateRequest", stream="application/x-ndjson")
    _add_post(router, "/api/show", service.ollama_show, "NamedModelRequest", "OllamaModelAbout")
    _add_post(router, "/api/pull", service.ollama_pull, "PullRequest", stream="application/x-ndjson")
    _add_post(router, "/api/embed", service.ollama_embed, "OllamaEmbedRequest", "OllamaEmbeddings")
    older = ("OllamaPromptEmbedRequest", "OllamaPromptEmbedding")
    _add_post(router, "/api/embeddings", service.ollama_embed_prompt, *older)
    _add_get(router, "/api/version", service.ollama.version, "OllamaVersion")
    _add_get(router, "/api/tags", service.ollama_tags, "OllamaModelList")
    _add_get(router, "/api/ps", service.ollama_ps, "OllamaModelList")
    for path in ("create", "copy", "push", "delete"):
        router.add_api_route(f"/api/{path}", refuse_change, methods=["POST", "DELETE"], include_in_schema=False)


def _add_get(router: APIRouter, path: str, handler: Callable[..., Awaitable[Any]], answer: str = "") -> None:
    """Add a route for GET, and for HEAD, by which clients probe. `answer`: the model of its body."""
    described: dict[int | str, dict[str, Any]] = {200: {"content": _content(answer)}} if answer else {}
    router.add_api_route(path, handler, response_model=None, responses={**_errors(path), **described})
    router.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)


def _add_post(
    router: APIRouter,
    path: str,
    handler: Callable[[Request], Awaitable[Response]],
    body: str,
    answer: str = "",
    stream: str = "",
) -> None:
    """Add a route for bodies of a named model. `answer`: the model of its own body. `stream`: media type of a response
    that is a stream."""
    answers = _content(answer) if answer else {"application/json": {"schema": {"type": "object"}}}
    if stream:
        answers[stream] = {"schema": {"type": "string"}}
    router.add_api_route(
        path,
        handler,
        methods=["POST"],
        responses={**_errors(path), 200: {"description": "The answer.", "content": answers}},
        openapi_extra={"requestBody": {"required": True, "content": _content(body)}},
    )


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document. FastAPI does not know the models of bodies that `BodyReader` reads."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, bodies = models_json_schema([(body, "validation") for body in (*_BODIES, *_ANSWERS)], ref_template=_REF)
        document["components"]["schemas"] |= bodies["$defs"]
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # FastAPI's own, which this server never sends
        app.openapi_schema = document
    return app.openapi_schema


def add_page(app: FastAPI, folder: Path) -> None:
    """Add a route for each file of a web page, `index.html` at /. They are read once, and may load nothing from other
    origins."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            name = file.relative_to(folder).as_posix()
            path = "/" if name == "index.html" else f"/{name}"
            app.add_api_route(path, _file_endpoint(file), methods=["GET", "HEAD"], include_in_schema=False)


def _file_endpoint(file: Path) -> Callable[[Request], Awaitable[Response]]:
    data = file.read_bytes()
    kind = _PAGE_TYPES.get(file.suffix, "application/octet-stream")
    tag = f'"{hashlib.blake2b(data, digest_size=12).hexdigest()}"'
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "ETag": tag,
    }

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=kind, headers=headers)

    return send
