"""Measure the time and memory of encoding a picture, with random weights of real shapes, compared with transformers.

"paceline" is the cost of a new picture in a prompt. "transformers" is a call of the image processor and of the same
tower. The two alternate, with a new picture each time. Memory is the peak of the process minus its memory before the
call (Linux only).

The tower runs with each of --dtypes, to show which dtype is best on a CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from common import RESULTS, Grid, median, progress, provenance, report, write
from PIL import Image

from paceline.server.worker import trim_memory
from paceline.vision.encoder import Vision
from paceline.vision.families import VISION
from paceline.vision.picture import Picture
from paceline.vision.tower import silence_transformers


@dataclass(frozen=True, slots=True)
class Shape:
    """A model with image input.

    Attributes:
        config: The part of config.json that the vision tower needs.
        settings: Settings of the image processor.
    """

    config: dict[str, Any]
    settings: dict[str, Any]


SHAPES = {
    "SmolVLM-256M": Shape(
        {
            "model_type": "smolvlm",
            "scale_factor": 4,
            "image_token_id": 1,
            "vision_config": {
                "hidden_size": 768,
                "intermediate_size": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "image_size": 512,
                "patch_size": 16,
            },
            "text_config": {"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9},
        },
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
    ),
    "Gemma-3-4B": Shape(
        {
            "model_type": "gemma3",
            "mm_tokens_per_image": 256,
            "image_token_index": 1,
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "image_size": 896,
                "patch_size": 14,
                "vision_use_head": False,
            },
            "text_config": {"model_type": "gemma3_text", "hidden_size": 2560},
        },
        {"size": {"height": 896, "width": 896}, "image_seq_length": 256},
    ),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Median costs of encoding one picture.

    Attributes:
        shape: Name of the model.
        dtype: Dtype of the tower.
        side: Height and width of the picture.
        program: "paceline" or "transformers".
        rows: Prompt rows of the picture.
        seconds: Wall time.
        cpu_seconds: CPU time of all threads.
        peak_mib: Peak memory above the memory before the call. None if the system does not report it.
    """

    shape: str
    dtype: str
    side: int
    program: str
    rows: int
    seconds: float
    cpu_seconds: float
    peak_mib: float | None


def tower(shape: Shape, dtype: torch.dtype) -> Vision:
    """Return a tower with random weights."""
    family = VISION[shape.config["model_type"]]
    with silence_transformers():
        config = transformers.AutoConfig.for_model(**shape.config)
        text = config.get_text_config()
        text.num_hidden_layers, text.vocab_size, text.pad_token_id = 0, 2, None
        if getattr(text, "layer_types", None):
            text.layer_types = []
        tensors = getattr(transformers, family.model)(config).to(dtype).state_dict()
    prefix = "model." if any(one.startswith("model.") for one in family.tensors) else ""
    held = {prefix + name: tensor for name, tensor in tensors.items()}
    return Vision(family, shape.config, lambda: held, shape.settings, dtype, torch.device("cpu"))


def by_transformers(vision: Vision, picture: Picture) -> int:
    """Call the image processor of transformers and the tower. Return the number of rows."""
    loaded, image = vision._loaded(), Image.fromarray(picture.pixels)
    nested = [[image]] if vision.name == "smolvlm" else [image]
    inputs = loaded.processor(images=nested, return_tensors="pt")
    wanted = ("pixel_values", "pixel_attention_mask") if vision.name == "smolvlm" else ("pixel_values",)
    with torch.inference_mode():
        found = loaded.model.get_image_features(**{name: inputs[name] for name in wanted}, return_dict=True)
    return sum(len(part) for part in found.pooler_output)


def measured(call: Callable[[], int]) -> tuple[int, float, float, float | None]:
    """Return the result of a call, its seconds and CPU seconds, and its peak memory in MiB."""
    trim_memory()  # otherwise the call would reuse memory from earlier calls
    before = _memory("VmRSS", reset=True)
    began, used = time.perf_counter(), time.process_time()
    found = call()
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    peak = _memory("VmHWM")
    return found, seconds, cpu, None if before is None or peak is None else peak - before


def _memory(name: str, reset: bool = False) -> float | None:
    """Return a field of the process's status in MiB, or None without /proc. With `reset`, first reset the peak."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith(name))


def measure(name: str, shape: Shape, dtype: str, sides: Sequence[int], repeats: int) -> list[Cost]:
    """Measure both programs with square pictures of each size. The first call of each is a warm-up."""
    vision, dice = tower(shape, getattr(torch, dtype)), np.random.default_rng(0)
    programs: dict[str, Callable[[Picture], int]] = {
        "paceline": lambda picture: len(vision.encode(picture).embeddings),
        "transformers": lambda picture: by_transformers(vision, picture),
    }
    results: dict[tuple[int, str], list[tuple[int, float, float, float | None]]] = {}
    for number in progress(range(repeats + 1), f"{name}, {dtype}"):
        for side in sides:
            for program, encode in programs.items():
                picture = Picture.of(dice.integers(0, 256, (side, side, 3), np.uint8))
                found = measured(lambda encode=encode, picture=picture: encode(picture))  # type: ignore[misc]
                if number:
                    results.setdefault((side, program), []).append(found)
    costs = []
    for (side, program), each in results.items():
        rows, seconds, cpu, peaks = zip(*each, strict=True)
        peak = None if None in peaks else median(peaks)
        costs.append(Cost(name, dtype, side, program, rows[0], median(seconds), median(cpu), peak))
    return costs


def grid(costs: Sequence[Cost]) -> Grid:
    """Return a table with one row per measurement."""
    rows = [
        [
            f"{cost.shape}, {cost.dtype}, {cost.side} x {cost.side}, {cost.program}",
            str(cost.rows),
            f"{cost.seconds:.2f}",
            f"{cost.cpu_seconds:.2f}",
            "" if cost.peak_mib is None else f"{cost.peak_mib:,.0f}",
        ]
        for cost in costs
    ]
    return Grid("Encoding a picture", ["tower", "rows", "seconds", "CPU seconds", "additional peak MiB"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--sides", nargs="+", type=int, default=[512, 1024])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    costs = []
    for name in args.shapes:
        for dtype in args.dtypes:
            costs += measure(name, SHAPES[name], dtype, args.sides, args.repeats)
    report([grid(costs)])
    result = {"provenance": provenance(), "costs": [asdict(cost) for cost in costs]}
    write("pictures", result, [grid(costs)], folder=args.out)


if __name__ == "__main__":
    main()
