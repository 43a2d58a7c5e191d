"""Endpoints about models: the served models, their settings, slots and load; and Ollama's download of models.

Clients of OpenAI and Anthropic read /v1/models, clients of Ollama /api/tags, /api/ps and /api/show, clients of
llama.cpp /props and /slots.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field, model_validator
from starlette.responses import Response, StreamingResponse

import paceline
from paceline.chat import thinking
from paceline.checkpoints.model_facts import ModelFacts, facts_of
from paceline.engine.prefix_store import PrefixStore
from paceline.sampling.parameters import Sampling, recommended
from paceline.server.api import dumps
from paceline.server.apis.tokens import tokenizer_info
from paceline.server.compat import OllamaObject, accepts, ignored_parameters
from paceline.server.errors import ApiError, WrongParameter, api_error, bad_request, retry_later
from paceline.server.models import LoadedModel, ModelSource
from paceline.server.schema import ModelName, NamedBody
from paceline.server.serving import Service
from paceline.text.infill import InfillTokens

_SAME = (
    *("temperature", "top_k", "top_p", "min_p", "top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold"),
    *("presence_penalty", "frequency_penalty", "ignore_eos", "dry_multiplier", "dry_base", "dry_allowed_length"),
    *("dry_penalty_last_n", "dry_sequence_breakers"),
)
"""Names that the parameters have in `Sampling` and in llama.cpp."""


def properties(model: LoadedModel, source: ModelSource) -> dict[str, Any]:
    """Describe a model. Only the last part of its path is shown."""
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


class ModelRoutes:
    """The models of a server, each under all of its names."""

    def __init__(self, service: Service) -> None:
        self._service, self._loader, self._started = service, service.loader, int(time.time())

    async def models(self, request: Request) -> dict[str, Any]:
        """List every model under each of its names, and its adapters.

        Clients of OpenAI and Anthropic read `data`, clients of llama.cpp read `models`. Codex, which sends its version,
        gets an empty `models`: it would take its instructions and tools from there, in place of its own.
        """
        data = [await self.model(name) for name in self._loader.names]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        names = [] if "client_version" in request.query_params else self._loader.names
        models = [{"name": name, "model": name} for name in names]
        return {"object": "list", "data": data, "models": models, **ends, "has_more": False}

    async def model(self, name: str) -> dict[str, Any]:
        """Describe the model with this name. The description of a model that is not loaded is short."""
        about: dict[str, Any] = {"loaded": False}
        if model := self._loader.get(name):
            policies, sampling = model.llm.engine.policies, model.llm.sampling()
            default = policies[model.worker.default_for(self._loader.adapter(name)).drafter]
            defaults = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            about = {
                "loaded": True,
                "drafters": [policy.name for policy in policies.public],
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


# Slots, as llama.cpp's server shows them. There, a slot keeps its text after the reply, and a file keeps a slot's text.
# Here the prefix cache keeps the texts of all slots, and prompts find them by their tokens, in memory and in the folder
# `--prefix-dir`. So `save` writes all texts to the folder, and `restore` only checks that the folder has texts for the
# model.

_MAX_WRITE_SECONDS = 60.0
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
    """Write all texts in memory that are not in the folder yet. Raises `ApiError` 503 if that fails."""
    number, disk, began = _number(slot, model), _folder(model), time.perf_counter()
    missing = model.llm.engine.write_prefixes()
    if not disk.wait(_MAX_WRITE_SECONDS) or {*missing} & {*model.llm.engine.write_prefixes()}:
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
    """Return the index of a slot. Raises `ApiError` 400 if there is no such slot."""
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


# Models, as Ollama lists them

VERSION = "0.13.0"
"""Version of Ollama with the same API. Clients compare it with their minimum version (Copilot: 0.6.4)."""

_NEVER = 1e10
"""Seconds until a model that stays is unloaded, as reported to clients. Ollama reports some hundred years too."""


@accepts(ignored_parameters("verbose options system template", "models are described as they are"))
class NamedModelRequest(OllamaObject):
    """Body of /api/show and of the endpoints that change what is stored."""

    model: ModelName | None = None
    name: Annotated[ModelName | None, Field(description="The older name of `model`.")] = None

    @property
    def named(self) -> str:
        """The model's name."""
        return self.model or self.name or ""

    @model_validator(mode="after")
    def _has_name(self) -> NamedModelRequest:
        if not self.named:
            raise WrongParameter("model must not be empty", "model")
        return self


