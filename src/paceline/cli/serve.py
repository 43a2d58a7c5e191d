"""`paceline serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass, replace
from functools import partial, wraps
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from paceline.cli.adapters import parse_adapters
from paceline.cli.cache_room import cache_positions, free_memory, position_bytes, prefix_room, state_positions
from paceline.cli.commands import LOG_FORMAT, option, options_of
from paceline.cli.options import (
    DEMO,
    LoadFlags,
    ModelArgument,
    Quiet,
    follows,
    note,
    processes,
    progress_wanted,
)
from paceline.cli.show import amount
from paceline.cli.wrapping import say
from paceline.errors import InvalidOption, ModelNotFound, PacelineError, install_line

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from fastapi import FastAPI

    from paceline.files.stores import StoredModel
    from paceline.learn.learner import Learner
    from paceline.llm import LLM
    from paceline.recording.file import ReplyRecorder
    from paceline.server.limits import Settings
    from paceline.server.models import LoadedModel, Models, ModelSource
    from paceline.server.warm import WarmPrompt
    from paceline.server.worker import Worker, WorkerLimits

_server = options_of("Server")
_messages = options_of("Messages")
_limit = options_of("Limits")
_several = options_of("Several models")
_STORES = ("pulled", "all")
_IN_MEMORY = 1.25
"""Memory of a model relative to the size of its file (benchmarks/results/2026-11-23-real-models.md)."""
_WEIGHTLESS = ("suffix", "ngram")
"""Drafters without weights, which requests can always name."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Address of the server, and access to it."""

    host: str = _server("Address to listen on. 0.0.0.0 means all interfaces.", metavar="HOST", default="127.0.0.1")
    port: int = _server("Port to listen on. 0: any free port.", "-p", min=0, max=65535, default=8000)
    served_model_name: list[str] | None = _server(
        "Name of the model in the API. Repeatable.\n\nClients may use any of the names. Replies contain the first one.",
        metavar="NAME",
    )
    api_key: list[str] | None = _server(
        "Key that clients must send. Repeatable.\n\nAn environment variable is safer than the command line.",
        metavar="KEY",
        envvar="PACELINE_API_KEY",
        show_default=False,
    )
    allowed_host: list[str] | None = _server(
        "Additional host name that requests may use. Repeatable.\n\nThis is needed only if the server listens on the "
        "loopback interface without a key.",
        metavar="NAME",
    )
    cors: list[str] | None = _server("Origin whose web pages may use the server. Repeatable.", metavar="ORIGIN")
    allow_image_urls: list[str] | None = _server(
        "Host from which images may be fetched. Repeatable.\n\nBy default, requests must contain their images. "
        "*.example.com means all hosts of a domain. An address in a private network is used only if its host is given "
        "without *.",
        metavar="HOST",
    )
    grace: float = _server("Seconds for active replies to finish after SIGTERM.", min=0, default=20.0)
    log_prompts: bool = _server("Log requests with their prompts.", default=False)
    record: Path | None = _server(
        "Append all prompts and replies to this recording, for replay and tune.\n\nIt contains what users write, as "
        "token ids. Only the owner can read a new file. Tell your users.",
        metavar="FILE",
    )
    learn: Path | None = _server(
        "Learn from the traffic to draft better, and keep what is learned in this folder.\n\nThe folder stores what "
        "users write and read, as token ids. Tell your users. Earlier replies help to draft new ones at once. When the "
        "server has been idle for three minutes, it trains a head, and uses the head if it is faster on replies that "
        "it was not trained on. Clients with different API keys share nothing. `paceline learn` shows or deletes what "
        "was learned.",
        metavar="DIR",
    )
    learn_disk: str = _server(
        "Maximum size of recorded traffic and hidden states for training, in GiB.\n\nTrained heads are not counted. "
        "The oldest replies are removed first.",
        metavar="SIZE",
        default="2G",
    )
    warm: list[Path] | None = _server(
        "Read this prompt before the server starts. Repeatable.\n\nA text file is a system prompt. A file that ends "
        "with .json is a chat request, with tools and messages, or a list of messages. Requests that begin with this "
        "prompt then start at once.",
        metavar="FILE",
    )
    special_tokens_in_messages: bool = _messages(
        "Let text in messages form the model's special tokens.\n\nBy default, it remains ordinary text. This keeps, "
        "for example, the result of a tool from imitating a message.",
        default=False,
    )
    traces: str | None = _server("Send OpenTelemetry traces to this OTLP/HTTP endpoint.", metavar="URL")

    def hosts(self, addresses: Collection[str]) -> list[str]:
        """Return the host names that requests may use (`Settings.hosts`). An empty list allows all.

        Args:
            addresses: IP addresses of --host.
        """
        if self.api_key or not all(map(_is_loopback, addresses)):
            return []
        named = (self.host, *(self.allowed_host or ()))
        return ["localhost", "127.0.0.1", "::1", *addresses, *(name.lower() for name in named)]


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """Limits of memory, requests and time."""

    slots: int = _limit("Maximum number of replies generated at the same time.", min=1, default=32)
    queue: int = _limit("Maximum number of waiting replies. Further requests get status 429.", min=0, default=128)
    prefill: int = _limit(
        "Maximum prompt tokens to prefill between two rounds.\n\nA higher number favours new requests over active "
        "requests.",
        min=1,
        default=128,
    )
    cache_memory: float | None = _limit(
        "Memory for keys and values, in GiB.", min=0.001, show_default="a quarter of the free memory"
    )
    prefix_memory: float | None = _limit(
        "Memory for the prefix cache, in GiB. 0: off.", min=0, show_default="an eighth of the free memory, at least 1"
    )
    prefix_dir: Path | None = _limit(
        "Folder for prefixes that do not fit in memory, and for all prefixes in memory when the server stops.\n\nAfter "
        "a restart, the server does not read the beginning of a prompt again if it has read it before. The files "
        "contain what users write, as token ids. Only their owner can read them. Several servers may share a folder.",
        metavar="DIR",
    )
    prefix_disk: str = _limit(
        "Maximum size of --prefix-dir, in GiB.\n\nThe least recently used prefixes are removed first.",
        metavar="SIZE",
        default="8G",
    )
    max_prompt: int | None = _limit("Maximum length of a prompt, in tokens.", min=1, show_default="the model's context")
    max_body: int = _limit("Maximum size of a request without its images, in bytes.", min=1, default=4 << 20)
    max_images: int = _limit("Maximum number of images in a request.", min=0, default=64)
    max_image_bytes: int = _limit("Maximum size of all images in a request, in bytes.", min=0, default=24 << 20)
    timeout: float | None = _limit(
        "Maximum time from the arrival of a request to the end of its reply, in seconds.",
        min=0.001,
        show_default="none",
    )

    def folder(self) -> dict[str, Any]:
        """Return the arguments of `paceline.load` for the folder of prefixes. Raise `InvalidOption` if they are not
        valid."""
        if self.prefix_dir is None:
            return {}
        if self.prefix_memory == 0:
            raise InvalidOption("--prefix-dir needs a prefix cache in memory", "Set --prefix-memory above 0")
        if processes() > 1:
            raise InvalidOption("--prefix-dir works only with one process", "Leave it out")
        return {"prefix_dir": self.prefix_dir, "prefix_disk": _gibibytes("--prefix-disk", self.prefix_disk)}

    def worker_limits(self, llm: LLM) -> WorkerLimits:
        """Return the limits of a worker with this model."""
        from paceline.server.worker import WorkerLimits

        positions, state = cache_positions(llm, self.cache_memory), state_positions(llm)
        prefix_bytes = prefix_room(self.prefix_memory)
        return WorkerLimits(self.slots, self.queue, positions, self.prefill, prefix_bytes, state)


