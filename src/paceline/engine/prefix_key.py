"""Keys of cached texts on disk: hashes of everything, apart from the tokens, that affects the bits of a saved state.

A text on disk is used only if its key equals the key of the running model. If a key changes without need, the only cost
is that a prompt is prefilled again. If a key stayed the same although bits have changed, replies would change. So keys
include too much rather than too little:

- All weights in memory, after quantisation and merging, with the named adapters. The name, size and time of a file are
  not enough, because another model may have the same. Hashing a sample of the bytes would miss a change of one row.
  SHA-256 reads about 1 GB/s on each core, and the weights must be read once anyway.
- The model's config, which holds rotary options, windows and scales, and the class of the target.
- The sources of this package's caches, kernels and models, the code that cuts prompts into chunks, and the version of
  torch. A version number for the order of sums would have to be raised by hand, which could be forgotten. Hashing the
  sources needs no such care.
- The state after a short text, computed by a few layers. Its bits differ with dtypes, kernels and options of the cache.
- If torch computes the model: the instruction set and the number of threads that torch uses. Paceline's own CPU kernels
  return the same bits with any instruction set and any number of threads.

Chat templates and tokenizers need no place in the key. They act only through the token ids, which are compared with the
prompt one by one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from paceline.drafters.base import Drafter
from paceline.engine.prefix_file import bytes_of
from paceline.models.decoder import Decoder
from paceline.models.held import tensors_of
from paceline.protocols import Adaptable, Divisible, Target
from paceline.types import Want
from paceline.verify.tree import pack_prefix

_PROBE = 24
"""Number of tokens in the short text that `_probe` feeds."""

_known: WeakKeyDictionary[Target, str] = WeakKeyDictionary()
"""Keys of targets. A target is hashed once, before its first pass, because passes add tables to its tensors."""


def target_key(target: Target) -> str:
    """Return the key of a target's states, in hex."""
    if target not in _known:
        adapters = tuple(target.adapters) if isinstance(target, Adaptable) else ()
        config = getattr(getattr(target, "model", target), "config", None)  # transformers' models have their own
        about = type(target).__qualname__, config, adapters, sys.byteorder
        weights = _digest(tensors_of(target))
        _known[target] = _hash(_versions(target), about, weights, _digest(_probe(target)))
    return _known[target]


def drafter_key(drafter: Drafter, target: Target) -> str:
    """Return the key of a drafter's states, in hex, for the same target.

    Drafts do not decide the text, so the key covers only the class, the taps and the weights.
    """
    return _hash(type(drafter).__qualname__, drafter.taps, _digest(tensors_of(drafter, target)))


def _versions(target: Target) -> tuple[object, ...]:
    found: tuple[object, ...] = (_sources(), torch.__version__)
    if isinstance(target, Decoder) and target.runs_natively:
        return found
    name = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else str(target.device)
    transformers = getattr(sys.modules.get("transformers"), "__version__", None)
    return (*found, name, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), transformers)


@cache
def _sources() -> str:
    """Return the hash of all code that computes or stores states."""
    root = Path(__file__).parents[1]
    files = [
        path for folder in ("cache", "kernels", "models", "verify") for path in sorted((root / folder).rglob("*.*"))
    ]
    return _hash(*(path.read_bytes() for path in files if path.suffix in (".py", ".cpp", ".h")))


@torch.inference_mode()
def _probe(target: Target) -> Sequence[Tensor]:
    """Return the state after a short text, computed by the target's first layers if it has an excerpt."""
    part = target.excerpt() if isinstance(target, Divisible) else target
    count = min(_PROBE, part.context_length - 1)
    tokens = [(7 * i * i + 3) % part.vocab_size for i in range(count)]
    state = part.new_cache()
    slot = state.acquire(count)
    rows = pack_prefix(tokens, slot, 0, part.device)
    part.forward(rows, state, Want("none"))
    state.commit(rows, [range(1, count)])
    return state.save(slot).tensors


def _digest(tensors: Sequence[Tensor]) -> list[str]:
    """Return the hash of each tensor. Threads hash several at a time, because hashing releases the interpreter lock."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [*pool.map(_hash_tensor, tensors)]


def _hash_tensor(tensor: Tensor) -> str:
    tensor = tensor.to_dense() if tensor.is_mkldnn else tensor
    return _hash(tensor.dtype, tuple(tensor.shape), tensor.device, sha256(bytes_of(tensor)).hexdigest())


def _hash(*parts: object) -> str:
    return sha256(repr(parts).encode()).hexdigest()
