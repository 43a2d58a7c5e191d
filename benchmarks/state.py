"""Measure the cost of recurrent state: time of passes and commits by number of rows, and bytes of states and updates.

The model has four layers with the sizes of a Qwen3.5 model, three with Gated DeltaNet and one with attention, and
random bfloat16 weights. It is compared with a model with attention in all four layers, which has the same feed-forward
parts and no recurrent state. Time is the CPU time of this thread, and cases alternate. The values of the weights do not
matter.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Grid, median, provenance, report, write
from torch import Tensor

from paceline.models.config import AttentionConfig, DeltaNetConfig, LayerConfig, ModelConfig, NormConfig, RopeConfig
from paceline.models.decoder import Decoder
from paceline.testing import random_tensors
from paceline.types import Draft, Want
from paceline.verify.tree import pack, pack_prefix

ROPE = RopeConfig(theta=1e7, share=0.25)
SIZES = {"0.8B": (1024, 3584, 8, 2, 16), "4B": (2560, 9216, 16, 4, 32)}
"""Hidden size, feed-forward size, heads, key heads, heads of Gated DeltaNet."""


def config(size: str, hybrid: bool) -> ModelConfig:
    hidden, ffn, heads, kv, values = SIZES[size]
    delta = DeltaNetConfig(16, values, 128, 128, 4)
    layers = [LayerConfig(None, recurrent=delta)] * 3 if hybrid else [LayerConfig(ROPE)] * 3
    base = ModelConfig("qwen3_5_text", 512, hidden, 4, heads, kv, 256, ffn, 8192, tied=True, rope=ROPE)
    return replace(
        base,
        special=(*layers, LayerConfig(ROPE)),
        norms=NormConfig(offset=1.0, heads="shared"),
        attention=AttentionConfig(gated=True),
    )


def tensors_of(c: ModelConfig) -> dict[str, Tensor]:
    """Return random weights by their Hugging Face names."""
    found = random_tensors(c, scale=0.02)
    for i, layer in enumerate(c.plan):
        attn, linear = f"model.layers.{i}.self_attn.", f"model.layers.{i}.linear_attn."
        if (d := layer.recurrent) is None:
            shapes: dict[str, tuple[int, ...]] = {
                attn + "q_proj.weight": (2 * c.heads * c.head_dim, c.hidden),
                attn + "q_norm.weight": (c.head_dim,),
                attn + "k_norm.weight": (c.head_dim,),
            }
        else:
            found = {name: x for name, x in found.items() if not name.startswith(attn)}
            values = d.heads * d.value_dim
            shapes = {
                linear + "in_proj_qkv.weight": (d.channels, c.hidden),
                linear + "in_proj_z.weight": (values, c.hidden),
                linear + "in_proj_b.weight": (d.heads, c.hidden),
                linear + "in_proj_a.weight": (d.heads, c.hidden),
                linear + "conv1d.weight": (d.channels, 1, d.width),
                linear + "out_proj.weight": (c.hidden, values),
                linear + "A_log": (d.heads,),
                linear + "dt_bias": (d.heads,),
                linear + "norm.weight": (d.value_dim,),
            }
        found |= {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    return found


def timed(run: Callable[[], object]) -> float:
    began = time.thread_time()
    run()
    return (time.thread_time() - began) * 1e3


def measure(targets: dict[str, Decoder], drafts: dict[str, Draft], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the milliseconds of each pass and commit: target -> draft -> list of measurements."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in targets}
    slots = {}
    for name, target in targets.items():
        cache = target.new_cache()
        slots[name] = cache, cache.acquire()
        for start in range(0, 512, 256):
            rows = pack_prefix([1] * 256, slots[name][1], start, target.device)
            ms = timed(lambda rows=rows, target=target, cache=cache: target.forward(rows, cache, Want("none")))  # type: ignore[misc]
            cache.commit(rows, [range(1, 256)])
            found[name].setdefault("prompt chunk of 256", []).append(ms)
    for _ in range(rounds):
        for shape, draft in drafts.items():
            for name, target in targets.items():
                cache, slot = slots[name]
                rows = pack([1], [draft], [slot], [cache.lengths[slot]], target.device)
                ms = timed(lambda: target.forward(rows, cache, Want()))  # noqa: B023
                found[name].setdefault(shape, []).append(ms)
                # Accept half of a draft, so that the commit must compute the state from updates.
                path = [row for row in range(1, len(draft.tokens) + 1) if row <= len(draft.tokens) // 2]
                path = path if shape.startswith("chain") else path[:1]
                found[name].setdefault(f"commit of {shape}", []).append(timed(lambda: cache.commit(rows, [path])))  # noqa: B023
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", nargs="+", choices=list(SIZES), default=list(SIZES), help="sizes of Qwen3.5 (0.8B 4B)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="passes of each kind (15)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    drafts = {f"chain of {n}": Draft.chain([1] * n) for n in (0, 1, 3, 7, 15)}
    drafts["tree of 12"] = Draft((*range(1, 13),), (0, 0, 0, 1, 1, 2, 2, 4, 4, 5, 8, 9))
    result: dict[str, Any] = {"provenance": provenance(**vars(args)), "milliseconds": {}, "bytes": {}}
    grids = []
    for size in args.sizes:
        configs = {name: config(size, hybrid) for name, hybrid in (("hybrid", True), ("attention only", False))}
        targets = {name: Decoder(c, tensors_of(c), torch.bfloat16, torch.device("cpu")) for name, c in configs.items()}
        with torch.inference_mode():
            times = measure(targets, drafts, args.rounds)
        result["milliseconds"][size] = times
        kind = configs["hybrid"].plan[0].recurrent
        assert isinstance(kind, DeltaNetConfig)
        update = 4 * (kind.channels + kind.key_heads * kind.key_dim + kind.heads * (kind.value_dim + 1))
        result["bytes"][size] = {"state of a layer": 4 * kind.state_size, "update of a row in a layer": update}
        rows = [[shape, *(f"{median(times[name][shape]):.1f}" for name in targets)] for shape in times["hybrid"]]
        memory = f"{4 * kind.state_size / 2**20:.2f} MiB of state per layer, {update / 2**10:.0f} KiB per update"
        title = f"{size}: time of a pass through 4 layers, ms, 1 thread; {memory}"
        grids.append(Grid(title, ["rows", *targets], rows))
    report(grids)
    write("state", result, grids, folder=args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
