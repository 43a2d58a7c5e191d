"""The real server under faults of clients and of the machine: see faults.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.support import faults
from tests.support.server_process import ServerProcess, paceline_serve

pytestmark = [pytest.mark.model, pytest.mark.slow]
COMMAND = paceline_serve("--model demo --quantize int8")


@pytest.fixture(scope="module")
def target() -> Iterator[faults.FaultTarget]:
    with ServerProcess("paceline serve", COMMAND) as server:
        found = faults.FaultTarget(server.port, server.model())
        asyncio.run(found.probe())
        yield found


@pytest.mark.parametrize("fault", faults.CLIENT_FAULTS, ids=lambda fault: fault.__name__)
def test_faulty_clients_do_not_affect_others(target, fault):
    asyncio.run(faults.inject(target, fault))


def test_kill_and_restart():
    faults.killed(COMMAND)


def test_sigterm_lets_streams_finish():
    assert faults.terminated(COMMAND, 40, 60.0) == 4


def test_sigterm_ends_streams_within_its_deadline():
    faults.terminated([*COMMAND, "--grace", "1"], 2000, 60.0)
