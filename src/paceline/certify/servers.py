"""Known servers: how to recognise one, and the request field that switches its speculation off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.certify.transport import EndpointError, Transport, as_dict, as_list, as_text, parse_json


@dataclass(frozen=True, slots=True)
class KnownServer:
    """A program that serves OpenAI's API.

    Attributes:
        name: Name of the program.
        path: Path that only this program answers. It starts with // if it is relative to the host.
        field: Key that the answer has, or text that it contains. Nested keys are joined by ".".
        plain: Fields that switch speculation off for one request. Empty if that requires a restart.
        hint: Instructions for a plain endpoint if there is no such field.
    """

    name: str
    path: str
    field: str
    plain: Mapping[str, Any]
    hint: str


SERVERS = (
    KnownServer("Paceline", "/models", "owned_by=paceline", {"speculation": "off"}, ""),
    KnownServer(
        "llama.cpp", "//props", "default_generation_settings", {}, "Start a second server without --spec-type and -md"
    ),
    KnownServer("vLLM", "/models", "owned_by=vllm", {}, "Start a second server without --speculative-config"),
    KnownServer("SGLang", "//get_server_info", "tokenizer_path", {}, "Start a second server without --speculative-*"),
    KnownServer("LM Studio", "//api/v0/models", "data", {}, 'Add --body \'{"draft_model": "NAME"}\' --plain-body "{}"'),
    KnownServer("ollama", "//api/version", "version", {}, "Use a second model without a drafter as --plain-model"),
    KnownServer("mlx-lm", "/models", "id=mlx-", {}, "Start a second server without --draft-model"),
    KnownServer("transformers serve", "/models", "owned_by=transformers", {}, "Start a second server"),
    KnownServer(
        "OpenVINO model server", "//v1/config", "model_version_status", {}, "Serve a second graph without drafts"
    ),
)
"""Tried in this order. Servers that are not listed work too, with OpenAI's own fields."""


def detect(transport: Transport) -> KnownServer | None:
    """Return the program behind an endpoint, or None if it is not known."""
    answers: dict[str, Any] = {}
    for server in SERVERS:
        if server.path not in answers:
            answers[server.path] = _get(transport, server.path)
        if _has(answers[server.path], server.field):
            return server
    return None


def first_model(transport: Transport) -> str | None:
    """Return the name of the endpoint's first model, or None if it lists none."""
    listed = as_list(as_dict(_get(transport, "/models")).get("data"))
    return (as_text(as_dict(listed[0]).get("id")) or None) if listed else None


def version(transport: Transport) -> str:
    """Return the server's version if it tells one, else ""."""
    for path, keys in (("//version", ("version",)), ("//props", ("build_info",)), ("//api/version", ("version",))):
        answer = as_dict(_get(transport, path))
        for key in keys:
            if text := as_text(answer.get(key)):
                return text[:100]
    return ""


def _get(transport: Transport, path: str) -> Any:
    try:
        status, data = transport("GET", path)
        return parse_json(data) if status == 200 else None
    except EndpointError:
        return None


def _has(answer: Any, field: str) -> bool:
    key, _, value = field.partition("=")
    if value:
        models = [as_dict(one) for one in as_list(as_dict(answer).get("data"))]
        return any(as_text(model.get(key)).startswith(value) for model in models)
    rows = answer.values() if isinstance(answer, dict) else ()
    return key in as_dict(answer) or any(key in as_dict(row) for row in rows)
