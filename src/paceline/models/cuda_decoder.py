"""A decoder whose passes are CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from paceline.cache.attention import BLOCK
from paceline.kernels.cuda.cache import DeviceCache, Replay
from paceline.kernels.cuda.table import RowTable
from paceline.kernels.linear import FixedTile, products
from paceline.models.decoder import Decoder
from paceline.protocols import KVCache
from paceline.types import Forward, Rows, Want

SLOTS = (1, 2, 4, 8, 16, 32)
ROWS = (4, 8, 16, 32, 64, 128)
"""Sizes of graphs. A pass takes the smallest that holds it, and a pass larger than all of them runs without."""

PATIENCE = 2
"""Passes of one size before it gets a graph: recording one costs as much as several of them."""

FIRST = 1 << 15
"""Positions with rotary factors from the start. Graphs hold addresses: where later positions make the tables grow, new
graphs are recorded."""

Capture = Callable[[Replay], Replay]
"""From a function over tensors with fixed addresses to one that does the same to their later contents."""


def cuda_graph(run: Replay) -> Replay:
    """Record the kernels of `run`, after running it once to compile and choose them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> Forward:
        graph.replay()
        return out

    return replay


class DeviceDecoder(Decoder):
    """A `Decoder` that keeps lengths on the device (`DeviceCache`) and verifies by one graph per size of pass.

    Prompts, passes that resume where drafting stopped (`Rows.resume`, `Rows.starts`), early exits and sizes without a
    graph run kernel by kernel.
    """

    _cache_type = DeviceCache

    def __init__(self, *args: Any, exact: bool = False, capture: Capture | None = cuda_graph) -> None:
        """`args`: see `Decoder`. `exact`: products whose rows do not depend on each other. `capture`: None for no
        graphs."""
        with products(FixedTile) if exact else nullcontext():
            super().__init__(*args)
        config = self.config
        # Factors that follow the prompt have many tables.
        fixed = all(layer.rope is None or layer.rope.kind not in ("dynamic", "longrope") for layer in config.plan)
        self._capture = capture if fixed else None
        if self._capture:
            self._stack.ropes.reserve(min(config.context_length, FIRST) + BLOCK)

    @torch.inference_mode()
    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        """See `protocols.Target.forward`."""
        size = _size(rows, want)
        if self._capture is None or size is None or not isinstance(cache, DeviceCache):
            return super().forward(rows, cache, want)
        places = cache.places(rows, size[1])
        reach = self._stack.ropes.reserve(max(rows.lengths) + size[1])
        if reach != cache.reach:
            cache.reach = reach
            cache.graphs.clear()
        graph = self._graph(cache, size, want)
        if graph is None:
            return super().forward(rows, cache, want)
        table, replay = graph
        table.fill(rows, places)
        out = replay()
        # Copies, because the next run overwrites them.
        b, t = rows.tokens.shape
        return Forward(out.logits[:b, :t].clone(), {tap: x[:b, :t].clone() for tap, x in out.taps.items()})

    def _graph(self, cache: DeviceCache, size: tuple[int, int], want: Want) -> tuple[RowTable, Replay] | None:
        key = (size, want.taps)
        cache.passes[key] += 1
        if key not in cache.graphs and cache.passes[key] > PATIENCE and self._capture:
            table = RowTable(*size, size[1], self.device)
            cache.graphs[key] = table, self._capture(partial(self._run_table, table, cache, want))
        return cache.graphs.get(key)

    @torch.inference_mode()
    def _run_table(self, table: RowTable, cache: DeviceCache, want: Want) -> Forward:
        """A pass over the contents of the table at the time it runs. What `Rows` says on the host is not read, except
        for the highest position, which the tables of rotary factors reach already."""
        zeros = (0,) * table.slots
        rows = Rows(table.tokens, table.positions(), zeros, zeros, ((),) * table.slots, zeros)
        return self._run(rows, 0, self.embed(rows.tokens), cache.over(table), zeros, want)


def _size(rows: Rows, want: Want) -> tuple[int, int] | None:
    """Size of the smallest graph that holds a pass; None for a pass that runs without."""
    b, t = rows.tokens.shape
    if rows.prefill or rows.resume or any(rows.starts) or want.logits != "all" or want.layers is not None:
        return None
    slots = next((size for size in SLOTS if size >= b), None)
    count = next((size for size in ROWS if size >= t), None)
    return (slots, count) if slots and count else None