@dataclass(frozen=True, slots=True)
class ModelsOptions:
    """Additional models, loaded on request."""

    models: list[str] | None = _several(
        "Also serve all models in this folder and its subfolders. Repeatable.\n\nModels are GGUF files and folders in "
        "Hugging Face's layout. `pulled` means the models that `paceline list` shows, and `all` means the models that "
        "`paceline list --all` shows. Requests select a model by name, and /v1/models lists the names.",
        metavar="DIR",
    )
    keep_alive: float = _several(
        "Seconds that a model of --models stays in memory after its last reply. -1: forever.",
        metavar="SECONDS",
        default=300.0,
    )
    max_memory: float | None = _several(
        "Memory budget for all models, in GiB.\n\nModels that have been idle the longest are unloaded first. The "
        "budget includes MODEL and loaded draft models, but not keys and values (--cache-memory).",
        min=0.001,
        show_default="the free memory",
    )

    def found(self) -> list[StoredModel]:
        """Return the models, without learned drafters. Raise `ModelNotFound` if a folder does not exist."""
        from paceline.files.stores import models_in, stored_models

        found: list[StoredModel] = []
        for place in self.models or ():
            found += stored_models(place == "all") if place in _STORES else models_in(Path(place).expanduser())
        return [model for model in found if model.path.is_file() or not _is_head(model.path)]


