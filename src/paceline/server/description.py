"""The OpenAPI document: bodies, answers and errors of every route. Also the response schemas."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, RootModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from paceline.server import errors
from paceline.server.compat import PlainAnswer

Handler = Callable[..., Awaitable[Any]]


class Health(PlainAnswer):
    """State of the server. It is "failing" after several internal errors in a row."""

    status: Literal["ok", "stopping", "failing"]
    running: int
    waiting: int


class TokenPiece(PlainAnswer):
    """A token with its text."""

    id: int
    piece: str


class Tokens(PlainAnswer):
    """Token ids of a text."""

    tokens: list[int] | list[TokenPiece]
    count: int
    max_model_len: int


class DecodedText(PlainAnswer):
    """Text of token ids, under vLLM's name and llama.cpp's."""

    prompt: str
    content: str


class TokenizerInfo(BaseModel):
    """A tokenizer, with its special tokens by their roles."""

    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    chat_template: str | None


class GenerationSettings(PlainAnswer):
    """Default parameters of a model, under llama.cpp's names, and its context length."""

    params: dict[str, Any]
    n_ctx: int


class Modalities(PlainAnswer):
    """Inputs of a model other than text."""

    vision: bool
    audio: bool


class Properties(PlainAnswer):
    """A model and its default parameters, as llama.cpp's server describes them."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities
    endpoint_slots: bool
    endpoint_props: bool
    endpoint_metrics: bool
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str


class Slot(PlainAnswer):
    """A place for a running reply."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class Slots(RootModel[list[Slot]]):
    """The slots of a model. Empty if it is not loaded."""


class SlotAction(PlainAnswer):
    """The result of an action on a slot. It counts the tokens and bytes of all texts in the folder."""

    id_slot: int
    filename: str | None = None
    n_saved: int | None = None
    n_written: int | None = None
    n_restored: int | None = None
    n_read: int | None = None
    n_erased: int | None = None
    timings: dict[str, float] | None = None


class RenderedPrompt(PlainAnswer):
    """A chat's prompt."""

    prompt: str


class TokenCount(PlainAnswer):
    """Tokens of a prompt."""

    input_tokens: int


class ServedModel(PlainAnswer):
    """A model, for OpenAI's and Anthropic's clients.

    `parent` is the model of an adapter. `paceline` has the key `loaded`, and for a loaded model its drafters, context
    length and sampling.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    parent: str | None = None
    paceline: dict[str, Any]


class ModelName(PlainAnswer):
    """A model as llama.cpp's clients read it."""

    name: str
    model: str


class ModelListing(PlainAnswer):
    """All models."""

    object: Literal["list"]
    data: list[ServedModel]
    models: list[ModelName]
    first_id: str | None
    last_id: str | None
    has_more: bool


class OllamaVersion(PlainAnswer):
    """The version of Ollama whose API this is."""

    version: str


class OllamaDetails(PlainAnswer):
    """Facts about a model's files."""

    parent_model: str
    format: Literal["gguf", "safetensors"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(PlainAnswer):
    """A model as Ollama lists it. Only models in memory have `size_vram`, `context_length` and `expires_at`."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    size_vram: int | None = None
    context_length: int | None = None
    expires_at: str | None = None


class OllamaModelList(PlainAnswer):
    """All models, or only the models in memory."""

    models: list[OllamaModel]


class OllamaModelAbout(PlainAnswer):
    """A description of a model and of its capabilities."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str


class DeletedResponse(PlainAnswer):
    """A response that has been forgotten."""

    id: str
    object: Literal["response.deleted"]
    deleted: bool


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
    """Anthropic's error, with OpenAI's parameter and code. `details` tell the client how to go on without a feature."""

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


_ERRORS = (ErrorBody, AnthropicErrorBody, OllamaErrorBody)
_REF = "#/components/schemas/{model}"
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


class Routes(APIRouter):
    """Router that collects the pydantic classes of its request bodies and answers, for the OpenAPI document.

    Attributes:
        models: The classes of all routes. The dict serves as an ordered set.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.models: dict[type[BaseModel], None] = dict.fromkeys(_ERRORS)

    def add_get(self, path: str, handler: Handler, answer: type[BaseModel] | None = None) -> None:
        """Add a route for GET, and for HEAD, which clients use to probe."""
        self.add_api_route(path, handler, response_model=None, responses=self._answers(path, answer))
        self.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)

    def add_delete(self, path: str, handler: Handler, answer: type[BaseModel]) -> None:
        """Add a route for DELETE."""
        described = self._answers(path, answer)
        self.add_api_route(path, handler, methods=["DELETE"], response_model=None, responses=described)

    def add_post(
        self,
        path: str,
        handler: Handler,
        body: type[BaseModel],
        answer: type[BaseModel] | None = None,
        stream: str = "",
    ) -> None:
        """Add a route for POST.

        Args:
            path: The path.
            handler: Answers a request.
            body: The pydantic class of the bodies.
            answer: The pydantic class of the answers. None for any object.
            stream: Media type of streamed answers. "" if there are none.
        """
        self.models[body] = None
        answers = {"application/json": {"schema": {"type": "object"}}}
        described = self._answers(path, answer)
        described[200] = {"description": "The answer.", "content": answers} | described.get(200, {})
        if stream:
            described[200]["content"] |= {stream: {"schema": {"type": "string"}}}
        extra = {"requestBody": {"required": True, "content": content(body)}}
        self.add_api_route(path, handler, methods=["POST"], responses=described, openapi_extra=extra)

    def add_work(
        self,
        serve: Callable[[Request, type[Any], Callable[..., Any]], Awaitable[Response]],
        path: str,
        body: type[BaseModel],
        work: Callable[..., Any],
        answer: type[BaseModel],
    ) -> None:
        """Add a route for POST that answers with `serve(request, body, work)`. The OpenAPI document describes the route
        by the name and docstring of `work`."""

        async def respond(request: Request) -> Response:
            return await serve(request, body, work)

        respond.__name__, respond.__doc__ = work.__name__, work.__doc__
        self.add_post(path, respond, body, answer)

    def _answers(self, path: str, answer: type[BaseModel] | None) -> dict[int | str, dict[str, Any]]:
        if answer is None:
            return errors_of(path)
        self.models[answer] = None
        return {**errors_of(path), 200: {"content": content(answer)}}


def errors_of(path: str) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of the API that `path` belongs to."""
    shapes: dict[str, type[BaseModel]] = {"messages": AnthropicErrorBody, "api": OllamaErrorBody}
    shape = shapes.get(errors.dialect(path), ErrorBody)
    return {status: {"description": meaning, "content": content(shape)} for status, meaning in _MEANINGS.items()}


def content(model: type[BaseModel]) -> dict[str, Any]:
    """Describe a JSON body by a reference to its schema. If FastAPI got the classes, it would build some 300
    validators."""
    return {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document. This adds the schemas of `app.state.models`, which FastAPI does not know."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        models = [(model, "validation") for model in app.state.models]
        _, schemas = models_json_schema(models, ref_template=_REF)  # type: ignore[arg-type]
        document["components"]["schemas"] |= schemas["$defs"]
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # added by FastAPI, but never sent by this server
        app.openapi_schema = document
    return app.openapi_schema
