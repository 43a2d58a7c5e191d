"""Names of GGUF files: their quantisation, the parts of split files, and the choice of a file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from paceline.errors import ModelNotFound

PREFERRED_QUANTIZATIONS = (
    *("Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "MXFP4", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q6_K"),
    *("Q8_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "BF16", "F16", "F32"),
)
"""Quantisations in order of preference, for references that name no quantisation."""

_TAG = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q[1-8](?:_\d|_K|_[XSML]{1,3}|_NL)*|BF16|F16|FP16|F32|FP32|MXFP4(?:_MOE)?|TQ[12]_0))(?=[-._/]|$)",
    re.IGNORECASE,
)
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_COMPANION = re.compile(r"(?:^|[-._/])(mmproj|imatrix|mtp-draft)(?=[-._/]|$)", re.IGNORECASE)
"""Files next to a model that are not models themselves, such as vision encoders and importance matrices."""
MAX_PARTS = 1024


def is_projector(name: str) -> bool:
    """Return True for the name of a vision encoder, such as "mmproj-model-f16.gguf"."""
    found = _COMPANION.search(name)
    return found is not None and found[1].lower() == "mmproj"


def quantization_of(name: str) -> str | None:
    """Return the quantisation in a file's name, such as "Q4_K_M", or None."""
    found = _TAG.findall(PurePosixPath(name).name.removesuffix(".gguf")) or _TAG.findall(name)
    return str(found[-1]).upper() if found else None


def parts_of(name: str) -> list[str] | None:
    """Return the names of all parts of a split file.

    Args:
        name: Name of one part.

    Returns:
        The names of all parts in order, or None if `name` is not a part of a split file.

    Raises:
        ModelNotFound: If there are too many parts.
    """
    found = _PART.fullmatch(name)
    if not found:
        return None
    stem, _, count = found.groups()
    if not 0 < int(count) <= MAX_PARTS:
        raise ModelNotFound(
            f"{name} is one of {int(count)} parts, but at most {MAX_PARTS} are supported",
            "Join them with llama-gguf-split --merge",
        )
    return [f"{stem}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)]


def complete_models(names: Iterable[str]) -> list[list[str]]:
    """Return the complete models among these files, each as a list of its parts. Models with a single part come
    first."""
    here = {name for name in names if name.lower().endswith(".gguf") and not _COMPANION.search(name)}
    models = []
    for name in sorted(here):
        parts = parts_of(name) or [name]
        if name == parts[0] and here.issuperset(parts):
            models.append(parts)
    return sorted(models, key=len)


def choose_model(names: Iterable[str], quantization: str | None, where: str) -> list[str]:
    """Choose the model to load among the GGUF files of a repository or folder.

    Args:
        names: Names of all files.
        quantization: A quantisation such as "Q4_K_M", or the name of a file. None chooses the first available of
            `PREFERRED_QUANTIZATIONS`.
        where: Name of the repository or folder, for the error message.

    Returns:
        The parts of the model in order.

    Raises:
        ModelNotFound: If there is no such model. The message lists the available models.
    """
    found: dict[str, list[str]] = {}
    for parts in complete_models(names):
        found.setdefault((quantization_of(parts[0]) or parts[0]).upper(), parts)
        if quantization is not None and quantization.lower() in (parts[0].lower(), parts[0][:-5].lower()):
            return parts
    if quantization is not None:
        if quantization.upper() in found:
            return found[quantization.upper()]
    elif found:
        return next((found[name] for name in PREFERRED_QUANTIZATIONS if name in found), next(iter(found.values())))
    have = f"Available: {', '.join(sorted(found))}" if found else "It contains no GGUF model; choose another"
    wanted = quantization or "GGUF file"
    raise ModelNotFound(f"{where} has no {wanted}", have)


def gguf_files(folder: Path, subfolders: bool = True) -> list[str]:
    """Return the GGUF files in a folder and, optionally, its subfolders, as paths relative to the folder.

    Unfinished downloads are not included, because their names end differently.
    """
    found = folder.glob("**/*.gguf" if subfolders else "*.gguf")
    return [path.relative_to(folder).as_posix() for path in found if path.is_file()]
