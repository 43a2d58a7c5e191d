"""`paceline serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from paceline.cli.options import LoadOptions, NamedModel, Quiet, parse_draft, progress_wanted
from paceline.errors import InvalidOption, install_line

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.server.worker import WorkerLimits

T = TypeVar("T")

_SERVER, _LIMITS = "Server", "Limits"
_FREE = ("suffix", "ngram")
"""Drafters that requests can always name: they hold no weights."""


@dataclass(frozen=True, slots=True)
class AddressOptions:
    """Where the server is, and who may ask."""

    host: Annotated[
        str, typer.Option("--host", help="Where to listen; 0.0.0.0 is everywhere.", rich_help_panel=_SERVER)
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="0 takes a free one.", rich_help_panel=_SERVER)
    ] = 8000
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME",
            help="The model's name in the API; may be repeated: clients may ask for any, and replies have the first.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key",
            envvar="PACELINE_API_KEY",
            show_default=False,
            help="Ask for this key; may be repeated. Better in the environment than on the command line.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host",
            metavar="NAME",
            help="One more name that requests may be addressed to, where the server is on the loopback without a key; "
            "may be repeated.",
            rich_help_panel=_SERVER,
        ),
    ] = None
    cors: Annotated[
        list[str] | None,
        typer.Option(
            "--cors", metavar="ORIGIN", help="Let pages of this origin ask; may be repeated.", rich_help_panel=_SERVER
        ),
    ] = None
    grace: Annotated[
        float,
        typer.Option("--grace", min=0, help="Seconds that replies have to end at SIGTERM.", rich_help_panel=_SERVER),
    ] = 20.0
    log_prompts: Annotated[
        bool,
        typer.Option("--log-prompts", help="Write requests, prompts included, into the log.", rich_help_panel=_SERVER),
    ] = False
    traces: Annotated[
        str | None,
        typer.Option(
            "--traces", metavar="URL", help="Send OpenTelemetry traces there (OTLP/HTTP).", rich_help_panel=_SERVER
        ),
    ] = None

    def names(self, model: str) -> list[str]:
        """Names of the model in the API: its own unless others are given."""
        return list(dict.fromkeys(self.served_model_name or [Path(model).name]))

    @property
    def hosts(self) -> list[str]:
        """What requests may be addressed to; empty: anything. See `Settings.hosts`."""
        local = self.host == "localhost" or self.host.startswith("127.") or self.host == "::1"
        if self.api_key or not local:
            return []
        return ["localhost", "127.0.0.1", "::1", self.host, *(name.lower() for name in self.allowed_host or ())]


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """What is held and taken at most."""

    slots: Annotated[
        int, typer.Option("--slots", min=1, help="Replies that share rounds.", rich_help_panel=_LIMITS)
    ] = 32
    queue: Annotated[
        int, typer.Option("--queue", min=0, help="Replies that may wait; then 429.", rich_help_panel=_LIMITS)
    ] = 128
    prefill: Annotated[
        int,
        typer.Option(
            "--prefill",
            min=1,
            help="Tokens of prompts fed between two rounds: higher favours new requests, lower favours running ones.",
            rich_help_panel=_LIMITS,
        ),
    ] = 128
    cache_memory: Annotated[
        float | None,
        typer.Option(
            "--cache-memory",
            min=0.001,
            help="GiB for keys and values; without it, a quarter of the memory that is free.",
            rich_help_panel=_LIMITS,
        ),
    ] = None
    prefix_memory: Annotated[
        float,
        typer.Option(
            "--prefix-memory", min=0, help="GiB for beginnings that come again; 0: off.", rich_help_panel=_LIMITS
        ),
    ] = 1.0
    max_prompt: Annotated[
        int | None,
        typer.Option("--max-prompt", min=1, help="Maximum prompt length in tokens.", rich_help_panel=_LIMITS),
    ] = None
    max_body: Annotated[
        int, typer.Option("--max-body", min=1, help="Bytes of a request at most.", rich_help_panel=_LIMITS)
    ] = 4 << 20
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0.001,
            help="Seconds that a reply may take, counted from the request's arrival.",
            rich_help_panel=_LIMITS,
        ),
    ] = None

    def seats(self, llm: LLM) -> WorkerLimits:
        from paceline.server.worker import WorkerLimits

        positions = _positions(llm, self.cache_memory)
        return WorkerLimits(self.slots, self.queue, positions, self.prefill, int(self.prefix_memory * 2**30))


def serve(
    argument: NamedModel = None,
    *,
    model: LoadOptions,
    address: AddressOptions,
    limits: LimitOptions,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also",
            help="One more drafter that requests may name; may be repeated. suffix and ngram always can be.",
            rich_help_panel="Speculation",
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Serve a model to many clients at once, over OpenAI's API, with speculation."""
    model = model.named(argument)
    _check_installed()
    _log(quiet)
    from paceline.drafters.factory import spec_name
    from paceline.engine.draft_policy import Speculation
    from paceline.server.app import create_app
    from paceline.server.limits import Settings
    from paceline.server.listen import check_address, run
    from paceline.server.worker import Worker

    check_address(address.host, address.port)
    drafter = None if model.drafter == "none" else spec_name(model.drafter)
    default = Speculation(drafter)
    named = [drafter] if drafter else []
    names = list(dict.fromkeys([*named, *(also or []), *_FREE]))

    def prepare() -> tuple[LLM, Worker]:
        llm = _load(model, names, progress_wanted(quiet))
        return llm, Worker(llm, limits.seats(llm), default)

    llm, worker = _aside(prepare)
    name, *aliases = address.names(model.model)
    settings = Settings(
        model=name,
        aliases=aliases,
        api_keys=tuple(address.api_key or ()),
        hosts=address.hosts,
        cors_origins=tuple(address.cors or ()),
        max_body=limits.max_body,
        max_prompt=limits.max_prompt,
        timeout=limits.timeout,
        log_prompts=address.log_prompts,
        trace_endpoint=address.traces,
    )
    say = partial(_ready, settings.model, drafter or "none", len(settings.api_keys), quiet)
    run(create_app(worker, llm, settings), worker, address.host, address.port, address.grace, say)


