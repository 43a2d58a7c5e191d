"""Speculative decoding of local language models: the same text in less time.

    import paceline
    llm = paceline.load("demo")
    print(llm.generate("Why is the sky blue?").text)

Names are imported on first use, so that `import paceline` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from paceline.files.gc_pause import gc_paused

__version__ = "0.1.0"

if TYPE_CHECKING:
    from paceline.checkpoints.adapters import Adapter
    from paceline.drafters.base import Ask, Drafter
    from paceline.engine.detokenizer import Chunk, Logprobs
    from paceline.engine.results import Batch, Completion, Stream
    from paceline.engine.stats import Stats
    from paceline.errors import PacelineError
    from paceline.llm import LLM, load
    from paceline.sampling.grammar import Grammar
    from paceline.sampling.parameters import Sampling
    from paceline.session import Session, Snapshot
    from paceline.speculation import speculate
    from paceline.types import Draft, DraftBudget, Verdict
    from paceline.verify.rejection import acceptance_step, residual

_NAMES = {
    "checkpoints.adapters": ("Adapter",),
    "drafters.base": ("Ask", "Drafter"),
    "engine.detokenizer": ("Chunk", "Logprobs"),
    "engine.results": ("Batch", "Completion", "Stream"),
    "engine.stats": ("Stats",),
    "errors": ("PacelineError",),
    "llm": ("LLM", "load"),
    "sampling.grammar": ("Grammar",),
    "sampling.parameters": ("Sampling",),
    "session": ("Session", "Snapshot"),
    "speculation": ("speculate",),
    "types": ("Draft", "DraftBudget", "Verdict"),
    "verify.rejection": ("acceptance_step", "residual"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "LLM",
    "Adapter",
    "Ask",
    "Batch",
    "Chunk",
    "Completion",
    "Draft",
    "DraftBudget",
    "Drafter",
    "Grammar",
    "Logprobs",
    "PacelineError",
    "Sampling",
    "Session",
    "Snapshot",
    "Stats",
    "Stream",
    "Verdict",
    "acceptance_step",
    "load",
    "residual",
    "speculate",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        with gc_paused():
            module = import_module(f"paceline.{_HOME[name]}")
        return getattr(module, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
