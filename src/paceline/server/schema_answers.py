"""Bodies of the answers that generate no text, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, RootModel


class PlainAnswer(BaseModel):
    """Body of an answer, with all its keys."""

    model_config = ConfigDict(extra="forbid")


class Health(PlainAnswer):
    """Whether the server accepts requests and answers them; "failing" after several internal errors in a row."""

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
    """What a model takes besides text."""

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
    """The slots of a model, none if it is not loaded."""


class RenderedPrompt(PlainAnswer):
    """A chat's prompt."""

    prompt: str


class TokenCount(PlainAnswer):
    """Tokens of a prompt."""

    input_tokens: int


class ServedModel(PlainAnswer):
    """A model, for OpenAI's and Anthropic's clients. `parent`: of an adapter. `paceline`: `loaded`, and then drafters,
    context and sampling."""

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
    """About a model's files."""

    parent_model: str
    format: Literal["gguf", "safetensors"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(PlainAnswer):
    """A model as Ollama lists it; `size_vram` to `expires_at`: of one in memory."""

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
    """All models, or those in memory."""

    models: list[OllamaModel]


class OllamaModelAbout(PlainAnswer):
    """What a model is and can do."""

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
