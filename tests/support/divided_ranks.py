"""Processes that share a model. They are forked from one server, which has imported torch once."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support import divided_worker
from tests.support.server_process import free_port

_PROCESSES = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Ended:
    """The exit status of a process, and its output."""

    returncode: int
    stdout: str
    stderr: str


def run_ranks(*arguments: str, count: int = 2, shared_memory: bool = True) -> list[Ended]:
    """Run the worker in one process per rank. Return the results in the order of the ranks."""
    _PROCESSES.set_forkserver_preload([divided_worker.__name__])
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count if shared_memory else 1),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    with tempfile.TemporaryDirectory() as folder:
        paths = [(Path(folder) / f"{rank}.out", Path(folder) / f"{rank}.err") for rank in range(count)]
        ranks = [
            _PROCESSES.Process(target=_work, args=(shared | {"RANK": str(rank)}, arguments, *paths[rank]))
            for rank in range(count)
        ]
        for rank in ranks:
            rank.start()
        try:
            for rank in ranks:
                rank.join(120)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        return [
            Ended(rank.exitcode or 0, out.read_text(), err.read_text())
            for rank, (out, err) in zip(ranks, paths, strict=True)
        ]


def _work(environment: dict[str, str], arguments: tuple[str, ...], out: Path, err: Path) -> None:
    """Run as one rank, with output to files."""
    for path, stream in ((out, sys.stdout), (err, sys.stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.environ.update(environment)
    try:
        divided_worker.main(*arguments)
    finally:
        atexit._run_exitfuncs()  # multiprocessing skips exit handlers, and rank 0 ends the others in one
