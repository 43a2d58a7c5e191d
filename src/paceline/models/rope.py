"""Rotary position embedding (Su et al. 2021) and its scaling rules for longer contexts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.files.schema import FIX_INVALID_FILE, NULL, OBJECT, ROPE, check, check_value
from paceline.models.config import RopeConfig

Rope = tuple[Tensor, Tensor] | None
"""The cosines and signed sines of a pass (see `Rotary`), or None if positions are not encoded."""

_TABLES = 16
"""Maximum number of tables of factors. Rules that depend on the prompt's length need one table per length."""


class Rotary:
    """Computes cosines and sines by position. The two halves of a head are rotated against each other, as in Hugging
    Face's models."""

    def __init__(self, config: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Prepare the factors, in the given dtype.

        Angles are float32, as in the training of the published models. Powers, cosines and sines are computed in
        float64 and rounded once. They are therefore the same on machines whose math libraries differ in the last bit.
        """
        self.config, self._head_dim = config, head_dim
        self._empty = torch.empty(2, 0, 0, dtype=dtype, device=device)
        self._tables: dict[int, Tensor] = {}

    def __call__(self, positions: Tensor, highest: int, prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines [B, T, 1, R], for R rotated dimensions.

        Args:
            positions: Positions [B, T], or positions on each axis [3, B, T] (M-RoPE).
            highest: Upper bound of the positions.
            prompts: Prompt length of each of the B requests, for rules that depend on it.
        """
        spans = [span_of(self.config, prompt) for prompt in prompts]
        if positions.dim() == 3:
            every = self.table(spans[0], highest)[:, positions]
            axes = torch.tensor(self.config.axes, device=every.device).repeat(2).expand(2, 1, *every.shape[2:])
            cos, sin = every.gather(1, axes).movedim(1, 3)
            return cos, sin
        if len(set(spans)) == 1:
            cos, sin = self.table(spans[0], highest)[:, positions, None]
        else:
            slots = [self.table(span, highest)[:, slot] for span, slot in zip(spans, positions, strict=True)]
            cos, sin = torch.stack(slots, 1)[:, :, :, None]
        return cos, sin

    def table(self, span: int, highest: int) -> Tensor:
        """Return factors [2, positions, R] that cover position `highest`. They are scaled for texts of length `span`
        (see `span_of`)."""
        table = self._tables.get(span, self._empty)
        if highest >= table.shape[1]:
            if span not in self._tables and len(self._tables) == _TABLES:
                self._tables.pop(next(iter(self._tables)))
            table = self._tables[span] = self._make(span, max(highest + 1, 2 * table.shape[1], 512))
        return table

    def _make(self, span: int, length: int) -> Tensor:
        positions = torch.arange(length, dtype=torch.float32)
        if self.config.kind == "temperature":  # this scales queries, but does not rotate them
            (_, floor), (_, scale) = self.config.scaling
            longer = 1 + scale * ((positions + 1) / floor).floor().double().log1p().float()
            return torch.stack([longer, torch.zeros(length)])[..., None].repeat(1, 1, self._head_dim).to(self._empty)
        inverse = inverse_frequencies(self.config, self._head_dim, span)
        angles = (positions[:, None] * inverse).double()
        cos, sin = angles.cos().float(), angles.sin().float()
        factors = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])
        return (factors * dict(self.config.scaling).get("attention_factor", 1.0)).to(self._empty)


