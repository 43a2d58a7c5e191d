"""/v1/models, /tokenize and /detokenize."""

from __future__ import annotations

import time
from typing import Any

from fastapi import Request
from starlette.responses import Response

from paceline.llm import LLM
from paceline.server import options
from paceline.server.chat import chat_ids, chat_text
from paceline.server.errors import bad_request
from paceline.server.schema import DetokenizeRequest, TokenizeRequest
from paceline.server.serving import Service

_STARTED = int(time.time())


def list_models(service: Service) -> dict[str, Any]:
    """Return the model under each of its names."""
    return {"object": "list", "data": [model_entry(service, name) for name in service.settings.names]}


def model_entry(service: Service, name: str) -> dict[str, Any]:
    """Describe the model under this name. Raises `ApiError` 404 for any other."""
    options.check_model(service.settings, name)
    llm = service.llm
    default = llm.engine.policies[service.worker.default.drafter]
    sampling = llm.sampling()
    defaults = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    about = {
        "drafters": [policy.name for policy in llm.engine.policies],
        "default": default.name if default else None,
        "guarantee": llm.guarantee,
        "context_length": llm.model.target.context_length,
        "sampling": {name: getattr(sampling, name) for name in defaults},
    }
    return {"id": name, "object": "model", "created": _STARTED, "owned_by": "paceline", "paceline": about}


async def tokenize(service: Service, request: Request) -> Response:
    """Answer with the token ids of a text or a chat."""
    async with service.bodies.read(request, TokenizeRequest) as (body, _):
        options.check_model(service.settings, body.model)

        def work() -> dict[str, Any]:
            tokens = _token_ids(service.llm, body)
            context_length = service.llm.model.target.context_length
            return {"tokens": tokens, "count": len(tokens), "max_model_len": context_length}

        return await service.compute(request, work)


def _token_ids(llm: LLM, body: TokenizeRequest) -> list[int]:
    if body.messages is None:
        return llm.tokenizer.encode(body.prompt or "", special=body.add_special_tokens is not False)
    continued = body.continue_final_message
    return chat_ids(llm, chat_text(llm, body.messages, body.tools, {}, body.add_generation_prompt, continued))


async def detokenize(service: Service, request: Request) -> Response:
    """Answer with the text of token ids."""
    async with service.bodies.read(request, DetokenizeRequest) as (body, _):
        options.check_model(service.settings, body.model)
        size = service.llm.model.target.vocab_size
        for i, token in enumerate(body.tokens):
            if token >= size:
                raise bad_request(f"token ids must be < {size}, got {token}", f"tokens.{i}")
        return await service.compute(request, lambda: {"prompt": service.llm.tokenizer.decode(body.tokens, False)})
