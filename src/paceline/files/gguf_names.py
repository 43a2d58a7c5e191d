"""GGUF files of a repository or folder by their names: quantisation, parts of a split file, which one to take."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from paceline.errors import ModelNotFound

DEFAULTS = (
    *("Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "MXFP4", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q6_K"),
    *("Q8_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "BF16", "F16", "F32"),
)
"""Quantisations in the order in which they are preferred where none is named."""

_TAG = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q[1-8](?:_\d|_K|_[XSML]{1,3}|_NL)*|BF16|F16|FP16|F32|FP32|MXFP4(?:_MOE)?|TQ[12]_0))(?=[-._/]|$)",
    re.IGNORECASE,
)
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_OTHER = re.compile(r"(?:^|[-._/])(mmproj|imatrix|mtp-draft)(?=[-._/]|$)", re.IGNORECASE)
"""Files beside a model that are none: vision encoders, importance matrices."""
MOST_PARTS = 1024


def quantization_of(name: str) -> str | None:
    """Return the quantisation that a file's name states, as "Q4_K_M"."""
    found = _TAG.findall(PurePosixPath(name).name.removesuffix(".gguf")) or _TAG.findall(name)
    return str(found[-1]).upper() if found else None


def parts_of(name: str) -> list[str] | None:
    """Return the names of all parts of a split file, given that of one of them; None for any other file.

    Raises `ModelNotFound` for more parts than there may be.
    """
    found = _PART.fullmatch(name)
    if not found:
        return None
    stem, _, count = found.groups()
    if not 0 < int(count) <= MOST_PARTS:
        raise ModelNotFound(f"{name} is one of {int(count)} parts, and at most {MOST_PARTS} are read", "Join them")
    return [f"{stem}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)]


def whole(names: Iterable[str]) -> list[list[str]]:
    """Return the models among these files, each as its parts in order; those of one part first, those that
    lack a part not at all."""
    here = {name for name in names if name.lower().endswith(".gguf") and not _OTHER.search(name)}
    models = []
    for name in sorted(here):
        parts = parts_of(name) or [name]
        if name == parts[0] and here.issuperset(parts):
            models.append(parts)
    return sorted(models, key=len)


def choose(names: Iterable[str], quantization: str | None, where: str) -> list[str]:
    """Return the file to load, as its parts in order. `quantization`: one like "Q4_K_M", or the name of a file; None:
    the first of `DEFAULTS` that there is. Raises `ModelNotFound` that says what there is in `where`."""
    found: dict[str, list[str]] = {}
    for parts in whole(names):
        found.setdefault((quantization_of(parts[0]) or parts[0]).upper(), parts)
        if quantization is not None and quantization.lower() in (parts[0].lower(), parts[0][:-5].lower()):
            return parts
    if quantization is not None:
        if quantization.upper() in found:
            return found[quantization.upper()]
    elif found:
        return next((found[name] for name in DEFAULTS if name in found), next(iter(found.values())))
    have = f"There are {', '.join(sorted(found))}" if found else "It holds no GGUF model"
    wanted = quantization or "GGUF file"
    raise ModelNotFound(f"{where} has no {wanted}", have)


def complete(folder: Path, subfolders: bool = True) -> list[str]:
    """Return the GGUF files in a folder, and in its subfolders, relative to it. Unfinished downloads have other
    names."""
    found = folder.glob("**/*.gguf" if subfolders else "*.gguf")
    return [path.relative_to(folder).as_posix() for path in found if path.is_file()]
