"""The server's routes. Needs the extra "serve"."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.security import HTTPBearer
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

import paceline
from paceline.llm import LLM
from paceline.server import errors, openapi
from paceline.server.limits import Logged, Settings, check_host, check_key
from paceline.server.metrics import MEDIA_TYPE
from paceline.server.pages import add_page
from paceline.server.serving import Service
from paceline.server.tokens import detokenize, list_models, model_entry, tokenize
from paceline.server.worker import Worker

PAGE = Path(__file__).parent / "page"


def create_app(worker: Worker, llm: LLM, settings: Settings) -> FastAPI:
    """The application for uvicorn. The worker is started and stopped by whoever made it."""
    service = Service(worker, llm, settings)
    app = FastAPI(
        title="Paceline",
        version=paceline.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        openapi_url=None,
        lifespan=_closing(service),
    )
    app.include_router(_guarded(service, app))
    _add_open_routes(app, service)
    add_page(app, PAGE)
    errors.install(app)
    openapi.install(app)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # as many as are asked for: OpenAI's clients send a dozen of their own
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(Logged)
    return app


def _closing(service: Service) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    return lifespan


def _guarded(service: Service, app: FastAPI) -> APIRouter:
    """What not everybody may ask for."""
    bearer = Depends(HTTPBearer(auto_error=False))

    async def authorised(request: Request) -> None:  # not async, it would take a thread for each request
        check_host(service.settings.hosts, request.headers.get("host", ""))
        check_key(service.settings.api_keys, request.headers.get("authorization", ""))

    router = APIRouter(dependencies=[Depends(authorised), bearer], responses=openapi.FAILURES)
    post = openapi.post(router)

    @post("/v1/chat/completions", "ChatRequest", stream=True)
    async def chat_completions(request: Request) -> Response:
        """Reply to a chat."""
        return await service.chat(request)

    @post("/v1/completions", "CompletionRequest", stream=True)
    async def completions(request: Request) -> Response:
        """Continue a text."""
        return await service.complete(request)

    @post("/tokenize", "TokenizeRequest")
    async def to_tokens(request: Request) -> Response:
        """The token ids of a text or a chat."""
        return await tokenize(service, request)

    @post("/detokenize", "DetokenizeRequest")
    async def to_text(request: Request) -> Response:
        """The text of token ids."""
        return await detokenize(service, request)

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """What is served."""
        return list_models(service)

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model of those that are served."""
        return model_entry(service, name)

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Counters in Prometheus' text format."""
        return Response(service.metrics.text(), media_type=MEDIA_TYPE)

    @router.get("/openapi.json", include_in_schema=False)
    async def description() -> JSONResponse:
        return JSONResponse(app.openapi())

    return router


def _add_open_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> JSONResponse:
        """Whether replies are being written here."""
        load = service.worker.load
        status = "ok" if service.worker.alive else "stopping"
        told = {"status": status, "running": load.running, "waiting": load.waiting}
        return JSONResponse(told, 200 if service.worker.alive else 503)
