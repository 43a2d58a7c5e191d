"""Logits of tiny models, computed by transformers in float64 and stored in tests/golden. Tests need no transformers.

`python -m tests.support.golden [CASE ...]` writes the files. A file contains no weights. Both sides compute them from
the names and shapes of the tensors.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.checkpoints.model_config import read_config
from paceline.checkpoints.tensor_names import decoder_tensors
from paceline.models.decoder import Decoder
from tests.support.logits import CPU, assert_close, chunks_and_tokens, expected, relative_error, text
from tests.support.tiny_families import CASES, GEMMA4, HYBRIDS, WINDOWED

FOLDER = Path(__file__).parents[1] / "golden"
ROUNDED = ("qwen3", "gemma2", "gemma3", "phi3, sliding")
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Golden:
    """The model of a case, a text, and transformers' logits at some positions of the text.

    Attributes:
        transformers: Version of transformers.
        config: config.json as transformers writes it.
        shapes: Names in model.safetensors -> shapes.
        text: Token ids.
        logits: Position -> logits with six digits.
        bfloat16: Relative error of transformers' bfloat16 logits for the first 60 tokens, for the cases in `ROUNDED`.
    """

    transformers: str
    config: dict[str, Any]
    shapes: dict[str, list[int]]
    text: list[int]
    logits: dict[int, list[float]]
    bfloat16: float | None = None


def path_of(case: str) -> Path:
    """Return the path of a case's file."""
    return FOLDER / (re.sub("[^a-z0-9.]+", "-", case) + ".json.gz")


@cache
def read(case: str) -> Golden:
    """Read the golden file of a case."""
    document = json.loads(gzip.decompress(path_of(case).read_bytes()))
    return Golden(**document | {"logits": {int(at): row for at, row in document["logits"].items()}})


def weights(shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return random float32 tensors. Each depends only on its name and shape."""
    adds_one = read_config(config).norms.offset == 1
    return {name: _weight(name, shape, adds_one) for name, shape in shapes.items()}


def _weight(name: str, shape: Sequence[int], adds_one: bool) -> Tensor:
    mean, spread = _law(name, len(shape), adds_one)
    # Uniform, because a normal distribution needs logarithms, whose last bits depend on the processor.
    unit = torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(crc32(name.encode())))
    return (mean + spread * 3**0.5 * (2 * unit - 1)).float()


def _law(name: str, dimensions: int, adds_one: bool) -> tuple[float, float]:
    """Return mean and deviation. Norms and biases are random too, because equal values would hide an exchange."""
    if name.endswith("A_log"):
        return 1.0, 0.6
    if name.endswith(("expert_bias", "correction_bias")) or ("conv" in name and dimensions == 3):
        return 0.0, 0.3
    if name.endswith("_bias") and dimensions == 2:  # gpt-oss's experts: beyond the bounds at which its SwiGLU clamps
        return 0.0, 4.0
    if dimensions == 1 or "norm" in name:
        return float(not adds_one or "linear_attn.norm" in name), 0.1 if name.endswith("layer_scalar") else 0.3
    return 0.0, 0.2


@cache
def decoder(case: str, dtype: torch.dtype = torch.float64) -> Decoder:
    """Return the native decoder of a case."""
    return decoder_of(read(case), dtype)


def decoder_of(golden: Golden, dtype: torch.dtype = torch.float64) -> Decoder:
    """Return the native decoder with the weights of a golden file."""
    return Decoder(read_config(golden.config), tensors_of(golden), dtype, CPU)


def tensors_of(golden: Golden) -> Mapping[str, Tensor]:
    """Return the weights of a golden file, by the native decoder's names."""
    return decoder_tensors(golden.config, weights(golden.shapes, golden.config))


@cache
def reference(case: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return transformers' model of a case. It reads the same weights from a folder."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(read(case).config))
        return _reference(Path(folder), read(case).shapes, dtype)


def models(case: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Decoder]:
    """Return transformers' model of a case and the native decoder."""
    return reference(case, dtype), decoder(case, dtype)


def _reference(folder: Path, shapes: Shapes, dtype: torch.dtype) -> Any:
    """Write weights to a folder that has a config, and return transformers' model of it."""
    config = json.loads((folder / "config.json").read_text())
    save_file(weights(shapes, config), folder / "model.safetensors", {"format": "pt"})
    model, report = _transformers().AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return model.to(dtype).eval()


def _transformers() -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


def made(case: str) -> Golden:
    """Compute the golden file of a case with transformers."""
    transformers = _transformers()
    config = transformers.AutoConfig.for_model(**deepcopy(CASES[case]))
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        path = Path(folder) / "model.safetensors"
        shapes = {name: list(tensor.shape) for name, tensor in load_file(path).items()}
        written = json.loads((Path(folder) / "config.json").read_text())
        logits = expected(_reference(Path(folder), shapes, torch.float64), text(length(case)))
        rounded = _reference(Path(folder), shapes, torch.bfloat16) if case in ROUNDED else None
        error = relative_error(expected(rounded, text(60)), logits[:60]) if rounded else None
    version = written.pop("transformers_version")
    rows = {at: [float(f"{x:.6g}") for x in logits[at].tolist()] for at in _positions(case)}
    return Golden(version, written, shapes, text(length(case)), rows, error)


def length(case: str) -> int:
    """Return the length of a case's text. It exceeds windows and their ring buffers, or chunks of states."""
    return 1110 if case in (*WINDOWED, *GEMMA4) else 150 if case in HYBRIDS else 70


def _positions(case: str) -> tuple[int, ...]:
    return {70: (1, 34, 54, 69), 150: (1, 101, 134, 149), 1110: (1, 34, 54, 69, 600, 1109)}[length(case)]


def write(case: str) -> None:
    """Write the golden file of a case."""
    document = json.dumps(asdict(made(case)), separators=(",", ":"), sort_keys=True)
    path_of(case).write_bytes(gzip.compress(document.encode(), mtime=0))


def check_golden(case: str, cuts: Sequence[int], end: int | None = None) -> None:
    """Check the native logits of a case in chunks that end at `cuts` and token by token up to `end`."""
    golden = read(case)
    tokens = golden.text[:end]
    logits = chunks_and_tokens(decoder(case), tokens, cuts)
    at = [position for position in golden.logits if position < len(tokens)]
    assert_close(logits[at], torch.tensor([golden.logits[position] for position in at]))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for one in sys.argv[1:] or CASES:
        write(one)