@accepts(ignored_parameters("insecure username password", "models are fetched from the hub"))
class PullRequest(NamedModelRequest):
    """Body of /api/pull."""

    stream: bool | None = True


_Listed = tuple[ModelSource, Callable[[], ModelFacts], dict[str, Any]]
"""A model, a function that reads its facts, and further entries of the list."""


class OllamaModels:
    """The models of a server as Ollama lists them."""

    def __init__(self, service: Service) -> None:
        self._service, self._models = service, service.loader
        self._began = datetime.now(timezone.utc)
        self._pulling: asyncio.Future[ModelSource | Exception] | None = None

    async def version(self) -> dict[str, str]:
        """Return the version of Ollama whose API this is."""
        return {"version": VERSION}

    async def tags(self, request: Request) -> Response:
        """List the models, each under its first name (Ollama's API)."""
        models: list[_Listed] = [(one, _facts(one, self._models.get(one.names[0])), {}) for one in self._models.sources]
        return await self._service.document(request, partial(self._listed, models))  # it reads files

    async def ps(self, request: Request) -> Response:
        """List the models that are in memory (Ollama's API)."""
        found: list[_Listed] = []
        for source in self._models.sources:
            if model := self._models.get(source.names[0]):
                until = datetime.now(timezone.utc) + timedelta(seconds=min(self._models.expires(source), _NEVER))
                context = model.llm.model.target.context_length
                more = {"size_vram": 0, "context_length": context, "expires_at": until.isoformat()}
                found.append((source, _facts(source, model), more))
        return await self._service.document(request, partial(self._listed, found))

    def _listed(self, models: Sequence[_Listed]) -> dict[str, Any]:
        return {"models": [{**self._about(source, facts()), **more} for source, facts, more in models]}

    def _about(self, source: ModelSource, facts: ModelFacts) -> dict[str, Any]:
        name, size = source.names[0], facts.size or source.size
        return {
            "name": name,
            "model": name,
            "modified_at": self._began.isoformat(),
            "size": size,
            # Ollama's client shows twelve of its characters. Hashing the weights themselves would take minutes.
            "digest": hashlib.sha256(f"{source.names} {size}".encode()).hexdigest(),
            "details": _details(facts),
        }

    async def show(self, request: Request) -> Response:
        """Describe a model, loaded or not (Ollama's API). Raises `ApiError` 404."""
        async with self._service.bodies.read(request, NamedModelRequest) as (body, _):
            source, model = self._models.source(body.named), self._models.get(body.named)
            shown = self._models.adapter(body.named) or source.names[0]
            work = partial(self._shown, shown, _facts(source, model), model.llm.sampling() if model else None)
            del model
            self._service.limit.acquire()
            try:
                return await self._service.document(request, work)
            finally:
                self._service.limit.release()

    def _shown(self, name: str, read: Callable[[], ModelFacts], sampling: Sampling | None) -> dict[str, Any]:
        facts = read()
        abilities = {
            "completion": True,
            "vision": facts.vision,
            "tools": bool(facts.template),
            "insert": facts.infill,
            "thinking": thinking.thought_format_of(facts.template) is not None,
        }
        sampling = sampling or Sampling(**recommended(facts.generation))
        names = ("temperature", "top_p", "top_k", "min_p")
        numbers = {
            "general.parameter_count": facts.parameters,
            f"{facts.family}.context_length": facts.context_length,
            f"{facts.family}.vocab_size": facts.vocab_size,
        }
        return {
            "license": "",
            "modelfile": f"FROM {name}",
            "parameters": "\n".join(f"{name} {getattr(sampling, name)}" for name in names),
            "template": facts.template,
            "details": _details(facts),
            "model_info": {
                "general.architecture": facts.family,
                "general.basename": name,
                **{name: number for name, number in numbers.items() if number},
            },
            "capabilities": [name for name, able in abilities.items() if able],
            "modified_at": self._began.isoformat(),
        }

    async def pull(self, request: Request) -> Response:
        """Fetch a model (Ollama's API)."""
        async with self._service.bodies.read(request, PullRequest) as (body, _):
            name, stream = body.named, body.stream is not False
        if self._models.pull is None and not self._serves(name):
            raise ApiError(
                403,
                f"the model {name!r:.200} is not served, and this server fetches none. Run paceline pull on its "
                "machine",
                param="model",
                code="pull_disabled",
            )
        lines = self._pull_lines(name)
        if stream:
            return StreamingResponse((dumps(line) + b"\n" async for line in lines), media_type="application/x-ndjson")
        last: dict[str, Any] = {}
        async for last in lines:
            if "error" in last:
                return Response(dumps(last), 500, media_type="application/json")
        return Response(dumps(last), media_type="application/json")

    def _serves(self, name: str) -> bool:
        try:
            return bool(self._models.source(name))
        except ApiError:
            return False

    async def _pull_lines(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """Fetch a model if it is not served yet, and serve it. Only one model is fetched at a time. The download
        continues if the client disconnects."""
        yield {"status": "pulling manifest"}
        if not self._serves(name):
            if self._pulling and not self._pulling.done():
                yield {"error": "another model is being fetched. Try again when that is done"}
                return
            async for line in self._fetch(name):
                yield line
                if "error" in line:
                    return
        yield {"status": "success"}

    async def _fetch(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """Run the download in a thread, and yield its latest progress. Progress may be skipped if it comes too fast."""
        loop, changed, latest = asyncio.get_running_loop(), asyncio.Event(), dict[str, Any]()
        done = self._pulling = loop.create_future()
        done.add_done_callback(self._serve)
        done.add_done_callback(lambda _: changed.set())

        def show(line: dict[str, Any]) -> None:
            latest.update(line)
            changed.set()

        def progress(file: str, completed: int, total: int) -> None:
            digest = f"sha256:{hashlib.sha256(file.encode()).hexdigest()}"
            line = {"status": f"pulling {file}", "digest": digest, "total": total, "completed": completed}
            loop.call_soon_threadsafe(show, line)

        def run() -> None:
            fetched: ModelSource | Exception
            try:
                assert self._models.pull is not None
                fetched = self._models.pull(name, progress)
            except Exception as error:  # shown to the client, and logged if unexpected (`api_error`)
                fetched = error
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done.set_result, fetched)

        threading.Thread(target=run, name="paceline-pull", daemon=True).start()
        while not done.done() or latest:
            await changed.wait()
            changed.clear()
            if line := dict(latest):
                latest.clear()
                yield line
        if isinstance(failed := done.result(), Exception):
            yield {"error": api_error(failed).message}

    def _serve(self, done: asyncio.Future[ModelSource | Exception]) -> None:
        if isinstance(source := done.result(), ModelSource):
            self._models.add(source)


def _facts(source: ModelSource, model: LoadedModel | None) -> Callable[[], ModelFacts]:
    """Return a function that reads facts about a model from its files. For a loaded model, some facts come from the
    model itself. They are collected now, so that the function does not keep the model in memory."""
    if model is None:
        return partial(_read, source.path)
    llm, target = model.llm, model.llm.model.target
    return partial(
        _read,
        llm.model.path,
        context_length=target.context_length,
        vocab_size=target.vocab_size,
        template=llm.tokenizer.chat_template or "",
        vision=llm.vision is not None,
        infill=InfillTokens.of(llm.tokenizer.token_id) is not None,
    )


def _read(path: Path | None, **known: Any) -> ModelFacts:
    return replace(facts_of(path) or ModelFacts(), **known)


def _details(facts: ModelFacts) -> dict[str, Any]:
    about = {"parameter_size": _short(facts.parameters), "quantization_level": facts.quantization}
    names = {"format": facts.format, "family": facts.family, "families": [facts.family]}
    return {"parent_model": "", **names, **about}


def _short(count: int) -> str:
    """Return a number of parameters as Ollama writes it, such as "1.5B" or "494.03M". 0, an unknown
    number, gives ""."""
    if count >= 10**9:
        return f"{count / 10**9:.1f}B"
    return f"{count / 10**6:.2f}M" if count else ""


async def refuse_change(request: Request) -> None:
    """Raise `ApiError` 403: models are created, copied and deleted on the server's own machine."""
    what = request.url.path.rpartition("/")[2]
    raise ApiError(403, f"{what} is not allowed over the network. Use the command line of the server's machine")
