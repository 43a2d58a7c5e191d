"""What a number needs to be worth keeping."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = (
    *("paceline", "torch", "numpy", "gguf", "transformers", "accelerate", "scikit-learn"),
    *("llama-cpp-python", "openvino", "openvino-genai"),
)
"""scikit-learn is among them because transformers drafts at another length where it is installed."""


def provenance(**settings: Any) -> dict[str, Any]:
    """Command, code, versions, machine, load, date, settings."""
    return {
        "command": _command(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain")),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "machine": {
            "cpu": cpu_name(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "load": [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None,
            "system": platform.platform(),
        },
        "settings": settings,
    }


def _command() -> str:
    """As it was typed: a script with its interpreter, a program by its name."""
    program, *words = sys.argv
    script = program.endswith(".py")
    return shlex.join([*(("python", program) if script else (Path(program).name,)), *words])


def cpu_name() -> str:
    """As the system calls it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _git(*words: str) -> str | None:
    """Of the checkout that this file lies in, if it lies in one."""
    try:
        here = Path(__file__).parent
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
