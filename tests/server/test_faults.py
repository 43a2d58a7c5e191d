"""The real server under maltreatment: see benchmarks/serve_faults.py."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
faults, servers, systems = import_module("serve_faults"), import_module("serve_servers"), import_module("serve_systems")

pytestmark = pytest.mark.model
COMMAND = servers.ours("--model demo --quantize int8")


@pytest.fixture(scope="module")
def site():
    with servers.Server("paceline serve", COMMAND) as server:
        found = faults.Site(server.port, systems.model_name(server.port))
        asyncio.run(found.probe())
        yield found


@pytest.mark.parametrize("fault", faults.CLIENTS, ids=lambda fault: fault.__name__)
def test_clients_that_misbehave_touch_nobody_else(site, fault):
    asyncio.run(faults.misbehave(site, fault))


def test_kill_and_restart():
    faults.killed(COMMAND)


def test_sigterm_lets_streams_finish():
    assert "4 of 4 streams finished" in faults.terminated(COMMAND, 40, 60.0)


def test_sigterm_ends_streams_within_its_deadline():
    faults.terminated([*COMMAND, "--grace", "1"], 2000, 60.0)
