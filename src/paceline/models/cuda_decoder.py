"""A decoder whose passes are CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.cache.attention import BLOCK
from paceline.kernels.cuda.cache import DeviceCache, DevicePass, Replay
from paceline.kernels.cuda.product import FixedTile
from paceline.kernels.cuda.table import RowTable
from paceline.kernels.linear import products
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder, Progress
from paceline.protocols import KVCache
from paceline.types import Forward, Rows, Want

SLOTS = (1, 2, 4, 8, 16, 32)
ROWS = (4, 8, 16, 32, 64, 128)
"""Sizes of graphs. A pass takes the smallest that holds it, and a pass larger than all of them runs without."""

PATIENCE = 2
"""Passes of one size before it gets a graph: making one costs as much as several of them."""

Capture = Callable[[Replay], Replay]
"""From a function over tensors that stay where they are to one that does the same to their contents, later on."""


def cuda_graph(run: Replay) -> Replay:
    """Records the kernels of `run`, once it has been run to compile and choose them."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> Forward:
        graph.replay()
        return out

    return replay


class DeviceDecoder(Decoder):
    """A `Decoder` that keeps lengths on the device (`DeviceCache`), and verifies by one graph per size of pass.

    Prompts, passes that go on where drafting stopped (`Rows.resume`, `Rows.starts`), those of some layers only and
    those of sizes that no graph has run kernel by kernel.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress = lambda done, total: None,
        *,
        exact: bool = False,
        capture: Capture | None = cuda_graph,
    ) -> None:
        """`exact`: products whose rows do not depend on each other. `capture`: None for no graphs."""
        with products(FixedTile) if exact else nullcontext():
            super().__init__(config, tensors, dtype, device, progress)
        # A table that grows would leave its old address to the graphs; one that follows the prompt has many.
        fixed = all(layer.rope is None or layer.rope.kind not in ("dynamic", "longrope") for layer in config.plan)
        self._capture = capture if fixed else None
        if self._capture:
            for rotary in self._rotaries:
                rotary(torch.zeros(1, 1, dtype=torch.long, device=device), config.context_length + BLOCK, [0])

    def new_cache(self) -> DeviceCache:
        c = self.config
        sizes = c.kv_heads, c.head_dim, c.context_length
        return DeviceCache(self._attentions, *sizes, self.dtype, self.device, self._choose)

    @torch.inference_mode()
    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        """See `protocols.Target`."""
        size = _size(rows, want)
        if self._capture is None or size is None or not isinstance(cache, DeviceCache):
            return super().forward(rows, cache, want)
        places = cache.places(rows, size[1])
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
        cache.met[key] += 1
        if key not in cache.graphs and cache.met[key] > PATIENCE and self._capture:
            table = RowTable(*size, size[1], self.device)
            cache.graphs[key] = table, self._capture(partial(self._run, table, cache, want))
        return cache.graphs.get(key)

    def _run(self, table: RowTable, cache: DeviceCache, want: Want) -> Forward:
        """A pass over what stands in the table, whatever that will be. What `Rows` says on the host is not looked at,
        but for the highest position, which no table of rotary factors depends on any more."""
        nothing = (0,) * table.slots
        rows = Rows(table.tokens, table.positions(), nothing, nothing, ((),) * table.slots, nothing)
        return super().forward(rows, _Ready(cache.over(table)), want)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Ready:
    """As much of a cache as a recorded pass asks for."""

    attention: DevicePass
    prompts: tuple[int, ...] = (0,)

    def begin(self, rows: Rows) -> DevicePass:
        return self.attention


def _size(rows: Rows, want: Want) -> tuple[int, int] | None:
    """The smallest graph that holds a pass; None for one that runs without."""
    b, t = rows.tokens.shape
    if rows.prefill or rows.resume or any(rows.starts) or want.logits != "all" or want.layers is not None:
        return None
    sizes = [next((size for size in known if size >= n), None) for known, n in ((SLOTS, b), (ROWS, t))]
    return None if None in sizes else (sizes[0], sizes[1])  # type: ignore[return-value]
