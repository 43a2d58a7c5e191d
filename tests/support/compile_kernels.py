"""Compile the kernels for compute capability 9.0, which needs no GPU, and print the results as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.kernels.cuda import kernels
from paceline.kernels.cuda.table import SPLIT

HALF, FLOAT, INT = "*bf16", "*fp32", "*i32"
POINTERS = dict.fromkeys(("q", "keys", "values", "out", "x", "weight", "bias", "residual"), HALF)
POINTERS |= dict.fromkeys(("partials", "max_scores", "denominators"), FLOAT)
POINTERS |= dict.fromkeys(("places", "paths", "lengths", "depths"), INT)
SCALARS = {"scale": "fp32", "softcap": "fp32"}


def compiled(kernel: Any, constants: dict[str, Any], **options: int) -> dict[str, Any]:
    """Compile a kernel as a launch with aligned tensors would."""
    names = kernel.arg_names
    types = POINTERS | SCALARS | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, "i32") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in POINTERS}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, values, aligned)
    out = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {
        "matrix units": "wgmma" in out.asm["ptx"] or "mma.sync" in out.asm["ptx"],
        "copies ahead": "cp.async" in out.asm["ptx"],
        "shared memory": out.metadata.shared,
        **usage(out.asm["cubin"]),
    }


def usage(cubin: bytes) -> dict[str, int]:
    """Return the registers of a thread, and the bytes of its stack."""
    tool = Path(nvidia.__file__).with_name("bin") / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    register, stack = (int(re.findall(rf"{name}:(\d+)", said)[0]) for name in ("REG", "STACK"))
    return {"registers": register, "stack": stack}


def main() -> None:
    found = {}
    for out in (4096, 28672, 128256):
        columns, depth = kernels._tile(out)
        sizes = {"OUT": out, "IN": 4096, "ROWS": kernels.ROWS, "COLUMNS": columns, "DEPTH": depth, "EVEN": True}
        flags = {"BIASED": True, "ADDED": True}
        found[f"product {out}"] = compiled(kernels._product, sizes | flags, num_warps=4, num_stages=4)
    for heads, kv, size, flag in ((32, 8, 128, False), (28, 4, 128, True), (9, 3, 64, True)):
        name = f"{heads} heads of {size}"
        shape = {"HEADS": heads, "KV": kv, "D": size, "WIDE": size, "SPLIT": SPLIT}
        sizes = {"CAPPED": flag, "WINDOWED": flag, "BLOCK": kernels.BLOCK, "TILE": kernels.TILE}
        found[f"split of {name}"] = compiled(kernels._attend_split, shape | sizes)
        found[f"merge of {name}"] = compiled(kernels._merge_splits, shape | {"WINDOWED": flag})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
