"""A Ray cluster on this machine with a tiny model, started from deploy/ray-serve.yaml."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from tests.support.running import Serving
from tests.support.server_process import free_port

DEPLOY = Path(__file__).parents[2] / "deploy"


class Replicas(Serving):
    """A deployed application, and clients for it."""

    def __init__(self, address: str, config: dict[str, Any]) -> None:
        super().__init__(httpx.Client(base_url=address, timeout=120))
        self._config = config

    def deploy(self, least: int, most: int, options: dict[str, Any] | None = None, **arguments: Any) -> None:
        """Deploy deploy/ray-serve.yaml with this number of half-core replicas, and wait until the minimum runs.

        `options` are for the deployment `Replica`, and `arguments` for the application.
        """
        (application,) = self._config["applications"]
        application["args"] |= arguments
        front, replica = application["deployments"]
        front["ray_actor_options"]["num_cpus"] = 0.1
        replica |= {"ray_actor_options": {"num_cpus": 0.5}, **(options or {})}
        replica["autoscaling_config"] = replica["autoscaling_config"] | {"min_replicas": least, "max_replicas": most}
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(self._config))
        self.wait(lambda: least <= self.running() <= most)

    def running(self) -> int:
        """Number of running replicas, or 0 during changes."""
        about = serve.status().applications.get("paceline")
        if about is None or about.status != "RUNNING" or about.deployments["Replica"].status != "HEALTHY":
            assert about is None or about.status != "DEPLOY_FAILED", about.message
            return 0
        states = about.deployments["Replica"].replica_states
        return 0 if set(states) - {"RUNNING"} else states["RUNNING"]

    @staticmethod
    def names() -> list[str]:
        """Return the router's names of the replicas."""
        actors = (str(actor["name"]) for actor in ray.util.list_named_actors(all_namespaces=True))
        return [name.rpartition("#")[2] for name in actors if "#Replica#" in name]

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the replicas."""
        found = psutil.Process().children(recursive=True)
        return [process for process in found if "Replica:paceline:Replica" in _title(process)]

    @staticmethod
    def wait(done: Callable[[], bool], seconds: float = 240) -> None:
        """Wait until `done` returns True."""
        until = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < until, f"not done within {seconds:g} s"
            time.sleep(0.1)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextmanager
def cluster() -> Iterator[tuple[Replicas, int]]:
    """Yield replicas that are not deployed yet, and the port of Ray's metrics."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    metrics = free_port()
    nodes = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "object_store_memory": 100 << 20,
            "include_dashboard": False,
            "metrics_export_port": metrics,
        },
    )
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    try:
        config = yaml.safe_load((DEPLOY / "ray-serve.yaml").read_text())
        config["http_options"] = {"host": "127.0.0.1", "port": free_port()}
        serve.start(http_options=config["http_options"])
        yield Replicas(f"http://127.0.0.1:{config['http_options']['port']}", config), metrics
    finally:
        serve.shutdown()
        ray.shutdown()
        nodes.shutdown()
