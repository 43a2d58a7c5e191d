"""Environment variables that torch reads when it is imported, so they must be set before that.

A variable that the user has set keeps its value.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

RUNNING: Mapping[str, str] = {"GOMP_SPINCOUNT": "10000"}
"""Variables for every process that runs a model.

torch's threads spin while they wait, and so take cores away from other programs: a pass of 25 ms then took a second.
About 10 us of spinning cost nothing (docs/notes/kernels.md#idle-threads).
"""

TRAINING: Mapping[str, str] = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""Variables for processes that also train.

oneDNN caches prepared matrix multiplications for the last 1024 shapes of each kind, at a few MB each. Batches hardly
ever have the same shape, so the cache grew to 5 GB in half an hour. Preparing a matrix multiplication again costs
little compared with computing it.
"""


def set_unless_given(variables: Mapping[str, str]) -> None:
    """Set the environment variables that are not set yet."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
