"""OpenTelemetry traces of replies (the extra "telemetry"): off unless an endpoint is given, and not imported then."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidOption, install_line
from paceline.server.worker import ReplyJob, ReplyStream

_LAST = 2.0
"""Seconds that the last spans may take to be sent; a collector that is away must not keep the server from ending."""


class Tracer:
    """Records nothing."""

    def of(self, headers: Mapping[str, str]) -> Tracer:
        """For one request: its spans belong to the trace that its `traceparent` header names."""
        return self

    def replied(self, job: ReplyJob, reply: ReplyStream, first: float | None, tokens: int, outcome: str) -> None:
        """A reply is over. `first`: seconds from its submission to its first token, if one came."""

    def close(self) -> None:
        """Send what has not been sent."""


class Spans(Tracer):
    """Four spans per reply: the request, its wait in the queue, prefill and decode, with OpenTelemetry's gen_ai names.

    They are written down when the reply is over, with the times it had.
    """

    def __init__(self, model: str, provider: Any, parent: Any = None, began: int = 0) -> None:
        self._model, self._provider, self._parent, self._began = model, provider, parent, began

    def of(self, headers: Mapping[str, str]) -> Tracer:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(dict(headers))
        return Spans(self._model, self._provider, parent, time.time_ns())

    def replied(self, job: ReplyJob, reply: ReplyStream, first: float | None, tokens: int, outcome: str) -> None:
        from opentelemetry.trace import set_span_in_context

        tracer, end = self._provider.get_tracer("paceline"), time.time_ns()

        def at(seconds: float | None) -> int:
            return end if seconds is None else min(end, self._began + int(1e9 * seconds))

        about = _about(job, reply, tokens, outcome) | {"gen_ai.request.model": self._model}
        span = tracer.start_span(f"chat {self._model}", self._parent, start_time=self._began, attributes=about)
        inside = set_span_in_context(span, self._parent)
        marks = (self._began, at(reply.queued), at(first), end)
        for name, start, stop in zip(("queue", "prefill", "decode"), marks, marks[1:], strict=False):
            tracer.start_span(name, inside, start_time=min(start, stop)).end(stop)
        span.end(end)

    def close(self) -> None:
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(_LAST)


def _about(job: ReplyJob, reply: ReplyStream, tokens: int, outcome: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.temperature": job.sampling.temperature,
        "gen_ai.request.top_p": job.sampling.top_p,
        "gen_ai.request.max_tokens": job.sampling.max_new_tokens,
        "gen_ai.usage.input_tokens": len(job.tokens),
        "gen_ai.usage.output_tokens": tokens,
        "gen_ai.response.finish_reasons": (outcome,),
    }
    named = ("rounds", "drafted", "accepted")
    return found | {f"paceline.speculation.{name}": getattr(reply.stats, name) for name in named}


def tracer(model: str, endpoint: str | None) -> Tracer:
    """Sends spans to `endpoint` (OTLP over HTTP, as in http://localhost:4318/v1/traces); None: records nothing."""
    if endpoint is None:
        return Tracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidOption(
            "traces take OpenTelemetry, which is not installed", f"Install it: {install_line('telemetry')}"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "paceline"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Spans(model, provider)