def _gibibytes(name: str, text: str) -> float:
    """Parse a size in GiB, such as 8, 8G or 500M. Raise `InvalidOption` if it is not a positive size."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not found or not float(found[1]):
        raise InvalidOption(f"{name} must be a size in GiB, got {text!r}", "Write 8, 8G or 500M, for example")
    return float(found[1]) * {"M": 1 / 1024, "T": 1024.0}.get(found[2].upper(), 1.0)


def _is_loopback(address: str) -> bool:
    parsed = ip_address(address)
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def _is_head(folder: Path) -> bool:
    from paceline.checkpoints.head_files import holds_head

    try:
        return holds_head(folder)
    except PacelineError:  # an unsupported or damaged drafter
        return True


Also = Annotated[
    list[str] | None,
    option(
        "Additional drafter that requests may name. Repeatable.\n\nsuffix and ngram are always available.",
        panel="Speculation",
        metavar="DRAFTER",
    ),
]


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The application for the options of `paceline serve`. Call `close` after it has stopped."""

    app: FastAPI
    models: Models
    has_keys: bool
    close: Callable[[], None]


def application(
    argument: ModelArgument = None,
    *,
    model: LoadFlags,
    server: ServerOptions,
    limits: LimitOptions,
    several: ModelsOptions,
    also: Also = None,
    quiet: Quiet = False,
) -> ServedModels:
    """Create the application of `serve`, for any ASGI server. `serve` has the same options."""
    began = time.perf_counter()
    has_first = argument is not None or model.model != DEMO or not several.models  # otherwise there is only --models
    model = model.with_model(argument)
    _check_installed()
    _check_learning(server, several, model)
    _set_up_logging(quiet)
    if has_first:
        note(f"loading {model.model}")
    from paceline.server.app import create_app
    from paceline.server.listen import check_address

    if follows():
        model.load(progress=False)  # never returns in such a process
    addresses = check_address(server.host, server.port)
    limits.folder()  # raise errors before a model is loaded
    warm = _warm_prompts(server, limits, has_first)
    if processes() > 1 and several.models:
        raise InvalidOption("several processes can share only one model", "Leave out --models")
    if server.record and several.models:
        raise InvalidOption("--record works only with one model", "Leave out --models")
    recorders: list[ReplyRecorder] = []
    settings = _settings(server, limits, addresses)
    opened = partial(_open_worker, also=also or [], limits=limits, server=server, recorders=recorders)
    warmed = partial(_warmed, opened, warm, settings)
    models = _models(model, has_first, server, several, opened, warmed, progress_wanted(quiet))

    def close() -> None:
        for recorder in recorders:
            recorder.close()

    app = create_app(models, settings)
    if has_first:
        note(f"loaded {model.model} in {time.perf_counter() - began:.1f} s")
    return ServedModels(app, models, bool(settings.api_keys), close)


@wraps(application, assigned=("__annotations__",))
def serve(**options: Any) -> None:
    """Serve models over OpenAI's API to many clients at once.

    MODEL is loaded before the server starts, and stays loaded. Models of --models are loaded when a request names them.
    """
    served, server, quiet = application(**options), options["server"], options["quiet"]
    from paceline.server.listen import run

    announce = partial(_announce, served.models, served.has_keys, quiet)
    run(served.app, served.models, server.host, server.port, server.grace, announce)
    served.close()


def _check_installed() -> None:
    """Raise `InvalidOption` if a package that only the server needs is missing."""
    missing = [module for module in ("fastapi", "uvicorn", "prometheus_client", "psutil") if not find_spec(module)]
    if missing:
        raise InvalidOption(f"the server needs {' and '.join(missing)}", f"Install it: {install_line('serve')}")


