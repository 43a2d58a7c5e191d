"""One description for every decoder family, read from Hugging Face configs (GGUF metadata is translated to them)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import CorruptModel, UnsupportedModel
from paceline.runner import ACTIVATIONS


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base, scaling rule ("default", "linear", "llama3") with its factors in Hugging Face's terms.

    `factors`: divisors per frequency, where a checkpoint brings them ready (GGUF's rope_freqs).
    """

    theta: float = 10000.0
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a decoder-only model is made of. Sizes in elements, `context_length` in tokens."""

    family: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context_length: int
    norm_eps: float = 1e-6
    activation: str = "silu"
    tied: bool = False
    rope: RopeConfig = RopeConfig()

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token holds, at 2 bytes an element."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


Raw = Mapping[str, Any]


def _llama(raw: Raw, base: ModelConfig) -> ModelConfig:
    return base


def _windowed(raw: Raw, base: ModelConfig) -> ModelConfig:
    """Inside its sliding window a windowed model is a full one, so the window bounds the context."""
    window: int | None = raw.get("sliding_window")
    if not window or not raw.get("use_sliding_window", True):
        return base
    return replace(base, context_length=min(base.context_length, window))


FAMILIES: dict[str, Callable[[Raw, ModelConfig], ModelConfig]] = {
    "llama": _llama,
    "mistral": _windowed,
    "qwen2": _windowed,
}
"""model_type -> what it changes. Biases need no entry: a projection has one where the checkpoint holds one."""


def read_config(raw: Raw) -> ModelConfig:
    """Raises `UnsupportedModel` for what the native decoder does not run, `CorruptModel` for missing keys."""
    family = raw.get("model_type", "?")
    refuse_other_kinds(raw)
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"model type {family!r} is not supported", f"Paceline runs {', '.join(sorted(FAMILIES))}"
        )
    try:
        heads = raw["num_attention_heads"]
        base = ModelConfig(
            family=family,
            vocab_size=raw["vocab_size"],
            hidden=raw["hidden_size"],
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            ffn=raw["intermediate_size"],
            context_length=raw.get("max_position_embeddings", 2048),
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            activation=raw.get("hidden_act", "silu"),
            tied=raw.get("tie_word_embeddings", False),
            rope=_rope(raw),
        )
    except KeyError as missing:
        raise CorruptModel(f"config.json of a {family} model lacks {missing}", "Fetch the model again") from missing
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CorruptModel(f"config.json of a {family} model makes no sense ({error})", "Fetch it again") from error
    sizes = ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "context_length")
    if wrong := [name for name in sizes if not isinstance(getattr(base, name), int) or getattr(base, name) < 1]:
        raise CorruptModel(f"config.json gives no positive number for {', '.join(wrong)}", "Fetch the model again")
    if base.activation not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {base.activation!r} is not known", f"Known: {', '.join(ACTIVATIONS)}")
    if base.heads % base.kv_heads or base.head_dim % 2:
        raise CorruptModel(f"{base.heads} heads of size {base.head_dim} over {base.kv_heads} key heads do not fit")
    return FAMILIES[family](raw, base)


def refuse_other_kinds(raw: Raw) -> None:
    """Multimodal, encoder-decoder and recurrent models, named for what they are."""
    name = (raw.get("architectures") or [raw.get("model_type", "?")])[0]
    if any(key in raw for key in ("vision_config", "audio_config", "text_config")):
        raise UnsupportedModel(f"{name} is a multimodal model", "Use a text-only model of the same family")
    if raw.get("is_encoder_decoder"):
        raise UnsupportedModel(f"{name} is an encoder-decoder model", "Use a decoder-only model")
    recurrent = ("mamba", "rwkv", "recurrent", "jamba", "bamba", "zamba", "xlstm", "lfm2", "falcon_h1", "ssm")
    if any(word in str(raw.get("model_type", "")).lower() for word in recurrent):
        raise UnsupportedModel(
            f"{name} is a recurrent model, whose state cannot drop rejected tokens",
            "Use an attention-only model",
        )


def _rope(raw: Raw) -> RopeConfig:
    """Both spellings: `rope_theta` + `rope_scaling`, and transformers 5's `rope_parameters`."""
    scaling = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or raw.get("rope_theta", 10000.0)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None) or "default"
    scaling.pop("type", None)
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedModel(f"rope scaling {kind!r} is not supported", "Supported: default, linear, llama3")
    needed = {"default": (), "linear": ("factor",), "llama3": _LLAMA3}[kind]
    if absent := [key for key in needed if key not in scaling]:
        raise CorruptModel(f"rope scaling {kind!r} lacks {', '.join(absent)}", "Fetch the model again")
    return RopeConfig(
        theta=float(theta),
        kind=kind,
        scaling=tuple((key, float(scaling[key])) for key in needed),
        factors=tuple(map(float, raw.get("rope_freqs") or ())),
    )


_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
