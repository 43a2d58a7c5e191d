"""The application: routes, authentication, the web page. Needs the extra "serve"."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.security import HTTPBearer
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

import paceline
from paceline.server import errors
from paceline.server.api import Api
from paceline.server.apis import reading, tokens
from paceline.server.apis.about_models import (
    ModelRoutes,
    NamedModelRequest,
    OllamaModels,
    PullRequest,
    SlotRequest,
    SlotRoutes,
    refuse_change,
)
from paceline.server.apis.messages import CountTokensRequest
from paceline.server.apis.stored import ResponseRoutes
from paceline.server.description import (
    DecodedText,
    DeletedResponse,
    Health,
    ModelListing,
    OllamaModelAbout,
    OllamaModelList,
    OllamaVersion,
    Properties,
    RenderedPrompt,
    Routes,
    ServedModel,
    SlotAction,
    Slots,
    TokenCount,
    TokenizerInfo,
    Tokens,
    content,
    describe,
    errors_of,
)
from paceline.server.limits import RequestLog, Settings, authorization, check_host, check_key
from paceline.server.models import Models
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


def create_app(models: Models, settings: Settings, apis: Sequence[Api[Any]] = ()) -> FastAPI:
    """Return the application, for any ASGI server. Its lifespan starts and stops the models' workers.

    Args:
        models: The models.
        settings: The configuration.
        apis: APIs for generated text, in addition to the server's own.
    """
    service = Service(models, settings, apis)

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
    routes = _api(service, app)
    app.state.models = [*routes.models, Health]
    app.include_router(routes)
    _add_health(app, service)
    add_page(app, PAGE)
    errors.install(app)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # OpenAI's clients send a dozen headers of their own
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestLog)
    return app


def _api(service: Service, app: FastAPI) -> Routes:
    """The routes that require authentication."""
    bearer = Depends(HTTPBearer(auto_error=False))  # only for the OpenAPI document

    async def authorise(request: Request) -> None:  # async, because FastAPI runs other dependencies in a thread
        check_host(service.settings.hosts, request.headers.get("host", ""))
        check_key(service.settings.api_keys, authorization(request.headers))

    routes = Routes(dependencies=[Depends(authorise), bearer])
    for api in service.apis:
        _add_generation(routes, service, api)
    _add_ollama(routes, service)
    _add_responses(routes, ResponseRoutes(service.responses, service.document))
    _add_tokens(routes, service)
    _add_prompts(routes, service)
    models = ModelRoutes(service)
    routes.add_get("/v1/models", models.models, ModelListing)
    routes.add_get("/v1/models/{name:path}", models.model, ServedModel)
    routes.add_get("/props", models.properties, Properties)
    slots = SlotRoutes(service)
    routes.add_get("/slots", slots.slots, Slots)
    routes.add_post("/slots/{slot}", slots.act, SlotRequest, SlotAction)
    routes.add_get("/tokenizer_info", models.tokenizer_info, TokenizerInfo)

    @routes.get("/metrics", response_class=Response, responses=errors_of("/metrics"))
    async def metrics() -> Response:
        """Return metrics in Prometheus' text format."""
        return Response(service.loader.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/openapi.json", include_in_schema=False)
    async def description() -> JSONResponse:
        return JSONResponse(describe(app))

    return routes


def _add_generation(routes: Routes, service: Service, api: Api[Any]) -> None:
    async def generate(request: Request) -> Response:
        return await service.generate(request, api)

    generate.__name__, generate.__doc__ = type(api).__name__, api.about
    routes.add_post(api.path, generate, api.body, stream=api.media_type)


def _add_health(app: FastAPI, service: Service) -> None:
    answers: dict[int | str, dict[str, Any]] = {
        200: {"content": content(Health)},
        503: {"description": "The server is stopping.", "content": content(Health)},
    }

    @app.get("/health", responses=answers)
    async def health() -> JSONResponse:
        """Report the state of the server. The status is 503 if it does not answer requests."""
        load, status = service.loader.load, "ok"
        if not service.loader.alive:
            status = "stopping"
        elif service.loader.failing:
            status = "failing"
        content = {"status": status, "running": load.running, "waiting": load.waiting}
        return JSONResponse(content, 200 if status == "ok" else 503)


def _add_ollama(routes: Routes, service: Service) -> None:
    models = OllamaModels(service)
    routes.add_post("/api/show", models.show, NamedModelRequest, OllamaModelAbout)
    routes.add_post("/api/pull", models.pull, PullRequest, stream="application/x-ndjson")
    routes.add_get("/api/version", models.version, OllamaVersion)
    routes.add_get("/api/tags", models.tags, OllamaModelList)
    routes.add_get("/api/ps", models.ps, OllamaModelList)
    for path in ("create", "copy", "push", "delete"):
        routes.add_api_route(f"/api/{path}", refuse_change, methods=["POST", "DELETE"], include_in_schema=False)


def _add_responses(routes: Routes, responses: ResponseRoutes) -> None:
    path = "/v1/responses/{response_id}"
    routes.add_get(path, responses.response)
    routes.add_delete(path, responses.delete_response, DeletedResponse)
    routes.add_get(f"{path}/input_items", responses.input_items)


def _add_tokens(routes: Routes, service: Service) -> None:
    """Add routes that answer without running the language model."""
    add = partial(routes.add_work, service.compute_from)
    add("/tokenize", tokens.TokenizeRequest, tokens.tokenize, Tokens)
    add("/apply-template", tokens.ApplyTemplateRequest, tokens.apply_template, RenderedPrompt)
    add("/detokenize", tokens.DetokenizeRequest, tokens.detokenize, DecodedText)
    add("/v1/messages/count_tokens", CountTokensRequest, tokens.count_tokens, TokenCount)


def _add_prompts(routes: Routes, service: Service) -> None:
    """Add routes that run prompts through the model but generate no text: embeddings and reranking."""
    add = partial(routes.add_work, service.read_prompts)
    add("/v1/embeddings", reading.EmbeddingsRequest, reading.embeddings, reading.Embeddings)
    add("/api/embed", reading.OllamaEmbedRequest, reading.ollama_embed, reading.OllamaEmbeddings)
    older = reading.OllamaPromptEmbedRequest
    add("/api/embeddings", older, reading.ollama_embed_prompt, reading.OllamaPromptEmbedding)
    for path in ("/v1/rerank", "/rerank"):
        add(path, reading.RerankRequest, reading.rerank, reading.Ranking)


def add_page(app: FastAPI, folder: Path) -> None:
    """Add a route for each file of a web page, with `index.html` at /. Each file is read once, here. The
    Content-Security-Policy keeps the page from loading anything from other origins."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            name = file.relative_to(folder).as_posix()
            path = "/" if name == "index.html" else f"/{name}"
            app.add_route(path, _file_endpoint(file), methods=["GET", "HEAD"], include_in_schema=False)


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
