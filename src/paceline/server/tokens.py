"""Small answers: which model is served, what its tokens are."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request
from starlette.responses import Response

from paceline.server import options
from paceline.server.chat import chat_ids, chat_text
from paceline.server.errors import bad_request
from paceline.server.events import dumps
from paceline.server.schema import DetokenizeRequest, TokenizeRequest
from paceline.server.serving import Service

_BEGAN = int(time.time())


def list_models(service: Service) -> dict[str, Any]:
    names = (service.settings.model, *service.settings.aliases)
    return {"object": "list", "data": [model_entry(service, name) for name in names]}


def model_entry(service: Service, name: str) -> dict[str, Any]:
    """Raises `ApiError` 404."""
    options.check_model(service.settings, name)
    llm = service.llm
    default = llm.engine.policies[service.worker.default.drafter]
    about = {
        "drafters": [policy.name for policy in llm.engine.policies],
        "default": default.name if default else None,
        "guarantee": llm.guarantee,
        "context_length": llm.model.target.context_length,
        "sampling": _defaults(service),
    }
    return {"id": name, "object": "model", "created": _BEGAN, "owned_by": "paceline", "paceline": about}


def _defaults(service: Service) -> dict[str, Any]:
    """How a reply is sampled whose request says nothing."""
    own = service.llm.sampling()
    return {name: getattr(own, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}


async def tokenize(service: Service, request: Request) -> Response:
    async with service.bodies.read(request, TokenizeRequest) as (body, _):
        options.check_model(service.settings, body.model)

        def work() -> bytes:
            tokens = _ids(service, body)
            most = service.llm.model.target.context_length
            return dumps({"tokens": tokens, "count": len(tokens), "max_model_len": most})

        return await service.aside(request, work)


def _ids(service: Service, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        return service.llm.tokenizer.encode(body.prompt or "", special=body.add_special_tokens is not False)
    generation = body.add_generation_prompt is not False
    continued = bool(body.continue_final_message)
    llm = service.llm
    return chat_ids(llm, chat_text(llm, body.messages, body.tools, {}, generation=generation, continued=continued))


async def detokenize(service: Service, request: Request) -> Response:
    async with service.bodies.read(request, DetokenizeRequest) as (body, _):
        options.check_model(service.settings, body.model)
        size = service.llm.model.target.vocab_size
        for at, token in enumerate(body.tokens):
            if token >= size:
                raise bad_request(f"{token} is no token of the model: ids go to {size - 1}", f"tokens.{at}")
        return await service.aside(request, lambda: dumps({"prompt": service.llm.tokenizer.decode(body.tokens, False)}))
