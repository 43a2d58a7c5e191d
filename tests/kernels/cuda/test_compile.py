"""The Triton kernels compile for a Hopper GPU, also without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install triton)")


def test_the_kernels_compile_for_a_hopper_gpu() -> None:
    """Run in a separate process, where Triton's interpreter does not replace the compiler."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).parents[2] / "support" / "compile_kernels.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(facts["stack"] == 0 for facts in found.values()), f"registers are spilled: {found}"
    loops = [name for name in found if "merge" not in name]
    assert all(found[name]["copies ahead"] for name in loops), f"loads are not pipelined: {found}"
    assert all(found[name]["matrix units"] for name in loops), f"no tensor cores: {found}"
