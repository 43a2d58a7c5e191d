"""Toy targets and drafters, and checks for your own targets and drafters (docs/how-to/own-drafter.md, own-target.md).

They are small enough to compare token by token, and real enough to fail.
"""

from __future__ import annotations

from paceline.testing.block import TINY_BLOCK, block_tensors
from paceline.testing.drafters import Oracle, check_drafter
from paceline.testing.heads import eagle_config, eagle_tensors
from paceline.testing.medusa import TINY_MEDUSA, fitted_medusa, medusa_tensors
from paceline.testing.targets import check_target
from paceline.testing.tiny import TINY, random_tensors, run, run_together, tensor_shapes, tiny_target
from paceline.testing.toy import ListCache, ToyTarget

__all__ = [
    "TINY",
    "TINY_BLOCK",
    "TINY_MEDUSA",
    "ListCache",
    "Oracle",
    "ToyTarget",
    "block_tensors",
    "check_drafter",
    "check_target",
    "eagle_config",
    "eagle_tensors",
    "fitted_medusa",
    "medusa_tensors",
    "random_tensors",
    "run",
    "run_together",
    "tensor_shapes",
    "tiny_target",
]
