"""/v1/models, /props, /slots and /tokenizer_info: the models of a server, their settings and their load, read-only.

Clients of OpenAI and Anthropic read /v1/models; /props and /slots are in the shapes of llama.cpp's server.
"""

from __future__ import annotations

import time
from datetime import datetime, timezone
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

import paceline
from paceline.server.api import dumps
from paceline.server.apis.tokens import tokenizer_info
from paceline.server.errors import retry_later
from paceline.server.models import LoadedModel, ModelSource
from paceline.server.serving import Service

_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold"),
    *("presence_penalty", "frequency_penalty", "ignore_eos", "dry_multiplier", "dry_base", "dry_allowed_length"),
    *("dry_penalty_last_n", "dry_sequence_breakers"),
)
"""Names that the parameters have in `Sampling` and in llama.cpp."""


def properties(model: LoadedModel, source: ModelSource) -> dict[str, Any]:
    """Describe a model. Of its path only the last part is shown."""
    llm, words = model.llm, model.llm.tokenizer
    sampling = llm.sampling()
    params = {name: getattr(sampling, name) for name in _SAME}
    params |= {"repeat_penalty": sampling.repetition_penalty, "repeat_last_n": -1, "seed": -1, "n_predict": -1}
    return {
        "default_generation_settings": {"params": params, "n_ctx": llm.model.target.context_length},
        "total_slots": model.worker.limits.slots,
        "model_alias": model.name,
        "model_path": source.path.name if source.path else source.names[0],
        "modalities": {"vision": llm.vision is not None, "audio": False},
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "chat_template": words.chat_template or "",
        "bos_token": words.special_tokens.get("bos_token", ""),
        "eos_token": words.special_tokens.get("eos_token", ""),
        "build_info": f"paceline-{paceline.__version__}",
    }


def slots(model: LoadedModel | None) -> list[dict[str, Any]]:
    """List a model's slots, the busy ones first, without anything of their texts; none if it is not loaded."""
    if model is None:
        return []
    worker, context = model.worker, model.llm.model.target.context_length
    running, drafts = worker.load.running, worker.default.drafter is not None
    return [
        {"id": i, "n_ctx": context, "speculative": drafts, "is_processing": i < running}
        for i in range(worker.limits.slots)
    ]


class ModelRoutes:
    """The models of a server, each under all of its names."""

    def __init__(self, service: Service) -> None:
        self._service, self._loader, self._started = service, service.loader, int(time.time())

    async def models(self, request: Request) -> dict[str, Any]:
        """List every model under each of its names, and its adapters. Clients of OpenAI and of Anthropic read it, and
        those of llama.cpp its `models`.

        To Codex, which sends its version, `models` would bring instructions and tools of their own, in place of
        Codex's: for it the list is empty.
        """
        data = [await self.model(name) for name in self._loader.names]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        names = [] if "client_version" in request.query_params else self._loader.names
        models = [{"name": name, "model": name} for name in names]
        return {"object": "list", "data": data, "models": models, **ends, "has_more": False}

    async def model(self, name: str) -> dict[str, Any]:
        """Describe the model under one of its names; a model that is not loaded in few words."""
        about: dict[str, Any] = {"loaded": False}
        if model := self._loader.get(name):
            policies, sampling = model.llm.engine.policies, model.llm.sampling()
            default = policies[model.worker.default_for(self._loader.adapter(name)).drafter]
            defaults = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            about = {
                "loaded": True,
                "drafters": [policy.name for policy in policies],
                "default": default.name if default else None,
                "guarantee": model.llm.guarantee,
                "modalities": ["text", *(["image"] if model.llm.vision else [])],
                "context_length": model.llm.model.target.context_length,
                "sampling": {name: getattr(sampling, name) for name in defaults},
            }
        openai = {"object": "model", "created": self._started, "owned_by": "paceline"}
        created = datetime.fromtimestamp(self._started, timezone.utc).isoformat()
        anthropic = {"type": "model", "display_name": name, "created_at": created, "lifecycle": "active"}
        base = {"parent": self._loader.source(name).names[0]} if self._loader.adapter(name) else {}  # as in vLLM
        return {"id": name, **openai, **anthropic, **base, "paceline": about}

    async def properties(self, request: Request) -> Response:
        """Describe a model and its default sampling (llama.cpp's API)."""
        name = request.query_params.get("model")
        source = self._loader.source(name)
        return await self._service.compute(request, name, partial(properties, source=source))

    async def tokenizer_info(self, request: Request) -> Response:
        """Describe a model's tokenizer as vLLM does. The `remote` backend of lm-eval asks for it first."""
        name = request.query_params.get("model") or self._loader.names[0]
        return await self._service.compute(request, name, tokenizer_info)

    async def slots(self, request: Request) -> Response:
        """List the slots of a loaded model; 503 if `fail_on_no_slot` is set and all are busy (llama.cpp's API)."""
        found = slots(self._loader.get(request.query_params.get("model")))
        if request.query_params.get("fail_on_no_slot") and found and all(slot["is_processing"] for slot in found):
            raise retry_later(503, "no slot available", "no_slot")
        return Response(dumps(found), media_type="application/json")