def _models(
    model: LoadFlags,
    has_first: bool,
    server: ServerOptions,
    several: ModelsOptions,
    opened: Callable[..., Worker],
    warmed: Callable[..., Worker],
    progress: bool,
) -> Models:
    """Return the models to serve: the model on the command line, if any, and the models of --models.

    Args:
        model: Options of the command line, which also apply to the models of --models.
        has_first: True if there is a model on the command line.
        server: Options of the server.
        several: Options for additional models.
        opened: Loads a model and makes its worker.
        warmed: The same for the model on the command line, which also reads prompts.
        progress: Show bars while the first model is loaded.

    Raises:
        ModelNotFound: If a folder of --models does not exist.
        InvalidOption: If there is no model.
    """
    from paceline.server.models import Models, ModelSource

    def on_request(name: str, path: Path, size: int) -> ModelSource:
        other = replace(model, model=str(path), adapter=None, revision=None, chat_template=None, mmproj=None)
        load = partial(opened, other, progress=False)
        return ModelSource((name,), load, int(size * _IN_MEMORY), path=path.resolve())

    sources = [on_request(found.name, found.path, found.size) for found in several.found()]
    if has_first:
        path = model.located() if sources and not parse_adapters(model.adapter or ())[0] else None
        sources.insert(0, _first(model, server, partial(warmed, model, progress=progress), path))
    if not sources:
        raise InvalidOption(
            f"there is no model in {', '.join(several.models or ())}", "Name a MODEL, or use another folder"
        )
    most = None if several.max_memory is None else int(several.max_memory * 2**30)
    return Models(
        sources,
        keep_alive=several.keep_alive if several.keep_alive >= 0 else None,
        max_memory=most,
        free_memory=free_memory,
        pull=partial(_pull, on_request, most) if set(several.models or ()) & set(_STORES) else None,
    )


def _settings(server: ServerOptions, limits: LimitOptions, addresses: Collection[str]) -> Settings:
    """Return the settings of a server that listens on these IP addresses."""
    from paceline.server.limits import Settings

    return Settings(
        api_keys=tuple(server.api_key or ()),
        hosts=server.hosts(addresses),
        cors_origins=tuple(server.cors or ()),
        max_body=limits.max_body,
        max_images=limits.max_images,
        max_image_bytes=limits.max_image_bytes,
        image_hosts=tuple(server.allow_image_urls or ()),
        max_prompt=limits.max_prompt,
        timeout=limits.timeout,
        log_prompts=server.log_prompts,
        trace_endpoint=server.traces,
    )


def _first(model: LoadFlags, server: ServerOptions, load: Callable[[], Worker], path: Path | None) -> ModelSource:
    """Return the source of the model on the command line."""
    from paceline.server.models import ModelSource

    names = dict.fromkeys(server.served_model_name or [Path(model.model).name])
    adapters = tuple(parse_adapters(model.adapter or ())[1])
    return ModelSource(tuple(names), load, stays=True, path=path and path.resolve(), adapters=adapters)


def _pull(
    served: Callable[[str, Path, int], ModelSource],
    most: int | None,
    name: str,
    progress: Callable[[str, int, int], None],
) -> ModelSource:
    """Download a GGUF file from the hub for /api/pull, without the operator's token.

    Args:
        served: Creates the source of a file by name, path and size.
        most: Maximum memory of the model in bytes. None means all memory.
        name: Name of the model.
        progress: Called with file name, bytes so far, and total bytes.
    """
    import psutil

    from paceline.files.gguf_names import parts_of
    from paceline.files.hub import hub_gguf
    from paceline.files.names import hub_name, similar_names

    if not (hub := hub_name(name.removesuffix(":latest"))):
        raise ModelNotFound(
            f"there is no model {name!r:.200}", f"Use {' or '.join(similar_names(name)) or 'a hub id like owner/name'}"
        )
    memory = psutil.virtual_memory().total if most is None else most
    path = hub_gguf(*hub, quiet=True, most=memory / _IN_MEMORY, token=False, progress=progress)
    parts = parts_of(path.name) or [path.name]
    return served(name, path, sum(path.with_name(part).stat().st_size for part in parts))


def _open_worker(
    model: LoadFlags,
    *,
    progress: bool,
    also: list[str],
    limits: LimitOptions,
    server: ServerOptions,
    recorders: list[ReplyRecorder],
) -> Worker:
    """Load a model with its drafters. The first drafter is the default."""
    from paceline.drafters.factory import FOUND, spec_name
    from paceline.engine.draft_policy import SPECULATION_OFF
    from paceline.server.worker import Worker

    off = model.drafter == "none"
    first = [] if off else [FOUND if model.drafter == "auto" else spec_name(model.drafter)]
    drafters = list(dict.fromkeys([*first, *also, *_WEIGHTLESS]))
    llm = model.load(progress=progress, drafter=drafters, **limits.folder())
    llm.adapter = None  # requests select their adapters
    llm.tokenizer.special_tokens_in_messages = server.special_tokens_in_messages
    if server.record:
        recorders.append(llm.record(server.record))
    learner = _learner(llm, model, server) if server.learn else None
    return Worker(llm, limits.worker_limits(llm), SPECULATION_OFF if off else None, learner)


