"""Provenance of a measurement: command, code, versions, machine and settings."""

from __future__ import annotations

import json
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
"""scikit-learn is listed because transformers uses another draft length if it is installed."""


def provenance(**settings: Any) -> dict[str, Any]:
    """Return everything that is needed to reproduce a measurement.

    Values of `settings` that JSON does not support are stored as strings.
    """
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
        "settings": json.loads(json.dumps(settings, default=str)),
    }


def _command() -> str:
    """Return the command as it was typed: a script with its interpreter, or the name of a program."""
    program, *arguments = sys.argv
    typed = ("python", program) if program.endswith(".py") else (Path(program).name,)
    return shlex.join([*typed, *arguments])


def cpu_name() -> str:
    """Return the processor's name as the operating system reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _git(*arguments: str) -> str | None:
    """Return the output of git in the checkout of this file, or None outside a checkout."""
    try:
        here = Path(__file__).parent
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
