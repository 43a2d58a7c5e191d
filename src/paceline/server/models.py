"""The models of a server, by name: loaded at their first request, unloaded when they are idle or memory is short."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import TypeVar

from paceline.errors import InvalidOption, OutOfMemory, UnsupportedModel
from paceline.models.held import held_bytes
from paceline.server.errors import LOG, ApiError
from paceline.server.grammars import GrammarTrials
from paceline.server.metrics import Metrics
from paceline.server.replies import TokenTexts
from paceline.server.worker import Busy, ServerStopping, Worker, WorkerLoad, trim_memory

T = TypeVar("T")

_MEMORY_WAIT_SECONDS = 60.0
"""Maximum seconds that a model waits for other models to release their memory."""
_MIN_LOADED_SECONDS = 1.0
"""Minimum seconds that a model stays loaded before its first use."""
_MAX_LISTED_NAMES = 20
"""Maximum number of names in an error message."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelSource:
    """A model to serve. A request may name the model by any of its names, or name one of its adapters.

    An answer gives the first name of the model, or the name of the adapter.

    Attributes:
        names: The model's names.
        load: Loads the model and returns its worker, which has not started.
        size: Expected bytes of memory, without drafters.
        stays: True if the model is loaded before the server starts and never unloaded.
        path: Its file or folder.
        adapters: Names of its adapters.
    """

    names: tuple[str, ...]
    load: Callable[[], Worker]
    size: int = 0
    stays: bool = False
    path: Path | None = None
    adapters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not all(name.strip() for name in self.names):
            raise InvalidOption("the model's name must not be empty", "Give --served-model-name a name")
        if both := set(self.names) & set(self.adapters):
            raise InvalidOption(f"model and adapter are both called {min(both)}", "Give one of them another name")


Pull = Callable[[str, Callable[[str, int, int], None]], ModelSource]
"""Fetches a model by name. Calls its second argument with (file, bytes so far, bytes in all)."""


class LoadedModel:
    """A model in memory, and objects that its requests share.

    Attributes:
        users: Requests that use the model.
        size: Bytes that it needs.
        keep_alive: Seconds that it stays loaded while it is idle. None for ever.
        adapter: The adapter that this object was returned for (see `take`). None for the model without an adapter.
    """

    def __init__(self, name: str, worker: Worker, metrics: Metrics, size: int = 0) -> None:
        """Run the self-check, which must end before the engine's thread starts. `size`: see `ModelSource`."""
        self.name, self.worker, self.llm = name, worker, worker.llm
        target, drafters = self.llm.model.target, [policy.drafter for policy in self.llm.engine.policies]
        own = held_bytes(target)
        self.size = max(size, own) + held_bytes(target, drafters) - own
        _ = self.llm.guarantee
        self.token_texts, self.grammar_trials = TokenTexts(self.llm.tokenizer), GrammarTrials(self.llm)
        self.metrics, self._metrics = metrics.of(name), metrics
        self.adapter: str | None = None
        self._base: LoadedModel | None = None
        self.users, self.used = 0, time.monotonic()
        self.keep_alive: float | None = None
        self.on_idle: Callable[[], object] = lambda: None

    def take(self, adapter: str | None) -> LoadedModel:
        """Increment the user count, and return the model for a request with this adapter. `release` must follow."""
        self.users += 1
        if adapter is None:
            return self
        adapted = copy(self)
        adapted.name = adapted.adapter = adapter
        adapted.metrics, adapted._base = self._metrics.of(adapter, adapter=True), self
        return adapted

    def release(self) -> None:
        """Decrement the user count."""
        model = self._base or self
        model.users, model.used = model.users - 1, time.monotonic()
        if not model.users:
            model.on_idle()