def _check_learning(server: ServerOptions, several: ModelsOptions, model: LoadFlags) -> None:
    """Raise `InvalidOption` if --learn does not work with the other options."""
    if not server.learn:
        return
    others = {
        "--models": bool(several.models),
        "--record": bool(server.record),
        "--adapter": bool(model.adapter),
        "--drafter none": model.drafter == "none",
        "several processes": processes() > 1,
    }
    if named := [name for name, given in others.items() if given]:
        raise InvalidOption(f"--learn does not work with {named[0]}", "Leave out one of them")


def _learner(llm: LLM, model: LoadFlags, server: ServerOptions) -> Learner:
    """Return the learner for the traffic of a server with this model."""
    from paceline.learn.learner import Learner, LearningPlan

    assert server.learn
    names = ("dtype", "device", "kv_type", "quantize", "allow_pickle")
    plan = LearningPlan(
        server.learn,
        disk=int(_gibibytes("--learn-disk", server.learn_disk) * 2**30),
        load={name: getattr(model, name) for name in names},
        free_memory=free_memory,
    )
    note(f"learning in {plan.folder}, which stores prompts and replies")
    return Learner(llm, tuple(server.api_key or ()), plan)


def _warm_prompts(server: ServerOptions, limits: LimitOptions, has_first: bool) -> list[WarmPrompt]:
    """Read the files of --warm. Raise `InvalidOption` if a file is not valid, or no cache would keep the prompts."""
    if not server.warm:
        return []
    if limits.prefix_memory == 0 or not has_first:
        raise InvalidOption("--warm needs a MODEL and a prefix cache", "Name a model, and set --prefix-memory above 0")
    from paceline.server.warm import warm_prompt

    return [warm_prompt(path) for path in server.warm]


def _warmed(
    opened: Callable[..., Worker],
    prompts: Sequence[WarmPrompt],
    settings: Settings,
    model: LoadFlags,
    *,
    progress: bool,
) -> Worker:
    """Load a model, and read prompts into its prefix cache."""
    worker = opened(model, progress=progress)
    for warm in prompts:
        from paceline.server.warm import read_prompt

        began = time.perf_counter()
        count, known = read_prompt(worker, settings, warm)
        note(f"read {warm.path}: {count:,} tokens, {known:,} of them cached, in {time.perf_counter() - began:.1f} s")
    return worker


def _announce(models: Models, has_keys: bool, quiet: bool, address: str) -> None:
    """Print address, model, drafter and memory once the server listens. Warn if anyone can use it."""
    if quiet:
        return
    import psutil

    loaded = [model for source in models.sources if (model := models.get(source.names[0]))]
    about = ", ".join(f"{model.name} (drafter: {_default_drafter(model.worker)})" for model in loaded)
    if adapters := [name for source in models.sources for name in source.adapters]:
        about += f", with adapters {', '.join(adapters)},"
    others = len(models.sources) - len(loaded)
    if others:
        about += f"{' and ' if about else ''}{others} model{'s' * (others > 1)} on request"
    say(f"ready: {about} at {address}/v1 and in a browser at {address}/")
    cache = sum(model.worker.limits.cache_positions * position_bytes(model.llm) for model in loaded)
    prefixes = sum(model.worker.limits.prefix_bytes or 0 for model in loaded)
    memory = f"memory: {amount(psutil.Process().memory_info().rss, 'bytes')}"
    _announce_prefixes(loaded)
    memory += f", and at most {amount(cache, 'bytes')} for keys, values and states" if cache else ""
    say(memory + (f" and {amount(prefixes, 'bytes')} for cached prefixes" if prefixes else ""))
    if not has_keys and not address.startswith(("http://127.", "http://[::1]")):
        say("warning: anyone who can reach this address can use it; set --api-key")


def _announce_prefixes(loaded: Sequence[LoadedModel]) -> None:
    """Print folder, size and number of the prefixes on disk, if there is a folder."""
    prefixes = [model.llm.engine.prefixes for model in loaded]
    stores = [one.disk for one in prefixes if one is not None and one.disk]
    if stores:
        count, most = sum(len(store.texts) for store in stores), amount(stores[0].limit, "bytes")
        size = amount(stores[0].nbytes, "bytes")
        say(f"prefixes: {count} in {stores[0].folder}, which holds {size} of at most {most}")


def _default_drafter(worker: Worker) -> str:
    policy = worker.llm.engine.policies[worker.default.drafter]
    return policy.name if policy else "none"


def _set_up_logging(quiet: bool) -> None:
    """Log a line for each request, and errors, to stderr."""
    logging.basicConfig(format=LOG_FORMAT)
    log = logging.getLogger("paceline")
    if log.level != logging.DEBUG:  # --verbose
        log.setLevel(logging.ERROR if quiet else logging.INFO)
