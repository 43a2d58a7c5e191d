"""Short names and hub ids of models."""

from __future__ import annotations

import re
from typing import NamedTuple

ALIASES = {
    "gemma2:2b": "bartowski/gemma-2-2b-it-GGUF",
    "gemma3:270m": "ggml-org/gemma-3-270m-it-GGUF",
    "gemma3:1b": "ggml-org/gemma-3-1b-it-GGUF",
    "gemma3:4b": "ggml-org/gemma-3-4b-it-GGUF",
    "gpt-oss:20b": "ggml-org/gpt-oss-20b-GGUF",
    "llama3.1:8b": "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF",
    "llama3.2:1b": "bartowski/Llama-3.2-1B-Instruct-GGUF",
    "llama3.2:3b": "bartowski/Llama-3.2-3B-Instruct-GGUF",
    "mistral:7b": "bartowski/Mistral-7B-Instruct-v0.3-GGUF",
    "phi4-mini:3.8b": "unsloth/Phi-4-mini-instruct-GGUF",
    "qwen2.5:0.5b": "Qwen/Qwen2.5-0.5B-Instruct-GGUF",
    "qwen2.5:1.5b": "Qwen/Qwen2.5-1.5B-Instruct-GGUF",
    "qwen2.5:3b": "Qwen/Qwen2.5-3B-Instruct-GGUF",
    "qwen2.5:7b": "Qwen/Qwen2.5-7B-Instruct-GGUF",
    "qwen2.5-coder:0.5b": "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
    "qwen2.5-coder:1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    "qwen2.5-coder:3b": "Qwen/Qwen2.5-Coder-3B-Instruct-GGUF",
    "qwen2.5-coder:7b": "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF",
    "qwen3:0.6b": "unsloth/Qwen3-0.6B-GGUF",
    "qwen3:1.7b": "unsloth/Qwen3-1.7B-GGUF",
    "qwen3:4b": "unsloth/Qwen3-4B-Instruct-2507-GGUF",
    "qwen3:8b": "unsloth/Qwen3-8B-GGUF",
    "smollm2:135m": "bartowski/SmolLM2-135M-Instruct-GGUF",
    "smollm2:360m": "bartowski/SmolLM2-360M-Instruct-GGUF",
    "smollm2:1.7b": "bartowski/SmolLM2-1.7B-Instruct-GGUF",
    "smollm3:3b": "ggml-org/SmolLM3-3B-GGUF",
}
"""Short name -> hub repository with GGUF files."""

_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?")


class HubName(NamedTuple):
    """A model of the hub.

    Attributes:
        repository: "owner/name".
        quantization: The quantisation to choose among the GGUF files. None for the default.
    """

    repository: str
    quantization: str | None


def hub_name(name: str) -> HubName | None:
    """Parse a short name or a hub id, which a colon and a quantisation may follow. Return None for any other name."""
    if name in ALIASES:
        return HubName(ALIASES[name], None)
    alias, _, quantization = name.rpartition(":")
    if alias in ALIASES and quantization:
        return HubName(ALIASES[alias], quantization)
    found = _HUB_ID.fullmatch(name)
    return HubName(found[1], found[2]) if found and not name.endswith(".gguf") else None


def short_name(repository: str, quantization: str | None) -> str:
    """Return the shortest name for a model of the hub."""
    name = next((alias for alias, other in ALIASES.items() if other == repository), repository)
    return f"{name}:{quantization}" if quantization else name


def similar_names(name: str) -> list[str]:
    """Return the short names of the same family as `name`."""
    family = name.partition(":")[0].lower()
    return [alias for alias in ALIASES if family and alias.startswith(family)]
