"""Measure decoding on a GPU: speed relative to memory bandwidth, the cost of additional rows, and overhead per round.

The models have the shapes of Llama 3.1 8B and Qwen2.5 7B and random weights, which are created on the device. The
drafter has a given acceptance rate. `--tiny` runs the same steps with toy models on a CPU, where the figures mean
nothing. If a part fails, the result names it, the other parts continue, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Grid, median, provenance, report, write
from gpu_models import SHAPES, RandomWeights, Steered, accuracy_for, tiny
from gpu_peers import BareLoop, transformers_static

from paceline import DraftBudget, Sampling
from paceline.engine.engine import Engine
from paceline.engine.self_check import guarantee
from paceline.kernels.cuda import has_triton
from paceline.models.cuda_decoder import PATIENCE, DeviceDecoder, cuda_graph
from paceline.models.decoder import Decoder
from paceline.protocols import KVCache, Target
from paceline.testing import Oracle, run
from paceline.types import Draft, Want
from paceline.verify.tree import PREFILL_ROWS, pack, pack_prefix

CHAIN = 7
"""Drafted tokens per round. A pass then has 8 rows."""

GOALS = (
    "goals: plain decoding at 80 % of the copy bandwidth; a pass of 64 rows takes at most 1.15 times as long as a pass "
    "of one row; a round takes at most 100 us outside its graph"
)


@dataclass(slots=True)
class Run:
    """Options, start time, and results so far. `parts` maps model -> part -> figures."""

    args: argparse.Namespace
    device: torch.device
    dtype: torch.dtype
    began: float = field(default_factory=time.perf_counter)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    copy: float = float("nan")
    """Bytes read and written per second by a copy on the device."""

    def part(self, model: str, name: str, measure: Callable[[], Any]) -> None:
        """Run one part, or record its error if it fails. Skip it if the time is up."""
        if time.perf_counter() - self.began > 60 * self.args.minutes:
            self.failed.append(f"{model}, {name}: no time left")
            return
        try:
            self.parts.setdefault(model, {})[name] = measure()
        except Exception as error:
            traceback.print_exc()
            self.failed.append(f"{model}, {name}: {type(error).__name__}: {str(error).splitlines()[:1]}")
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.save()

    def save(self) -> None:
        source = provenance(**vars(self.args), device=device_name(self.device))
        result = {"provenance": source, "copy": self.copy, "parts": self.parts, "failed": self.failed}
        write("gpu-tiny" if self.args.tiny else "gpu", result, grids(self), lines(self), self.args.out)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "no GPU"


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(device: torch.device, run: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of a run, including synchronisation, after three warm-up runs."""
    seconds = []
    for turn in range(repeats + 3):
        wait(device)
        began = time.perf_counter()
        run()
        wait(device)
        seconds.append(time.perf_counter() - began)
        if turn < 3:
            seconds.clear()
    return median(seconds)