class Models:
    """The models of a server. All methods but the constructor must be called on the event loop.

    Each model has its own worker. It is loaded in a separate thread, so that the other models continue to generate.
    """

    def __init__(
        self,
        sources: Iterable[ModelSource],
        *,
        keep_alive: float | None = None,
        max_memory: int | None = None,
        free_memory: Callable[[], int] | None = None,
        pull: Pull | None = None,
    ) -> None:
        """Load the models that stay.

        Args:
            sources: The models.
            keep_alive: Seconds that an idle model stays loaded. None for ever.
            max_memory: Maximum bytes of all loaded models together. None for the free memory.
            free_memory: Returns the bytes that are free now.
            pull: Fetches further models for requests. None if requests may not fetch models.

        Raises:
            PacelineError: If a model cannot be loaded.
        """
        self.pull = pull
        self.sources: list[ModelSource] = []
        self.metrics = Metrics(self._load_of)
        self._named: dict[str, ModelSource] = {}
        self._keep_alive, self._max_memory, self._free_memory = keep_alive, max_memory, free_memory
        self._loaded: dict[ModelSource, LoadedModel] = {}
        self._sizes: dict[ModelSource, int] = {}
        """Bytes that each model needs: an estimate until it has been loaded, then the size with its drafters."""
        self._loading: dict[ModelSource, asyncio.Task[None]] = {}
        self._unloading: set[asyncio.Task[None]] = set()
        self._timers: dict[ModelSource, asyncio.TimerHandle] = {}
        self._turn = asyncio.Lock()  # load and unload one model at a time, so that the free memory is known
        self._freed = asyncio.Event()
        self._stopping = False
        for source in sources:
            self.add(source)
            if source.stays:
                self._loaded[source] = model = run_in_thread(partial(self._open, source)).result()
                self._sizes[source] = model.size

    def add(self, source: ModelSource) -> None:
        """Serve another model. If its file is already served, that model gets the new names. A name
        that is in use stays with its model."""
        served = next((one for one in self.sources if one.path is not None and one.path == source.path), source)
        if served is source:
            if source.names[0] in self._named:
                LOG.warning(
                    "%s is not served: another model or an adapter has its name", source.path or source.names[0]
                )
                return
            self.sources.append(source)
            self._sizes[source] = source.size
        for name in (*source.names, *source.adapters):
            self._named.setdefault(name, served)

    @property
    def names(self) -> list[str]:
        """Every name that requests may give."""
        return list(self._named)

    def start(self) -> None:
        """Start the workers of the models that are loaded. Replies are delivered on the running event loop."""
        for model in self._loaded.values():
            model.worker.start()

    def drain(self, grace: float) -> None:
        """Accept no more requests. Unfinished replies have `grace` seconds to end; then they are cancelled."""
        self._stopping = True
        for model in self._loaded.values():
            model.worker.drain(grace)

    async def stop(self, grace: float) -> None:
        """`drain`, and wait until the workers have ended. Do not wait for a model that is being loaded."""
        self.drain(grace)
        for task in (*self._loading.values(), *self._unloading):
            task.cancel()
        for source in [*self._timers]:
            self._cancel_timer(source)
        for model in self._loaded.values():
            await model.worker.stop(grace)

    @property
    def alive(self) -> bool:
        """True if requests are accepted."""
        return not self._stopping and all(model.worker.alive for model in self._loaded.values())

    @property
    def failing(self) -> bool:
        """True if a model's latest replies all ended with an internal error."""
        return any(model.worker.failing for model in self._loaded.values())

    @property
    def load(self) -> WorkerLoad:
        """The load of all workers together at this moment."""
        loads = [model.worker.load for model in self._loaded.values()]
        cache = max((load.cache for load in loads), default=0.0)
        return WorkerLoad(sum(load.running for load in loads), sum(load.waiting for load in loads), cache)

    def _load_of(self, name: str) -> WorkerLoad:
        model = self.get(name)
        return model.worker.load if model else WorkerLoad(0, 0, 0.0)

    def source(self, name: str | None) -> ModelSource:
        """Return the model with this name, or the first model for None. Raises `ApiError` 404 if it is not served."""
        source = self.sources[0] if name is None and self.sources else self._named.get(name or "")
        source = source or self._named.get((name or "").removesuffix(":latest"))  # as Ollama's clients write names
        if source is None:
            known = ", ".join(map(repr, list(self._named)[:_MAX_LISTED_NAMES])) + (
                ", ..." if len(self._named) > _MAX_LISTED_NAMES else ""
            )
            raise ApiError(
                404,
                f"the model {name!r:.200} is not served here. Use one of {known}",
                param="model",
                code="model_not_found",
            )
        return source

    def expires(self, source: ModelSource) -> float:
        """Return the seconds after which a loaded model is unloaded if it stays idle; infinity for never."""
        model = self._loaded[source]
        return inf if model.keep_alive is None else max(0.0, model.used + model.keep_alive - time.monotonic())

    def get(self, name: str | None) -> LoadedModel | None:
        """Return a model if it is loaded. Raises `ApiError` 404."""
        return self._loaded.get(self.source(name))

    def unload(self, name: str | None) -> None:
        """Unload a model as soon as it is idle, unless it stays or is not loaded. Raises `ApiError` 404."""
        source = self.source(name)
        if not source.stays and (model := self._loaded.get(source)):
            model.keep_alive = 0.0
            if not model.users:
                self._idle(source)

    def take(self, name: str | None) -> LoadedModel | None:
        """Return a model if it is loaded. Increments its user count: `release` must follow. Raises `ApiError` 404."""
        if self._stopping:
            raise ServerStopping
        model = self.get(name)
        return model and model.take(self.adapter(name))

    def adapter(self, name: str | None) -> str | None:
        """Return the adapter with this name, or None if the name is a model's. Raises `ApiError` 404."""
        adapters, name = self.source(name).adapters, name or ""
        return next((one for one in (name, name.removesuffix(":latest")) if one in adapters), None)

    async def ready(self, name: str | None) -> None:
        """Load a model unless it is loaded. If a caller is cancelled, loading continues for the other callers.

        Raises `ApiError` 404, `Busy` if other models use the memory, `OutOfMemory`, and the errors of loading.
        """
        source = self.source(name)
        if source in self._loaded:
            return
        if source not in self._loading:
            task = self._loading[source] = asyncio.create_task(self._load(source))
            task.add_done_callback(lambda done: (self._loading.pop(source), done.cancelled() or done.exception()))
        await asyncio.shield(self._loading[source])

    async def _load(self, source: ModelSource) -> None:
        until = time.monotonic() + _MEMORY_WAIT_SECONDS
        while True:
            async with self._turn:
                self._freed.clear()
                if await self._make_room(source):
                    began = time.monotonic()
                    model = await asyncio.wrap_future(run_in_thread(partial(self._open, source)))
                    if self._stopping:
                        raise ServerStopping
                    self._sizes[source] = model.size
                    if await self._keep_within(source):
                        self._loaded[source] = model
                        model.worker.start()
                        self._watch(source, model)
                        LOG.info("loaded %s in %.1f s", model.name, time.monotonic() - began)
                        return
                    del model
                    trim_memory()
                    self._freed.set()  # the size of `source` is known now, so try again without waiting
            try:
                await asyncio.wait_for(self._freed.wait(), until - time.monotonic())
            except asyncio.TimeoutError:
                raise Busy(f"the models in use leave no memory for {source.names[0]}") from None

    def _open(self, source: ModelSource) -> LoadedModel:
        try:
            return LoadedModel(source.names[0], source.load(), self.metrics, source.size)
        except InvalidOption as error:  # about the server's options, not the request
            if source.stays:
                raise
            raise UnsupportedModel(f"{source.names[0]} cannot be loaded: {error.cause}", error.fix) from error

    async def _make_room(self, source: ModelSource) -> bool:
        """Unload idle models, the least recently used first, until `source` fits. Return False if models in use prevent
        it.

        Raises `OutOfMemory` for a model that can never fit.
        """
        others = self._unloadable()
        if (excess := self._excess(source, others)) > 0:
            raise OutOfMemory(
                f"{source.names[0]} needs {self._sizes[source] / 2**30:.1f} GiB, which exceeds the memory budget by "
                f"{excess / 2**30:.1f} GiB",
                "Start the server with a larger --max-memory",
            )
        idle = [one for one in others if not self._loaded[one].users]
        if idle != others and not self._fits(source, idle):
            return False
        for one in idle:
            if self._fits(source):
                break
            if not self._loaded[one].users:  # a request may have taken it while another model was unloaded
                await self._unload(one)
        # The free memory is an estimate. If waiting would not free more, because all models in use stay, try anyway.
        return self._fits(source) or not any(model.users for one, model in self._loaded.items() if not one.stays)

    async def _keep_within(self, source: ModelSource) -> bool:
        """Unload idle models until all loaded models fit into `max_memory`. Return False if models in use prevent it.

        A model that has just been loaded may need more than expected, because of its drafters.
        """
        for one in self._unloadable():
            if self._excess(source) > 0 and not self._loaded[one].users:
                await self._unload(one)
        return self._excess(source) <= 0

    def _unloadable(self) -> list[ModelSource]:
        """The models that do not stay, the least recently used first."""
        return sorted((one for one in self._loaded if not one.stays), key=lambda one: self._loaded[one].used)

    def _excess(self, source: ModelSource, gone: Sequence[ModelSource] = ()) -> int:
        """Return the bytes by which all models, with `source` and without `gone`, exceed `max_memory`."""
        needed = self._sizes[source] + sum(self._sizes[one] for one in self._loaded if one not in gone)
        return 0 if self._max_memory is None else needed - self._max_memory

    def _fits(self, source: ModelSource, gone: Sequence[ModelSource] = ()) -> bool:
        freed = sum(self._sizes[one] for one in gone)
        is_free = self._free_memory is None or self._sizes[source] <= self._free_memory() + freed
        return is_free and self._excess(source, gone) <= 0

    async def _unload(self, source: ModelSource) -> None:
        model = self._loaded.pop(source)
        LOG.info("unloading %s", model.name)
        self._cancel_timer(source)
        model.on_idle = lambda: None
        await model.worker.stop(0.0)
        del model
        trim_memory()

    def _watch(self, source: ModelSource, model: LoadedModel) -> None:
        """Unload the model once it has been idle for `keep_alive` seconds, but not before the request that loaded it
        had time to take it."""
        model.keep_alive = self._keep_alive
        model.on_idle = partial(self._idle, source)
        self._idle(source, _MIN_LOADED_SECONDS)

    def _idle(self, source: ModelSource, least: float = 0.0) -> None:
        """Schedule the unloading of an idle model after `keep_alive` seconds, but not before `least` seconds.

        Neither this method nor the timer refers to the model, because a reference would keep it in memory.
        """
        self._freed.set()
        seconds = self._loaded[source].keep_alive
        if seconds is not None:
            self._cancel_timer(source)
            later = asyncio.get_running_loop().call_later
            self._timers[source] = later(max(least, seconds), self._begin_to_expire, source)

    def _cancel_timer(self, source: ModelSource) -> None:
        if timer := self._timers.pop(source, None):
            timer.cancel()

    def _begin_to_expire(self, source: ModelSource) -> None:
        task = asyncio.get_running_loop().create_task(self._expire(source))
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    async def _expire(self, source: ModelSource) -> None:
        async with self._turn:
            if self._is_due(source):
                await self._unload(source)

    def _is_due(self, source: ModelSource) -> bool:
        model = self._loaded.get(source)
        return bool(model and not model.users and time.monotonic() - model.used >= (model.keep_alive or 0.0))


def run_in_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a new daemon thread.

    Models are loaded in such a thread, not in the main thread. A thread that computes with torch gets a pool of OpenMP
    threads, which lives as long as the thread. Once all pools together have more threads than there are cores, OpenMP
    puts threads to sleep at every barrier. So a pool of the main thread would cost the engine's thread nearly half of
    its speed, if torch runs the layers.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # so that it cannot be cancelled

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="paceline-load", daemon=True).start()
    return future
