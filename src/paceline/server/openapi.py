"""/openapi.json. Bodies are read by `bodies.read`, which is stricter than FastAPI's own reader, so their models are
described here."""

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


class Failure(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's shape of an error."""

    error: Failure


_MEANINGS = {
    400: "The body is malformed, or a parameter unknown or out of range; `param` names it.",
    401: "The API key is missing or wrong.",
    403: "Not addressed as this server may be.",
    404: "No such model or path.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many wait already; Retry-After says when to ask again.",
    500: "The request failed for a reason of the server's.",
    503: "The server is stopping, or out of memory.",
    504: "The reply took longer than `timeout`.",
}
FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": meaning} for status, meaning in _MEANINGS.items()
}


Handler = Callable[[Request], Awaitable[Response]]


def post(router: APIRouter) -> Callable[..., Callable[[Handler], Handler]]:
    """`router.post` for a path whose body is the named model, `stream`: and whose reply may be events."""

    def route(path: str, body: str, stream: bool = False) -> Callable[[Handler], Handler]:
        described = {"application/json": {"schema": {"$ref": _REF.format(model=body)}}}
        answers: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if stream:
            answers["text/event-stream"] = {"schema": {"type": "string"}}
        return router.post(
            path,
            responses={200: {"description": "The answer.", "content": answers}},
            openapi_extra={"requestBody": {"required": True, "content": described}},
        )

    return route


def install(app: FastAPI) -> None:
    """Describe the API with the bodies' models."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, bodies = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REF)
            made["components"]["schemas"] |= bodies["$defs"]
            # FastAPI's own refusal, which never comes: nothing but bodies can be malformed.
            for path in made["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]