def packed(device: torch.device, run: Callable[[], Any], repeats: int) -> float:
    """Return the device's time per run in seconds, from many runs with one synchronisation at the end."""
    run()
    wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    wait(device)
    return (time.perf_counter() - began) / repeats


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Return the bytes read and written per second when copying `size` random bytes."""
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / packed(device, lambda: target.copy_(source), 20)


KINDS = ("eager", "graphs", "exact")


def make(kind: str, weights: RandomWeights, run: Run) -> Target:
    """Build a target: "eager" kernels, a CUDA graph per pass ("graphs"), the same with one-tile products ("exact")."""
    given = (weights.config, weights, run.dtype, run.device)
    if kind == "eager":
        return Decoder(*given)
    # Without CUDA the graph of a pass is the pass itself, over the same tables.
    capture = cuda_graph if run.device.type == "cuda" else lambda again: again
    return DeviceDecoder(*given, exact=kind == "exact" and run.device.type == "cuda", capture=capture)


@contextmanager
def filled(target: Target, context: int) -> Iterator[tuple[KVCache, int]]:
    """Yield a cache and the index of its slot that contains `context` tokens."""
    cache = target.new_cache()
    slot = cache.acquire(context)
    for done in range(0, context, PREFILL_ROWS):
        chunk = [(7 * i + 1) % target.vocab_size for i in range(done, min(done + PREFILL_ROWS, context))]
        rows = pack_prefix(chunk, slot, done, target.device)
        target.forward(rows, cache, Want("none"))
        cache.commit(rows, [range(1, len(chunk))])
    yield cache, slot
    cache.release(slot)


def passes(target: Target, weights: RandomWeights, run: Run) -> dict[str, Any]:
    """Measure a verification pass by number of rows, both as a synchronised call and as only its CUDA graph."""
    call, graph = {}, {}
    with filled(target, run.args.context) as (cache, slot):
        for count in run.args.rows:
            rows = pack([1], [Draft.chain([2] * (count - 1))], [slot], [run.args.context], target.device)
            for _ in range(PATIENCE + 1):
                target.forward(rows, cache, Want())
            call[count] = 1e3 * timed(run.device, lambda r=rows: target.forward(r, cache, Want()), run.args.repeats)
            replay = graph_of(cache, rows.tokens.shape[1])
            graph[count] = 1e3 * packed(run.device, replay, run.args.repeats) if replay else None
    first = run.args.rows[0]
    device_ms = graph[first] or call[first]
    return {
        "call_ms": call,
        "graph_ms": graph,
        "read_GB": weights.read_bytes(run.args.context) / 1e9,
        "of_copy_bandwidth": weights.read_bytes(run.args.context) / (device_ms / 1e3) / run.copy,
        "over_one_row": {n: (graph[n] or call[n]) / device_ms for n in run.args.rows},
    }


def graph_of(cache: KVCache, rows: int) -> Callable[[], Any] | None:
    """Return the graph of a pass with one slot and `rows` rows, or None if there is none."""
    graphs = getattr(cache, "graphs", {})
    sizes = sorted(size for (size, taps) in graphs if size[0] == 1 and size[1] >= rows)
    return graphs[sizes[0], ()][1] if sizes else None


def texts(target: Target, run: Run) -> dict[str, Any]:
    """Measure whole replies by tokens per round. 1 means no drafts."""
    args = run.args
    text = torch.randint(target.vocab_size, (args.context + args.tokens + CHAIN + 2,), generator=torch.Generator())
    known = text.tolist()
    found = {}
    for tau in args.taus:
        chain = DraftBudget.chain(CHAIN if tau > 1 else 0)
        engine = Engine(Steered(target, known), Oracle(known, accuracy_for(tau, CHAIN), target.vocab_size), chain)
        found[tau] = reply(engine, known, run)
    return found


def reply(engine: Engine, text: list[int], run_: Run) -> dict[str, float]:
    """Measure one reply without its prefill, after a warm-up reply."""
    prompt, sampling = text[: run_.args.context], Sampling(max_new_tokens=run_.args.tokens)
    for _ in range(2):
        tokens, _, stats = run(engine.target, prompt, sampling, engine=engine)
    assert tokens == text[len(prompt) : len(prompt) + len(tokens)], "the reply differs from the given text"
    seconds = sum(stats.seconds.values()) - stats.seconds["prefill"]
    each = {f"{name}_us": 1e6 * stats.seconds[name] / stats.rounds for name in ("draft", "verify", "commit", "other")}
    nodes = max((policy.draft.nodes for policy in engine.policies), default=0)
    rows = 1 + nodes if nodes else 4
    replay = graph_of(engine.cache, rows)
    graph_us = 1e6 * packed(run_.device, replay, run_.args.repeats) if replay else None
    return {
        "tokens_per_second": len(tokens) / seconds,
        "tokens_per_round": stats.tokens_per_round,
        "round_us": 1e6 * seconds / stats.rounds,
        "graph_us": graph_us,
        "outside_us": 1e6 * seconds / stats.rounds - graph_us if graph_us else None,
        **each,
    }


def measure_model(name: str, raw: Mapping[str, Any], run: Run) -> None:
    """Measure one model with every kind of target."""
    weights = RandomWeights(raw, run.dtype, run.device)
    for kind in KINDS:
        made: list[Target] = []
        run.part(name, f"{kind}: load", lambda k=kind, m=made: m.append(make(k, weights, run)))
        if made:
            run.part(name, f"{kind}: passes", lambda m=made: passes(m[0], weights, run))
            run.part(name, f"{kind}: self-check", lambda m=made: guarantee(m[0]))
            run.part(name, f"{kind}: texts", lambda m=made: texts(m[0], run))


def peers(name: str, raw: Mapping[str, Any], run: Run) -> None:
    """Measure plain decoding by other programs, with the same context length and reply length."""
    args = run.args
    weights = RandomWeights(raw, run.dtype, run.device)
    compiled = run.device.type == "cuda"
    makers = {
        "bare compiled loop": lambda: BareLoop(weights, args.context + args.tokens + 8, compiled),
        "transformers, static cache": lambda: transformers_static(raw, weights),
    }
    for peer, maker in makers.items():
        run.part(name, peer, lambda m=maker: speed(m(), weights.config.vocab_size, run))


def speed(peer: Callable[[list[int], int], list[int]], vocab: int, run: Run) -> dict[str, float]:
    """Return tokens per second without prefill, from a long and a one-token reply. A warm-up reply compiles first."""
    prompt = [(7 * i + 1) % vocab for i in range(run.args.context)]
    peer(prompt, 8)
    seconds = []
    for tokens in (1, run.args.tokens + 1):
        wait(run.device)
        began = time.perf_counter()
        assert len(peer(prompt, tokens)) == tokens
        wait(run.device)
        seconds.append(time.perf_counter() - began)
    return {"tokens_per_second": run.args.tokens / (seconds[1] - seconds[0])}


def demo(run: Run) -> None:
    """Measure SmolLM2 with its EAGLE-3 head on real text. This needs its file (see benchmarks/README.md)."""
    import paceline

    def one(drafter: str | None, exact: bool) -> dict[str, float]:
        llm = paceline.load("demo", drafter=drafter, device=run.device.type, exact=exact, prefix_memory=0)
        sampling = Sampling(max_new_tokens=run.args.tokens)
        for _ in range(2):
            done = llm.generate("Explain why the sky is blue, step by step.", sampling)
        seconds = sum(done.stats.seconds.values()) - done.stats.seconds["prefill"]
        return {
            "tokens_per_second": len(done.token_ids) / seconds,
            "tokens_per_round": done.stats.tokens_per_round,
            "guarantee": llm.guarantee,  # type: ignore[dict-item]
        }

    for drafter in (None, "suffix", "eagle3"):
        for exact in (False, True):
            name = f"{drafter or 'plain'}{', exact' if exact else ''}"
            run.part("SmolLM2-135M", name, lambda d=drafter, e=exact: one(d, e))


def grids(run: Run) -> list[Grid]:
    found = [_passes_grid(run), _texts_grid(run)]
    return [grid for grid in found if grid.rows]


def _passes_grid(run: Run) -> Grid:
    rows = []
    for model, parts in run.parts.items():
        for kind in KINDS:
            if p := parts.get(f"{kind}: passes"):
                check = str(parts.get(f"{kind}: self-check"))
                times = [f"{p['call_ms'][n]:.2f} ({p['over_one_row'][n]:.2f}x)" for n in run.args.rows]
                rows.append([f"{model}, {kind}", f"{100 * p['of_copy_bandwidth']:.0f} %", check, *times])
    columns = ["model, kernels", "share of copy bandwidth", "self-check", *(f"{n} rows, ms" for n in run.args.rows)]
    return Grid(
        f"Time of a pass after {run.args.context} tokens (in parentheses: device time relative to the first column)",
        columns,
        rows,
    )


def _texts_grid(run: Run) -> Grid:
    rows = []
    for model, parts in run.parts.items():
        for part, found in parts.items():
            if part.endswith(": texts"):
                for tau, r in found.items():
                    outside = f"{r['outside_us']:.0f}" if r["outside_us"] else "-"
                    given = (f"{r['tokens_per_second']:.0f}", f"{r['tokens_per_round']:.2f}", outside)
                    rows.append([f"{model}, {part.removesuffix(': texts')}, tau {tau}", *given])
            elif isinstance(found, dict) and "tokens_per_second" in found:
                kept = found.get("tokens_per_round", 1.0)
                rows.append([f"{model}, {part}", f"{found['tokens_per_second']:.0f}", f"{kept:.2f}", "-"])
    columns = ["model, decoder", "tok/s", "tokens per round", "us per round outside its graph"]
    return Grid(f"Replies of {run.args.tokens} tokens, batch 1", columns, rows)


def lines(run: Run) -> list[str]:
    device = f"{device_name(run.device)}, {run.dtype}; copy bandwidth {run.copy / 1e9:.0f} GB/s (reads plus writes)"
    return [device, GOALS, *(f"FAILED: {failure}" for failure in run.failed)]


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--context", type=int, default=512, help="context length of the timed passes (512)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--taus", type=float, nargs="+", default=[1, 2, 3, 4], help="tokens per round (1 2 3 4)")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens per reply (256)")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=8.0, help="start no new part after this many minutes (8)")
    parser.add_argument("--no-peers", action="store_true", help="skip transformers and the bare loop")
    parser.add_argument("--demo", action="store_true", help="also measure SmolLM2")
    parser.add_argument("--tiny", action="store_true", help="use toy models on the CPU")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    args = options(arguments)
    cuda = torch.cuda.is_available() and not args.tiny
    if not args.tiny and not (cuda and has_triton()):
        sys.exit("error: this benchmark needs a CUDA device and Triton; --tiny runs the same steps with toy models")
    device, dtype = (torch.device("cuda"), torch.bfloat16) if cuda else (torch.device("cpu"), torch.float32)
    run = Run(args, device, dtype)
    run.copy = copy_bandwidth(device, 4 << 30 if cuda else 1 << 20)
    shapes = {name: tiny(SHAPES[name]) if args.tiny else SHAPES[name] for name in args.models}
    for name, raw in shapes.items():
        measure_model(name, raw, run)
    if args.demo:
        demo(run)
    for name, raw in shapes.items() if not args.no_peers else ():
        peers(name, raw, run)
    run.save()
    report(grids(run), lines(run))
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
