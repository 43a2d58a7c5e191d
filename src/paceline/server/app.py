"""The application: routes, authentication, error handlers. Needs the extra "serve"."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.security import HTTPBearer
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

import paceline
from paceline.llm import LLM
from paceline.server import errors, openapi
from paceline.server.limits import RequestLog, Settings, check_host, check_key
from paceline.server.pages import add_page
from paceline.server.serving import Service
from paceline.server.worker import Worker

PAGE = Path(__file__).parent / "page"


def create_app(worker: Worker, llm: LLM, settings: Settings) -> FastAPI:
    """Return the application for uvicorn. The caller starts and stops the worker."""
    service = Service(worker, llm, settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
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
    openapi.install(app)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
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
        check_key(service.settings.api_keys, request.headers.get("authorization", ""))

    router = APIRouter(dependencies=[Depends(authorise), bearer], responses=openapi.ERRORS)
    openapi.add_post(router, "/v1/chat/completions", service.chat_completions, "ChatRequest", stream=True)
    openapi.add_post(router, "/v1/completions", service.completions, "CompletionRequest", stream=True)
    openapi.add_post(router, "/tokenize", service.tokenize, "TokenizeRequest")
    openapi.add_post(router, "/detokenize", service.detokenize, "DetokenizeRequest")
    router.add_api_route("/v1/models", service.models)
    router.add_api_route("/v1/models/{name:path}", service.model)

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Return metrics in Prometheus' text format."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/openapi.json", include_in_schema=False)
    async def description() -> JSONResponse:
        return JSONResponse(app.openapi())

    return router


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        """Report whether the server accepts requests; 503 if it does not."""
        load, alive = service.worker.load, service.worker.alive
        status = {"status": "ok" if alive else "stopping", "running": load.running, "waiting": load.waiting}
        return JSONResponse(status, 200 if alive else 503)