class RotarySet:
    """The rotary embeddings of a model's layers. Layers with the same config share one `Rotary`."""

    def __init__(
        self, ropes: Sequence[tuple[RopeConfig | None, int]], dtype: torch.dtype, device: torch.device
    ) -> None:
        """`ropes`: The rotary embedding and the head size of each layer. `Rotary` describes the other arguments."""
        kinds = list(dict.fromkeys(ropes))
        self._rotaries = [Rotary(rope, head_dim, dtype, device) if rope else None for rope, head_dim in kinds]
        self.index = [kinds.index(rope) for rope in ropes]
        """For each layer, the index of its factors in the result of a call."""

    def __call__(self, positions: Tensor, highest: int, prompts: Sequence[int]) -> list[Rope]:
        """Return the factors of each distinct embedding (see `Rotary`), or None for the embedding of layers without
        positions."""
        return [rotary(positions, highest, prompts) if rotary else None for rotary in self._rotaries]

    def spans(self, prompt: int) -> tuple[int, ...]:
        """Return the spans of all embeddings for a prompt length. Only prompts with equal spans can share keys."""
        return tuple(span_of(rotary.config, prompt) for rotary in self._rotaries if rotary)

    def reserve(self, highest: int) -> int:
        """Extend the unscaled tables of factors to positions up to `highest`.

        Returns:
            The total number of positions in all tables. It grows when a table is reallocated.
        """
        return sum(rotary.table(0, highest).shape[1] for rotary in self._rotaries if rotary)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply `Rotary`'s factors to the first R of the D elements of x [B, T, heads, D].

    Rolling by R / 2 and multiplying with signed sines is equivalent to "rotate half".
    """
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat([rotate(x[..., :rotated], cos, sin), x[..., rotated:]], -1)
    wide = x.to(cos.dtype)
    return torch.addcmul(wide * cos, wide.roll(rotated // 2, -1), sin).to(x.dtype)


def span_of(config: RopeConfig, prompt: int) -> int:
    """Return the text length for which a request's positions are scaled, or 0 if they are not scaled.

    The rules "dynamic" and "longrope" depend on the length of the text. transformers uses the current length, so keys
    that were computed before the limit do not match keys that are computed after it. vLLM and llama.cpp use the length
    of the longest possible text, which makes short texts worse. Here, the length of the prompt decides for the whole
    request. So a row never depends on other rows, on drafts or on `max_new_tokens`, and every prompt has the same
    logits as in transformers. A text that grows beyond the limit keeps its factors.

    Args:
        config: The rotary embedding.
        prompt: Prompt length in tokens.
    """
    if config.kind not in ("dynamic", "longrope"):
        return 0
    limit = int(dict(config.scaling)["original_max_position_embeddings"])
    return 0 if prompt <= limit else prompt if config.kind == "dynamic" else limit + 1


def inverse_frequencies(config: RopeConfig, head_dim: int, span: int = 0) -> Tensor:
    """Return the frequencies [R / 2] in radians per position, float32."""
    rotated, theta, numbers = int(head_dim * config.share), config.theta, dict(config.scaling)
    if config.kind == "dynamic" and span:  # NTK-aware scaling: the base grows with the text's length
        stretch = numbers["factor"] * span / numbers["original_max_position_embeddings"] - (numbers["factor"] - 1)
        theta *= stretch ** (rotated / (rotated - 2))
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    wavelengths = (theta ** exponents.double()).float()
    if factors := (config.long_factors if span else ()) or config.factors:
        return 1.0 / (torch.tensor(factors) * wavelengths)
    if config.kind == "proportional":  # only the first planes rotate, at their frequencies in a full rotation (Gemma 4)
        turning = torch.arange(rotated // 2) < int(numbers["partial_rotary_factor"] * rotated // 2)
        return turning / wavelengths / numbers["factor"]
    if config.kind == "linear":
        return 1.0 / wavelengths / numbers["factor"]
    if config.kind == "llama3":
        return _llama3(1.0 / wavelengths, numbers)
    return _yarn(1.0 / wavelengths, theta, numbers) if config.kind == "yarn" else 1.0 / wavelengths


def _llama3(inverse: Tensor, numbers: Mapping[str, float]) -> Tensor:
    """Scale as in Llama 3.1: low frequencies are divided by `factor`, high frequencies are kept, and frequencies in
    between are blended."""
    low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
    turns = numbers["original_max_position_embeddings"] * inverse / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return inverse * (blend + (1 - blend) / numbers["factor"])


def _yarn(inverse: Tensor, theta: float, numbers: Mapping[str, float]) -> Tensor:
    """Scale as in YaRN (Peng et al. 2023): blend between the planes that rotate `beta_fast` times and `beta_slow`
    times."""
    planes = len(inverse)

    def plane(turns: float) -> float:
        """Return the plane, as a fraction, that makes this number of turns over the original context."""
        return planes * math.log(numbers["original_max_position_embeddings"] / (turns * 2 * math.pi)) / math.log(theta)

    low, high = plane(numbers["beta_fast"]), plane(numbers["beta_slow"])
    if numbers["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * planes - 1)
    ramp = ((torch.arange(planes, dtype=torch.float32) - low) / (max(high - low, 0.001))).clamp(0, 1)
    return inverse / numbers["factor"] * ramp + inverse * (1 - ramp)


Raw = Mapping[str, Any]


def scaling_of(raw: Raw) -> Raw:
    """Return `rope_scaling`, or `rope_parameters` of transformers 5, which may be grouped by layer type. Return an
    empty dict if the config has neither."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def read_rope(scaling: Raw | None, raw: Raw, theta: float, head_dim: int) -> RopeConfig:
    """Read `rope_scaling`, or `rope_parameters` of transformers 5, which includes `rope_theta`.

    Args:
        scaling: The scaling rule, or None.
        raw: The config that contains it.
        theta: Base of the frequencies, unless the rule has its own base.
        head_dim: Number of elements of a head.

    Raises:
        UnsupportedModel: If the rule or one of its keys is unknown.
        CorruptModel: If a key is missing, or a value is out of range.
    """
    check_value("config.json", "rope scaling", scaling, OBJECT | NULL)
    check("rope scaling", scaling or {}, ROPE)
    given = {key: value for key, value in (scaling or {}).items() if value is not None}
    kind = given.pop("rope_type", None) or given.get("type") or "default"
    if kind not in KINDS:
        raise UnsupportedModel(f"rope scaling {kind!r} is not supported", f"Supported: {', '.join(KINDS)}")
    needed, known = KINDS[kind]
    if absent := [key for key in needed if key not in given]:
        raise CorruptModel(f"rope scaling {kind!r} lacks {', '.join(absent)}", FIX_INVALID_FILE)
    if unknown := [key for key in given if key not in (*needed, *known, *_HARMLESS)]:
        raise UnsupportedModel(f"rope scaling {kind!r} with {', '.join(unknown)} is not supported", "Use another model")
    share = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    share = 1.0 if share is None else float(share)
    if kind == "proportional":
        given["partial_rotary_factor"], share = share, 1.0
    rotated = int(head_dim * share)
    short = given.get("short_factor") or raw.get("rope_freqs") or ()
    factors, long = tuple(map(float, short)), tuple(map(float, given.get("long_factor", ())))
    # "dynamic" scales its base by a power with exponent R / (R - 2), so R must be greater than 2.
    least = 4 if kind == "dynamic" else 2
    if rotated < least or rotated % 2 or any(len(x) not in (0, rotated // 2) for x in (factors, long)):
        raise CorruptModel(
            f"rope scaling {kind!r} with {len(factors)} factors does not fit {rotated} rotated dimensions of a head"
        )
    return RopeConfig(
        theta=float(given.get("rope_theta", theta)),
        kind=kind,
        scaling=tuple((key, float(value)) for key, value in _numbers(kind, given, raw).items()),
        factors=factors,
        long_factors=long,
        share=share,
    )


_ORIGINAL = "original_max_position_embeddings"
_HARMLESS = ("type", "rope_theta", "partial_rotary_factor", _ORIGINAL, "finetuned")
"""Keys that every rule accepts and ignores."""

KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": ((), ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
    "proportional": ((), ("factor",)),
    "longrope": (("short_factor", "long_factor"), ("factor", "attention_factor")),
}
"""Scaling rule -> its required keys and its optional keys."""


def _numbers(kind: str, given: Raw, raw: Raw) -> dict[str, float]:
    """Return the parameters of a rule, including derived ones."""
    longest = raw.get("max_position_embeddings", 2048)
    # The original context length is in the config (Phi-3) or in the rule (other models).
    original = float(raw.get(_ORIGINAL) or given.get(_ORIGINAL) or longest)
    if kind == "proportional":
        return {"factor": given.get("factor") or 1.0, "partial_rotary_factor": given["partial_rotary_factor"]}
    if kind not in ("yarn", "longrope"):
        numbers = {key: given[key] for key in KINDS[kind][0]}
        limit = {"dynamic": longest, "llama3": original}.get(kind)
        return numbers | ({_ORIGINAL: limit} if limit else {})
    factor = given.get("factor") or longest / original
    if kind == "longrope":  # Ding et al. 2024
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return {_ORIGINAL: original, "attention_factor": given.get("attention_factor", attention)}

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = temperature(1.0)
    if given.get("mscale") and given.get("mscale_all_dim"):
        attention = temperature(given["mscale"]) / temperature(given["mscale_all_dim"])
    return {
        "factor": factor,
        _ORIGINAL: original,
        "beta_fast": given.get("beta_fast") or 32,
        "beta_slow": given.get("beta_slow") or 1,
        "attention_factor": given.get("attention_factor", attention),
        "truncate": given.get("truncate", True),
    }
