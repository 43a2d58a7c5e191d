"""The application: routes, authentication, the web page. Needs the extra "serve"."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.security import HTTPBearer
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

import paceline
from paceline.server import errors
from paceline.server.api import Api
from paceline.server.apis import embeddings, rerank, tokens
from paceline.server.apis.about_models import ModelRoutes, OllamaModels, refuse_change
from paceline.server.apis.messages import CountTokensRequest
from paceline.server.apis.stored import ResponseRoutes
from paceline.server.description import content, describe, errors_of
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
    """Return the application, for any ASGI server. It starts and stops the models' workers itself. `apis`: APIs for
    generated text, in addition to the server's own."""
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
    app.state.apis = service.apis
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
    bearer = Depends(HTTPBearer(auto_error=False))  # only for the OpenAPI document

    async def authorise(request: Request) -> None:  # if it were not async, each request would need a thread
        check_host(service.settings.hosts, request.headers.get("host", ""))
        check_key(service.settings.api_keys, authorization(request.headers))

    router = APIRouter(dependencies=[Depends(authorise), bearer])
    for api in service.apis:
        _add_generation(router, service, api)
    _add_ollama(router, service)
    _add_responses(router, ResponseRoutes(service.responses, service.document))
    _add_tokens(router, service)
    _add_prompts(router, service)
    models = ModelRoutes(service)
    _add_get(router, "/v1/models", models.models, "ModelListing")
    _add_get(router, "/v1/models/{name:path}", models.model, "ServedModel")
    _add_get(router, "/props", models.properties, "Properties")
    _add_get(router, "/slots", models.slots, "Slots")
    _add_get(router, "/tokenizer_info", models.tokenizer_info, "TokenizerInfo")

    @router.get("/metrics", response_class=Response, responses=errors_of("/metrics"))
    async def metrics() -> Response:
        """Return metrics in Prometheus' text format."""
        return Response(service.loader.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/openapi.json", include_in_schema=False)
    async def description() -> JSONResponse:
        return JSONResponse(describe(app))

    return router


def _add_generation(router: APIRouter, service: Service, api: Api[Any]) -> None:
    async def generate(request: Request) -> Response:
        return await service.generate(request, api)

    generate.__name__, generate.__doc__ = type(api).__name__, api.about
    _add_post(router, api.path, generate, api.body.__name__, stream=api.media_type)


def _add_health(app: FastAPI, service: Service) -> None:
    answers: dict[int | str, dict[str, Any]] = {
        200: {"content": content("Health")},
        503: {"description": "The server is stopping.", "content": content("Health")},
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


def _add_ollama(router: APIRouter, service: Service) -> None:
    models = OllamaModels(service)
    _add_post(router, "/api/show", models.show, "NamedModelRequest", "OllamaModelAbout")
    _add_post(router, "/api/pull", models.pull, "PullRequest", stream="application/x-ndjson")
    _add_get(router, "/api/version", models.version, "OllamaVersion")
    _add_get(router, "/api/tags", models.tags, "OllamaModelList")
    _add_get(router, "/api/ps", models.ps, "OllamaModelList")
    for path in ("create", "copy", "push", "delete"):
        router.add_api_route(f"/api/{path}", refuse_change, methods=["POST", "DELETE"], include_in_schema=False)


def _add_responses(router: APIRouter, responses: ResponseRoutes) -> None:
    path = "/v1/responses/{response_id}"
    _add_get(router, path, responses.response)
    deleted: dict[int | str, dict[str, Any]] = {200: {"content": content("DeletedResponse")}, **errors_of("/v1")}
    router.add_api_route(path, responses.delete_response, methods=["DELETE"], response_model=None, responses=deleted)
    _add_get(router, f"{path}/input_items", responses.input_items)


def _add_work(
    router: APIRouter,
    serve: Callable[[Request, type[Any], Callable[..., Any]], Awaitable[Response]],
    path: str,
    kind: type[Any],
    work: Callable[..., Any],
    answer: str,
) -> None:
    """Add a route that has the name and docstring of its work. `serve` answers a request with a body of this kind."""

    async def respond(request: Request) -> Response:
        return await serve(request, kind, work)

    respond.__name__, respond.__doc__ = work.__name__, work.__doc__
    _add_post(router, path, respond, kind.__name__, answer)


def _add_tokens(router: APIRouter, service: Service) -> None:
    """Add routes for requests that generate nothing."""
    add = partial(_add_work, router, service.compute_from)
    add("/tokenize", tokens.TokenizeRequest, tokens.tokenize, "Tokens")
    add("/apply-template", tokens.ApplyTemplateRequest, tokens.apply_template, "RenderedPrompt")
    add("/detokenize", tokens.DetokenizeRequest, tokens.detokenize, "DecodedText")
    add("/v1/messages/count_tokens", CountTokensRequest, tokens.count_tokens, "TokenCount")


def _add_prompts(router: APIRouter, service: Service) -> None:
    """Add routes for requests whose prompts are read, without a reply."""
    add = partial(_add_work, router, service.read_prompts)
    add("/v1/embeddings", embeddings.EmbeddingsRequest, embeddings.embeddings, "Embeddings")
    add("/api/embed", embeddings.OllamaEmbedRequest, embeddings.ollama_embed, "OllamaEmbeddings")
    older = embeddings.OllamaPromptEmbedRequest
    add("/api/embeddings", older, embeddings.ollama_embed_prompt, "OllamaPromptEmbedding")
    for path in ("/v1/rerank", "/rerank"):
        add(path, rerank.RerankRequest, rerank.rerank, "Ranking")


def _add_get(router: APIRouter, path: str, handler: Callable[..., Awaitable[Any]], answer: str = "") -> None:
    """Add a route for GET, and for HEAD, which clients use to probe. `answer`: the model of the answer."""
    described: dict[int | str, dict[str, Any]] = {200: {"content": content(answer)}} if answer else {}
    router.add_api_route(path, handler, response_model=None, responses={**errors_of(path), **described})
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
    answers = content(answer) if answer else {"application/json": {"schema": {"type": "object"}}}
    if stream:
        answers[stream] = {"schema": {"type": "string"}}
    router.add_api_route(
        path,
        handler,
        methods=["POST"],
        responses={**errors_of(path), 200: {"description": "The answer.", "content": answers}},
        openapi_extra={"requestBody": {"required": True, "content": content(body)}},
    )


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