def _aside(work: Callable[[], T]) -> T:
    """In a thread of its own, which ends.

    Whoever computes with torch gets a pool of threads for life, and where all pools together are more than there are
    cores OpenMP puts threads to sleep at every barrier: a pool of the main thread's would cost the engine's nearly half
    of its speed, wherever torch runs the layers.
    """
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(work).result()


def _ready(model: str, drafter: str, keys: int, quiet: bool, address: str) -> None:
    if not quiet:
        typer.echo(f"{model} (drafter: {drafter}) at {address}/v1 and in a browser at {address}/", err=True)
        if not keys and not address.startswith(("http://127.", "http://[::1]")):
            typer.echo("Anybody who can reach this address can use it: there is no --api-key.", err=True)


def _log(quiet: bool) -> None:
    """A line per request, and what goes wrong, on stderr."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("paceline").setLevel(logging.ERROR if quiet else logging.INFO)


def _check_installed() -> None:
    missing = [module for module in ("fastapi", "uvicorn", "prometheus_client", "psutil") if not find_spec(module)]
    if missing:
        raise InvalidOption(f"the server needs {' and '.join(missing)}", f"Install it: {install_line('serve')}")


def _load(model: LoadOptions, names: list[str], progress: bool) -> LLM:
    """The model with all its drafters."""
    modes = {"quantize": model.quantize, "draft_quantize": model.draft_quantize}
    return model.open(progress=progress, drafter=names, draft=parse_draft(model.draft), **modes)


def _positions(llm: LLM, memory: float | None) -> int:
    """How many positions of keys and values fit so many GiB, or a quarter of what is free."""
    import psutil
    import torch

    from paceline.models.decoder import Decoder

    target = llm.model.target
    if not isinstance(target, Decoder):
        return 1 << 20
    device, one = target.device, target.config.cache_bytes(1, target.dtype.itemsize)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return max(1, int((free / 4 if memory is None else memory * 2**30) / one))
