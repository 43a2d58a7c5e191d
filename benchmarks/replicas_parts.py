"""Measure the costs of replicas on Ray on this machine, as CPU time by process, for `replicas.py`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common  # noqa: F401, makes tests importable
import psutil
from ray import serve
from tests.support.replicas import Replicas, cluster
from tests.support.server_process import ServerProcess, paceline_serve
from tests.support.tiny_model import write_tiny

_KINDS = {
    "Replica:paceline:Replica": "replica",
    "Replica:paceline:Front": "front",
    "ProxyActor": "proxy",
    "ServeController": "controller",
}
_REQUESTS, _TOKENS, _IDLE = 150, 1500, 15.0


def seconds() -> dict[str, float]:
    """Return the CPU seconds of all processes so far, by kind."""
    found = dict.fromkeys(_KINDS.values(), 0.0)
    for process in psutil.Process().children(recursive=True):
        try:
            title, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:
            continue
        for part, kind in _KINDS.items():
            if part in title:
                found[kind] += times.user + times.system
    return found


def spent(work: Callable[[], Any]) -> dict[str, float]:
    """Return the CPU seconds that `work` takes, by kind of process."""
    before = seconds()
    work()
    return {kind: after - before[kind] for kind, after in seconds().items()}


def body(text: str, tokens: int, **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": text}]
    return {"messages": said, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **more}


def short(replicas: Any) -> None:
    for i in range(_REQUESTS):
        assert replicas.post("/v1/chat/completions", body(str(i), 1)).status_code == 200


def long(replicas: Any) -> int:
    """Stream one reply. Return the number of its events."""
    answer = replicas.post("/v1/chat/completions", body("hello", _TOKENS, stream=True, speculation="off"))
    return int(answer.text.count("data: "))


class Idle:
    """A replica that does nothing."""

    def __call__(self) -> None:
        pass


def idle(count: int) -> float:
    """Return the CPU seconds per second that the controller needs for `count` idle replicas."""
    app = serve.deployment(Idle, num_replicas=count, ray_actor_options={"num_cpus": 0.05}).bind()
    serve.run(app, name="idle", route_prefix="/idle")
    time.sleep(5)
    return spent(lambda: time.sleep(_IDLE))["controller"] / _IDLE


def measure() -> dict[str, float]:
    """Return the costs by name."""
    parts: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, cluster() as (replicas, _):
        model = write_tiny(Path(folder) / "tiny")
        replicas.deploy(1, 1, model=str(model))
        began = time.monotonic()
        replicas.deploy(2, 2)
        parts["seconds to scale from 1 to 2 replicas"] = time.monotonic() - began
        short(replicas)
        for kind, used in spent(lambda: short(replicas)).items():
            parts[f"{kind}: CPU ms per request"] = used / _REQUESTS * 1e3
        events: list[int] = []
        for kind, used in spent(lambda: events.append(long(replicas))).items():
            parts[f"{kind}: CPU us per stream event"] = used / events[-1] * 1e6
        parts.update(without_ray(model))
        few, many = idle(2), idle(14)
        parts["controller: CPU ms per second and replica"] = round((many - few) / 12 * 1e3, 2)
        parts["controller: CPU ms per second, without replicas"] = few * 1e3
    return parts


def without_ray(model: Path) -> dict[str, float]:
    """Measure the same requests to one server without Ray."""
    with ServerProcess("paceline serve", paceline_serve(f"--model {model} --drafter suffix --quiet")) as server:
        replicas = Replicas(f"http://127.0.0.1:{server.port}", {})
        short(replicas)
        began = server.processor_seconds
        short(replicas)
        per_request = (server.processor_seconds - began) / _REQUESTS
        began = server.processor_seconds
        events = long(replicas)
        per_event = (server.processor_seconds - began) / events
    return {
        "without Ray: CPU ms per request": per_request * 1e3,
        "without Ray: CPU us per stream event": per_event * 1e6,
    }
