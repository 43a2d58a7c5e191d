"""`paceline serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.commands import option, options_of
from paceline.cli.options import LoadOptions, ModelArgument, Quiet, progress_wanted
from paceline.errors import InvalidOption, install_line

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.recording.file import ReplyRecorder
    from paceline.server.worker import WorkerLimits

_server = options_of("Server")
_limit = options_of("Limits")
_WEIGHTLESS = ("suffix", "ngram")
"""Drafters that requests can always name: they have no weights."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Address of the server, and who may use it."""

    host: str = _server("Address to listen on; 0.0.0.0 is every interface.", metavar="HOST", default="127.0.0.1")
    port: int = _server("Port to listen on; 0: any free one.", "-p", min=0, max=65535, default=8000)
    served_model_name: list[str] | None = _server(
        "Name of the model in the API. Repeatable.\n\nClients may ask for any of the names; replies have the first.",
        metavar="NAME",
    )
    api_key: list[str] | None = _server(
        "Key that clients must send. Repeatable.\n\nThe environment is safer than the command line.",
        metavar="KEY",
        envvar="PACELINE_API_KEY",
        show_default=False,
    )
    allowed_host: list[str] | None = _server(
        "Further host name that requests may be addressed to. Repeatable.\n\nIt is needed only if the server "
        "listens on the loopback interface without a key.",
        metavar="NAME",
    )
    cors: list[str] | None = _server("Origin whose web pages may use the server. Repeatable.", metavar="ORIGIN")
    grace: float = _server("Seconds that active replies have to finish after SIGTERM.", min=0, default=20.0)
    log_prompts: bool = _server("Log requests with their prompts.", default=False)
    record: Path | None = _server(
        "Append all prompts and replies to this recording, for replay and tune.\n\nIt holds what users write, as "
        "token ids, and a new file can be read by its owner alone. Tell your users.",
        metavar="FILE",
    )
    traces: str | None = _server("Send OpenTelemetry traces to this OTLP/HTTP endpoint.", metavar="URL")

    @property
    def hosts(self) -> list[str]:
        """Host names that requests may be addressed to; empty: any. See `Settings.hosts`."""
        local = self.host == "localhost" or self.host.startswith("127.") or self.host == "::1"
        if self.api_key or not local:
            return []
        return ["localhost", "127.0.0.1", "::1", self.host, *(name.lower() for name in self.allowed_host or ())]


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """Bounds of memory, requests and time."""

    slots: int = _limit("Replies generated at the same time.", min=1, default=32)
    queue: int = _limit("Replies that may wait; further requests get status 429.", min=0, default=128)
    prefill: int = _limit(
        "Prompt tokens to prefill between two rounds.\n\nMore favours new requests, less favours active ones.",
        min=1,
        default=128,
    )
    cache_memory: float | None = _limit(
        "GiB for keys and values.", min=0.001, show_default="a quarter of the free memory"
    )
    prefix_memory: float = _limit("GiB for the prefix cache; 0: off.", min=0, default=1.0)
    max_prompt: int | None = _limit("Maximum length of a prompt, in tokens.", min=1, show_default="the model's context")
    max_body: int = _limit("Maximum size of a request, in bytes.", min=1, default=4 << 20)
    timeout: float | None = _limit(
        "Seconds from the arrival of a request to the end of its reply.", min=0.001, show_default="none"
    )

    def worker_limits(self, llm: LLM) -> WorkerLimits:
        """Return the limits of a worker that runs this model."""
        from paceline.server.worker import WorkerLimits

        positions = _cache_positions(llm, self.cache_memory)
        return WorkerLimits(self.slots, self.queue, positions, self.prefill, int(self.prefix_memory * 2**30))


def serve(
    argument: ModelArgument = None,
    *,
    model: LoadOptions,
    server: ServerOptions,
    limits: LimitOptions,
    also: Annotated[
        list[str] | None,
        option(
            "Further drafter that requests may name. Repeatable.\n\nsuffix and ngram are always available.",
            panel="Speculation",
            metavar="DRAFTER",
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Serve a model over OpenAI's API to many clients at once."""
    model = model.with_model(argument)
    missing = [module for module in ("fastapi", "uvicorn", "prometheus_client", "psutil") if not find_spec(module)]
    if missing:
        raise InvalidOption(f"the server needs {' and '.join(missing)}", f"Install it: {install_line('serve')}")
    _set_up_logging(quiet)
    from paceline.drafters.factory import spec_name
    from paceline.engine.draft_policy import Speculation
    from paceline.server.app import create_app
    from paceline.server.limits import Settings
    from paceline.server.listen import check_address, run
    from paceline.server.models import Models, ModelSource
    from paceline.server.worker import Worker

    check_address(server.host, server.port)
    drafter = None if model.drafter == "none" else spec_name(model.drafter)
    drafters = list(dict.fromkeys([*([drafter] if drafter else []), *(also or []), *_WEIGHTLESS]))

    def open_worker() -> Worker:
        llm = model.load(progress=progress_wanted(quiet), drafter=drafters)
        if server.record:
            recorders.append(llm.record(server.record))
        return Worker(llm, limits.worker_limits(llm), Speculation(drafter))

    recorders: list[ReplyRecorder] = []
    names = tuple(dict.fromkeys(server.served_model_name or [Path(model.model).name]))
    models = Models([ModelSource(names, open_worker, stays=True)])
    settings = Settings(
        api_keys=tuple(server.api_key or ()),
        hosts=server.hosts,
        cors_origins=tuple(server.cors or ()),
        max_body=limits.max_body,
        max_prompt=limits.max_prompt,
        timeout=limits.timeout,
        log_prompts=server.log_prompts,
        trace_endpoint=server.traces,
    )
    announce = partial(_announce, names[0], drafter or "none", bool(settings.api_keys), quiet)
    run(create_app(models, settings), models, server.host, server.port, server.grace, announce)
    for recorder in recorders:
        recorder.close()


def _announce(model: str, drafter: str, has_keys: bool, quiet: bool, address: str) -> None:
    """Print the address once the server listens, with a warning if it is open to everybody."""
    if quiet:
        return
    typer.echo(f"{model} (drafter: {drafter}) at {address}/v1 and in a browser at {address}/", err=True)
    if not has_keys and not address.startswith(("http://127.", "http://[::1]")):
        typer.echo("warning: anyone who can reach this address can use it; set --api-key", err=True)


def _set_up_logging(quiet: bool) -> None:
    """Log a line per request, and errors, to stderr."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("paceline").setLevel(logging.ERROR if quiet else logging.INFO)


def _cache_positions(llm: LLM, memory: float | None) -> int:
    """Return the positions whose keys and values fit into `memory` GiB, or into a quarter of the free memory."""
    import psutil
    import torch

    from paceline.cache.state import CHECKPOINT
    from paceline.models.decoder import Decoder

    target = llm.model.target
    if not isinstance(target, Decoder):
        return 1 << 20
    # States do not grow with a text, but their checkpoints do: counted as two for each.
    states = 2 * target.config.state_bytes / CHECKPOINT
    device, position = target.device, target.config.cache_bytes(1, target.dtype.itemsize) + states
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return max(1, int((free / 4 if memory is None else memory * 2**30) / position))
