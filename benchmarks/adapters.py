"""Measure the time of a pass with unmerged adapters, by number of different adapters.

All passes have the same requests: either none has an adapter, or all have the same one, or each has its own. The three
kinds of pass alternate. Time is the CPU time of the single thread that runs them, since the machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from common import RESULTS, Grid, median, provenance, report, write
from safetensors.torch import save_file

import paceline
from paceline.models.config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.types import Draft, Want
from paceline.verify.tree import pack, pack_prefix

CASES = {"no adapter": (0, 0, 0, 0), "one adapter": (1, 1, 1, 1), "four adapters": (1, 2, 3, 4)}
"""Name -> the adapter of each request."""
ROWS = (1, 5)
PREFIX = 64


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    source = provenance(model=args.model, quantize=args.quantize, rank=args.rank)
    with tempfile.TemporaryDirectory() as folder:
        config = paceline.load(args.model, quantize=args.quantize, drafter=None).model.target.config  # type: ignore[attr-defined]
        paths = {f"a{number}": Path(folder) / str(number) for number in range(4)}
        for number, path in enumerate(paths.values()):
            _write_adapter(path, config, args.rank, number)
        llm = paceline.load(args.model, quantize=args.quantize, drafter=None, adapters=paths)
    target = llm.model.target
    assert isinstance(target, Decoder)
    times = {rows: _times(target, rows, args.rounds) for rows in ROWS}
    size = sum(x.numel() for x in _factors(config, args.rank, 0).values())
    grid = Grid(
        "CPU time of a pass of four requests, ms, and its median ratio to a pass without adapters in the same turn",
        ["requests with", *(f"{rows} rows each" for rows in ROWS), *(f"ratio, {rows}" for rows in ROWS)],
        [
            (
                name,
                *(f"{1e3 * median(times[rows][name]):.1f}" for rows in ROWS),
                *(f"{median(_ratios(times[rows], name)):.3f}" for rows in ROWS),
            )
            for name in CASES
        ],
    )
    notes = [
        f"Each adapter has rank {args.rank} and covers all projections, with {size / 1e6:.1f} M random parameters.",
        f"Guarantee of the model with adapters: {llm.guarantee}.",
    ]
    report([grid], notes)
    seconds = {str(rows): {name: median(found) for name, found in times[rows].items()} for rows in ROWS}
    write(args.name, {"provenance": source, "seconds": seconds}, [grid], notes, args.out)


def _ratios(times: dict[str, list[float]], name: str) -> list[float]:
    return [own / none for own, none in zip(times[name], times["no adapter"], strict=True)]


def _times(target: Decoder, rows: int, rounds: int) -> dict[str, list[float]]:
    cache, draft = target.new_cache(), Draft.chain(tuple(range(5, 4 + rows)))
    passes = {}
    for name, adapters in CASES.items():
        slots = [cache.acquire(PREFIX, adapter) for adapter in adapters]
        for slot in slots:
            prompt = pack_prefix(list(range(PREFIX)), slot, 0, target.device)
            target.forward(prompt, cache, Want("none"))
            cache.commit(prompt, [range(1, PREFIX)])
        passes[name] = pack([4] * len(slots), [draft] * len(slots), slots, [PREFIX] * len(slots), target.device)
    found: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(rounds + 1):
        for name, chosen in passes.items():
            began = time.thread_time()
            target.forward(chosen, cache, Want("none"))
            if turn:  # the first turn is a warm-up
                found[name].append(time.thread_time() - began)
    return found


def _factors(c: ModelConfig, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Return random LoRA factors for every projection, by PEFT's tensor names."""
    draw, q, kv = torch.Generator().manual_seed(seed), c.heads * c.head_dim, c.kv_heads * c.head_dim
    sizes = {f"self_attn.{x}_proj": (c.hidden, out) for x, out in (("q", q), ("k", kv), ("v", kv))}
    sizes |= {"self_attn.o_proj": (q, c.hidden), "mlp.down_proj": (c.ffn, c.hidden)}
    sizes |= {f"mlp.{x}_proj": (c.hidden, c.ffn) for x in ("gate", "up")}
    found = {}
    for layer in range(c.layers):
        for name, (width, out) in sizes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            found[f"{module}.lora_A.weight"] = torch.randn(rank, width, generator=draw) * width**-0.5
            found[f"{module}.lora_B.weight"] = torch.randn(out, rank, generator=draw) * 0.01
    return found


def _write_adapter(path: Path, config: ModelConfig, rank: int, seed: int) -> None:
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    save_file(_factors(config, rank, seed), path / "adapter_model.safetensors")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantize", default="auto")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--name", default="adapters")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
