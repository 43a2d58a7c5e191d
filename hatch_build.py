"""Puts the compiled kernels into a wheel, one library for each instruction set of this machine's architecture.

PACELINE_ISA limits a wheel to one instruction set, for a wheel that stays on this machine.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CPU = "paceline/kernels/cpu"


class Kernels(BuildHookInterface[Any]):
    """Without a compiler, and in editable installs, kernels are compiled when they are first needed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries and name them to the builder of the wheel."""
        toolchain = _toolchain(Path(self.root) / "src" / CPU / "toolchain.py")
        compiler = toolchain.find_compiler()
        if version == "editable" or not compiler:
            return
        self._folder = TemporaryDirectory()
        os.environ.setdefault("MACOSX_DEPLOYMENT_TARGET", "11.0")  # torch's own
        sets = toolchain.sets_of(platform.machine())
        only = os.environ.get("PACELINE_ISA")
        jobs = {
            Path(self._folder.name) / toolchain.packaged_name(one): toolchain.flags_of(one)
            for one in ([sets[only]] if only else sets.values())
        }
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            commands = [toolchain.compile_command(compiler, (*flags, "-s"), to) for to, flags in jobs.items()]
            failures = [error for error in pool.map(_compile, commands) if error]
        # A compiler may be too old for the newest set; the processors that have it then run a smaller one.
        made = [path for path in jobs if path.is_file()]
        if not made or (failures and os.environ.get("CIBUILDWHEEL")):
            raise SystemExit(f"{failures[0]}\nHATCH_BUILD_NO_HOOKS=true makes a wheel without kernels.")
        build_data["force_include"] |= {str(path): f"{CPU}/lib/{path.name}" for path in made}
        build_data.update(pure_python=False, tag=f"py3-none-{_platform()}")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the libraries, which are in the wheel now."""
        if folder := getattr(self, "_folder", None):
            folder.cleanup()


def _toolchain(path: Path) -> ModuleType:
    """The module by its path: the package around it needs torch."""
    spec = spec_from_file_location("toolchain", path)
    assert spec
    assert spec.loader
    module = sys.modules["toolchain"] = module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _compile(command: list[str]) -> str:
    """Run a compiler. Returns why it failed, or nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return f"{' '.join(command)}\n{error}"
    return f"{' '.join(command)}\n{done.stderr}" if done.returncode else ""


def _platform() -> str:
    if sys.platform == "darwin":  # Python itself may be for two architectures
        return f"macosx_{os.environ['MACOSX_DEPLOYMENT_TARGET'].replace('.', '_')}_{platform.machine()}"
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
