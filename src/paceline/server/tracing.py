"""OpenTelemetry traces of replies (the extra "telemetry"). OpenTelemetry is imported only if an endpoint is given."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidOption, install_line
from paceline.server.worker import ReplyHandle

_FLUSH = 2.0
"""Maximum seconds to send the last spans, so that an unreachable collector does not keep the server from stopping."""


class Tracer:
    """Tracer that records nothing."""

    def for_request(self, headers: Mapping[str, str], model: str) -> Tracer:
        """Return the tracer for a request to a model. Its spans join the trace of the `traceparent` header."""
        return self

    def record(self, reply: ReplyHandle) -> None:
        """Record a reply that has ended."""

    def close(self) -> None:
        """Send spans that have not been sent."""


class SpanTracer(Tracer):
    """Tracer with four spans per reply: request, queue, prefill and decode, with OpenTelemetry's gen_ai attributes.

    The spans are made after the end of the reply, from its recorded times.
    """

    def __init__(self, provider: Any, model: str = "", parent: Any = None, began: int = 0) -> None:
        self._provider, self._model, self._parent, self._began = provider, model, parent, began

    def for_request(self, headers: Mapping[str, str], model: str) -> Tracer:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(dict(headers))
        return SpanTracer(self._provider, model, parent, time.time_ns())

    def record(self, reply: ReplyHandle) -> None:
        from opentelemetry.trace import set_span_in_context

        sampling = reply.job.sampling
        tracer, end = self._provider.get_tracer("paceline"), time.time_ns()

        def at(seconds: float | None) -> int:
            return end if seconds is None else min(end, self._began + int(1e9 * seconds))

        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": self._model,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.max_tokens": sampling.max_new_tokens,
            "gen_ai.usage.input_tokens": reply.job.prompt_tokens,
            "gen_ai.usage.output_tokens": reply.tokens,
            "gen_ai.response.finish_reasons": (reply.outcome,),
            "paceline.speculation.rounds": reply.stats.rounds,
            "paceline.speculation.drafted": reply.stats.drafted,
            "paceline.speculation.accepted": reply.stats.accepted,
        }
        span = tracer.start_span(f"chat {self._model}", self._parent, start_time=self._began, attributes=attributes)
        inside = set_span_in_context(span, self._parent)
        marks = (self._began, at(reply.queued), at(reply.first), end)
        for name, start, stop in zip(("queue", "prefill", "decode"), marks, marks[1:], strict=False):
            tracer.start_span(name, inside, start_time=min(start, stop)).end(stop)
        span.end(end)

    def close(self) -> None:
        shutdown = threading.Thread(target=self._provider.shutdown, daemon=True)
        shutdown.start()
        shutdown.join(_FLUSH)


def tracer(endpoint: str | None) -> Tracer:
    """Return a tracer that sends spans to `endpoint` (OTLP over HTTP, as in http://localhost:4318/v1/traces), or
    records nothing if that is None."""
    if endpoint is None:
        return Tracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidOption(
            "traces need OpenTelemetry, which is not installed", f"Install it: {install_line('telemetry')}"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "paceline"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return SpanTracer(provider)
