"""The slots of a model as llama.cpp's server shows them, and its actions save, restore and erase.

In llama.cpp, a slot keeps its text after the reply, and a file keeps a slot's text. Here the prefix cache keeps the
texts of all slots, and prompts find them by their tokens, in memory and in the folder `--prefix-dir`. So `save` writes
all texts to the folder, and `restore` only checks that the folder has texts for the model.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from paceline.engine.prefix_store import PrefixStore
from paceline.server.api import dumps
from paceline.server.errors import ApiError, bad_request, retry_later
from paceline.server.models import LoadedModel
from paceline.server.schema import NamedBody
from paceline.server.serving import Service

_LONGEST = 60.0
"""Maximum seconds for writing the texts of one request."""


class SlotRequest(NamedBody):
    """Body of the actions save and restore."""

    filename: Annotated[
        str,
        Field(
            pattern=r"^[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]{0,254}$",
            description="A name, never a path. It is returned, but names no file: prompts find their texts.",
        ),
    ]


class SlotRoutes:
    """The slots of a server's models."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def slots(self, request: Request) -> Response:
        """List the slots of a loaded model; 503 if `fail_on_no_slot` is set and all are busy (llama.cpp's API)."""
        found = _slots(self._service.loader.get(request.query_params.get("model")))
        if request.query_params.get("fail_on_no_slot") and found and all(slot["is_processing"] for slot in found):
            raise retry_later(503, "no slot available", "no_slot")
        return Response(dumps(found), media_type="application/json")

    async def act(self, request: Request, slot: str, action: str = "") -> Response:
        """Save or restore the texts of all slots, in the folder of prefixes. Erasing a slot does nothing, because a
        slot keeps no text after its reply (llama.cpp's API)."""
        if action == "erase":
            return await self._service.compute(request, request.query_params.get("model"), partial(_erase, slot))
        if action not in _ACTIONS:
            raise bad_request(f"action must be save, restore or erase, got {action[:40]!r}", "action")
        async with self._service.bodies.read(request, SlotRequest) as (body, _):
            name = body.model or request.query_params.get("model")
            return await self._service.compute(request, name, partial(_ACTIONS[action], slot, body.filename))


def _slots(model: LoadedModel | None) -> list[dict[str, Any]]:
    """List a model's slots, the busy ones first, without their texts. A model that is not loaded has none."""
    if model is None:
        return []
    worker, context = model.worker, model.llm.model.target.context_length
    running, drafts = worker.load.running, worker.default.drafter is not None
    return [
        {"id": i, "n_ctx": context, "speculative": drafts, "is_processing": i < running}
        for i in range(worker.limits.slots)
    ]


def _save(slot: str, filename: str, model: LoadedModel) -> dict[str, Any]:
    """Write all texts that memory has and the folder lacks. Raises `ApiError` 503 if that fails."""
    number, disk, began = _number(slot, model), _folder(model), time.perf_counter()
    missing = model.llm.engine.write_prefixes()
    if not disk.wait(_LONGEST) or {*missing} & {*model.llm.engine.write_prefixes()}:
        raise ApiError(503, "the texts could not be written to the folder of prefixes. See the log", code="not_saved")
    tokens = model.llm.engine.kept_tokens()
    timings = {"save_ms": _ms(began)}
    return {"id_slot": number, "filename": filename, "n_saved": tokens, "n_written": disk.nbytes, "timings": timings}


def _restore(slot: str, filename: str, model: LoadedModel) -> dict[str, Any]:
    """Count the tokens that later prompts can find in the folder. Raises `ApiError` 400 if there are none."""
    number, disk, began = _number(slot, model), _folder(model), time.perf_counter()
    if not (tokens := model.llm.engine.kept_tokens()):
        raise bad_request("the folder of prefixes has no text of this model. Save one first", "filename", "not_saved")
    timings = {"restore_ms": _ms(began)}
    return {"id_slot": number, "filename": filename, "n_restored": tokens, "n_read": disk.nbytes, "timings": timings}


def _erase(slot: str, model: LoadedModel) -> dict[str, Any]:
    return {"id_slot": _number(slot, model), "n_erased": 0}


_ACTIONS = {"save": _save, "restore": _restore}


def _number(slot: str, model: LoadedModel) -> int:
    """Return the number of a slot. Raises `ApiError` 400 if there is no such slot."""
    count = model.worker.limits.slots
    if not (slot.isascii() and slot.isdecimal() and len(slot) < 10 and int(slot) < count):
        raise bad_request(f"there is no slot {slot[:40]!r}. Use 0 to {count - 1}", "slot")
    return int(slot)


def _folder(model: LoadedModel) -> PrefixStore:
    """Return the folder of prefixes. Raises `ApiError` 400 if there is none."""
    prefixes = model.llm.engine.prefixes
    if prefixes is None or prefixes.disk is None:
        raise bad_request(
            "this server keeps no prefixes on disk. Start it with --prefix-dir FOLDER", "action", "not_supported"
        )
    return prefixes.disk


def _ms(began: float) -> float:
    return round(1000 * (time.perf_counter() - began), 3)
