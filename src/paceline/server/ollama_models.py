"""Ollama's endpoints about models: what is served, what it can do, and fetching more."""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from paceline.server import thinking
from paceline.server.errors import ApiError, api_error
from paceline.server.infill import InfillTokens
from paceline.server.models import LoadedModel, Models, ModelSource
from paceline.server.schema_ollama import NamedModelRequest, PullRequest
from paceline.server.writers import dumps

VERSION = "0.13.0"
"""Version of Ollama whose API this is. Clients compare it with the oldest that they work with (Copilot: 0.6.4)."""

_QUANTIZATION = re.compile(r"(I?Q[1-8]_\w+|BF16|F16|F32|MXFP4)$", re.IGNORECASE)
"""In the name of a GGUF file."""
_NEVER = 1e10
"""Seconds after which a model that stays is said to be unloaded; Ollama says some hundred years too."""


class OllamaModels:
    """The models of a server as Ollama lists them."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._began = datetime.now(timezone.utc)
        self._pulling: asyncio.Future[ModelSource | Exception] | None = None

    async def version(self) -> dict[str, str]:
        """Return the version of Ollama whose API this is."""
        return {"version": VERSION}

    async def tags(self) -> dict[str, Any]:
        """List the models, each under its first name."""
        return {"models": [self._listed(source) for source in self._models.sources]}

    async def ps(self) -> dict[str, Any]:
        """List the models that are in memory."""
        found = []
        for source in self._models.sources:
            if model := self._models.get(source.names[0]):
                until = datetime.now(timezone.utc) + timedelta(seconds=min(self._models.expires(source), _NEVER))
                context = model.llm.model.target.context_length
                about = {"size_vram": 0, "context_length": context, "expires_at": until.isoformat()}
                found.append({**self._listed(source), **about})
        return {"models": found}

    def _listed(self, source: ModelSource) -> dict[str, Any]:
        name, model = source.names[0], self._models.get(source.names[0])
        size = _file_bytes(model.llm.model.path) if model else source.size
        return {
            "name": name,
            "model": name,
            "modified_at": self._began.isoformat(),
            "size": size,
            # Ollama's client shows twelve of its characters. Hashing the weights themselves would take minutes.
            "digest": hashlib.sha256(f"{source.names} {size}".encode()).hexdigest(),
            "details": _details(model),
        }

    def show(self, model: LoadedModel) -> dict[str, Any]:
        """Describe a model."""
        llm, template = model.llm, model.llm.tokenizer.chat_template or ""
        details = _details(model)
        family = details["family"]
        abilities = {
            "completion": True,
            "tools": bool(template),
            "insert": InfillTokens.of(llm) is not None,
            "thinking": thinking.family(template) is not None,
        }
        sampling = llm.sampling()
        names = ("temperature", "top_p", "top_k", "min_p")
        return {
            "license": "",
            "modelfile": f"FROM {model.name}",
            "parameters": "\n".join(f"{name} {getattr(sampling, name)}" for name in names),
            "template": template,
            "details": details,
            "model_info": {
                "general.architecture": family,
                "general.basename": model.name,
                f"{family}.context_length": llm.model.target.context_length,
                f"{family}.vocab_size": llm.model.target.vocab_size,
            },
            "capabilities": [name for name, able in abilities.items() if able],
            "modified_at": self._began.isoformat(),
        }

    async def pull(self, body: PullRequest) -> Response:
        """Fetch a model unless it is served, and serve it. One at a time; a client that leaves does not stop it."""
        lines = self._pull_lines(body.named)
        if body.stream is not False:
            return StreamingResponse((dumps(line) + b"\n" async for line in lines), media_type="application/x-ndjson")
        last: dict[str, Any] = {}
        async for last in lines:
            if "error" in last:
                return Response(dumps(last), 500, media_type="application/json")
        return Response(dumps(last), media_type="application/json")

    def check_pull(self, body: NamedModelRequest) -> None:
        """Raise `ApiError` 403 for a model that is not served and may not be fetched."""
        if self._models.pull is None and not self._serves(body.named):
            raise ApiError(
                403,
                f"the model {body.named!r:.200} is not served, and this server fetches none. Run paceline pull on its "
                "machine",
                param="model",
                code="pull_disabled",
            )

    def _serves(self, name: str) -> bool:
        try:
            return bool(self._models.source(name))
        except ApiError:
            return False

    async def _pull_lines(self, name: str) -> AsyncIterator[dict[str, Any]]:
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
        """Run the download in a thread, and yield its progress: the latest, however fast it goes."""
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
            except Exception as error:
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


def _details(model: LoadedModel | None) -> dict[str, Any]:
    """Describe the files of a model; without much to say of one that is not loaded."""
    loaded = model.llm.model if model else None
    config = getattr(loaded.target, "config", None) if loaded else None
    family = getattr(config, "family", "") or "model"
    form = "gguf" if loaded is None or loaded.path.suffix == ".gguf" else "safetensors"
    named = _QUANTIZATION.search(loaded.path.stem) if loaded else None
    held = named[0].upper() if named else str(loaded.quantize or "unknown") if loaded else "unknown"
    about = {"parameter_size": "", "quantization_level": held}
    return {"parent_model": "", "format": form, "family": family, "families": [family], **about}


def _file_bytes(path: Path) -> int:
    """Return the size of a model's files."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.bin"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


async def refuse_change(request: Request) -> None:
    """Raise `ApiError` 403: models are created, copied and deleted on the server's own machine."""
    what = request.url.path.rpartition("/")[2]
    raise ApiError(403, f"{what} is not allowed over the network. Use the command line of the server's machine")
