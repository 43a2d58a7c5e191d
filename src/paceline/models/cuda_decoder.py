"""A decoder that runs its passes as CUDA graphs, if possible."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from paceline.cache.attention import BLOCK
from paceline.kernels.cuda.cache import DeviceCache, Replay
from paceline.kernels.cuda.table import RowTable
from paceline.kernels.linear import FixedTile, linear_layers_from
from paceline.models.decoder import Decoder
from paceline.protocols import KVCache
from paceline.types import Forward, Rows, Want

SLOTS = (1, 2, 4, 8, 16, 32)
ROWS = (4, 8, 16, 32, 64, 128)
"""Sizes of the graphs, in rows. A pass uses the smallest graph that has room for it. A pass that is larger than all
graphs uses none."""

PATIENCE = 2
"""Number of passes of a size that run without a graph before a graph is recorded. A recording costs as much as several
passes."""

FIRST = 1 << 15
"""Number of positions for which rotary factors are computed at the start. Graphs contain memory addresses, so all
graphs must be recorded again when the table of factors grows."""

Capture = Callable[[Replay], Replay]
"""Converts a function on tensors at fixed addresses to a function that runs the same kernels on the tensors' current
contents."""


def cuda_graph(run: Replay) -> Replay:
    """Record the kernels of `run` as a CUDA graph. Before that, `run` is called once to compile and select its
    kernels."""
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
    """A `Decoder` that keeps lengths on the device (`DeviceCache`), and verifies with a CUDA graph for each size of
    pass.

    Some passes run without a graph: prompts, passes that resume where drafting stopped (`Rows.resume`, `Rows.starts`),
    early exits, and passes of other sizes.
    """

    _cache_type = DeviceCache

    def __init__(self, *args: Any, exact: bool = False, capture: Capture | None = cuda_graph) -> None:
        """Build the decoder.

        Args:
            *args: Arguments of `Decoder`.
            exact: True to use linear layers that compute each row independently of the other rows.
            capture: The function that records a graph. None to run without graphs.
        """
        with linear_layers_from(FixedTile) if exact else nullcontext():
            super().__init__(*args)
        config = self.config
        # If rotary factors depend on the prompt, there are several tables. A graph can refer to only one.
        fixed = all(layer.rope is None or layer.rope.kind not in ("dynamic", "longrope") for layer in config.plan)
        self._capture = capture if fixed else None
        if self._capture:
            self._stack.ropes.reserve(min(config.context_length, FIRST) + BLOCK)

    @torch.inference_mode()
    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        """See `protocols.Target.forward`."""
        size = _size(rows, want)
        # A graph computes positions from lengths. After images, the two differ.
        lags = any(cache.lags[slot] for slot in rows.slots)
        if self._capture is None or size is None or lags or not isinstance(cache, DeviceCache):
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
        # Copy these tensors, because the next replay overwrites them.
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
        """Run a pass over the current contents of the table.

        The graph ignores the fields of `Rows` that are on the host, except the highest position. The tables of rotary
        factors already cover that position.
        """
        zeros = (0,) * table.slots
        rows = Rows(table.tokens, table.positions(), zeros, zeros, ((),) * table.slots, zeros)
        return self._run(rows, 0, self.embed(rows.tokens), cache.over(table), zeros, want)


def _size(rows: Rows, want: Want) -> tuple[int, int] | None:
    """Return the size (slots, rows) of the smallest graph that has room for a pass, or None if the pass runs without a
    graph."""
    b, t = rows.tokens.shape
    if rows.prefill or rows.resume or any(rows.starts) or want.logits != "all" or want.layers is not None:
        return None
    slots = next((size for size in SLOTS if size >= b), None)
    count = next((size for size in ROWS if size >= t), None)
    return (slots, count) if slots and count else None
