"""/openapi.json. FastAPI does not know the models of the bodies, because the stricter `BodyReader` reads them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from paceline.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_BODIES: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
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
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": meaning} for status, meaning in _MEANINGS.items()
}


def add_post(
    router: APIRouter, path: str, handler: Callable[[Request], Awaitable[Response]], body: str, stream: bool = False
) -> None:
    """Add a route for bodies of a named model. `stream`: the response may be a stream of events."""
    answers: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if stream:
        answers["text/event-stream"] = {"schema": {"type": "string"}}
    content = {"application/json": {"schema": {"$ref": _REF.format(model=body)}}}
    router.add_api_route(
        path,
        handler,
        methods=["POST"],
        responses={200: {"description": "The answer.", "content": answers}},
        openapi_extra={"requestBody": {"required": True, "content": content}},
    )


def install(app: FastAPI) -> None:
    """Replace FastAPI's document by one with the models of the bodies."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, bodies = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REF)
            document["components"]["schemas"] |= bodies["$defs"]
            for path in document["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)  # FastAPI's own, which this server never sends
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]
