"""Toy targets and drafters, and checks for your own targets and drafters (docs/how-to/own-drafter.md, own-target.md).

They are small enough to compare token by token, but they exercise the real engine, cache and sampler.
"""

from __future__ import annotations

from paceline.testing.drafters import Oracle, check_drafter
from paceline.testing.targets import check_target
from paceline.testing.tiny import TINY, random_tensors, run, run_together, tensor_shapes, tiny_target
from paceline.testing.toy import ListCache, ToyTarget

__all__ = [
    "TINY",
    "ListCache",
    "Oracle",
    "ToyTarget",
    "check_drafter",
    "check_target",
    "random_tensors",
    "run",
    "run_together",
    "tensor_shapes",
    "tiny_target",
]
