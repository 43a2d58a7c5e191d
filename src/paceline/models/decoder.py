"""One config-driven decoder for every native family."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.attention import LayerAttention
from paceline.cache import SlabCache
from paceline.errors import CorruptModel
from paceline.models.config import ModelConfig
from paceline.models.layers import Attention, Layer, RMSNorm, Rotary
from paceline.protocols import KVCache, Pass
from paceline.runner import Activation, Linear, gated, linear
from paceline.types import Forward, Rows, Tap, Want

Progress = Callable[[int, int], None]
"""(layers done, layers in all)"""


class Decoder:
    """A decoder-only transformer as a `Target`."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress = lambda done, total: None,
    ) -> None:
        """`tensors`: by Hugging Face name, any float dtype. Raises `CorruptModel` for missing or misshapen ones."""
        self.config, self.dtype, self.device = config, dtype, device
        weights = Weights(tensors, dtype, device)
        self._precise = torch.float64 if dtype == torch.float64 else torch.float32
        self._rotary = Rotary(config.rope, config.head_dim, self._precise, device)
        self._embed = weights.get("model.embed_tokens.weight", (config.vocab_size, config.hidden))
        self._layers = []
        for index in range(config.layers):
            progress(index, config.layers)
            self._layers.append(_layer(config, weights, f"model.layers.{index}."))
        self._norm = RMSNorm(weights.get("model.norm.weight", (config.hidden,)), config.norm_eps)
        if config.tied:
            weights.skip("lm_head.weight")
            self._head = linear(self._embed)
        else:
            self._head = linear(weights.get("lm_head.weight", (config.vocab_size, config.hidden)))
        weights.finish()
        progress(config.layers, config.layers)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context_length(self) -> int:
        return self.config.context_length

    def new_cache(self) -> KVCache:
        c = self.config
        layers = [LayerAttention(scale=c.head_dim**-0.5)] * c.layers
        return SlabCache(layers, c.kv_heads, c.head_dim, c.context_length, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, rows: Rows, cache: KVCache, want: Want) -> Forward:
        """See `protocols.Target`. One embedding, L layers, one norm, and the head for the rows that want it."""
        attention: Pass = cache.begin(rows)
        rope = self._rotary(rows.positions, max(rows.lengths) + rows.start + rows.tokens.shape[1])
        x = F.embedding(rows.tokens, self._embed)
        taps: dict[Tap, Tensor] = {}
        for index, layer in enumerate(self._layers):
            if index in want.taps:
                taps[index] = x
            x = layer(x, index, rope, attention)
        if want.logits == "none" and "final" not in want.taps:
            return Forward(x.new_empty(x.shape[0], 0, self.vocab_size), taps)
        x = self._norm(x)
        if "final" in want.taps:
            taps["final"] = x
        x = {"all": x, "last": x[:, -1:], "none": x[:, :0]}[want.logits]
        return Forward(self._head(x).to(self._precise), taps)


def _layer(c: ModelConfig, weights: Weights, prefix: str) -> Layer:
    width, kv_width = c.heads * c.head_dim, c.kv_heads * c.head_dim
    attn, mlp = prefix + "self_attn.", prefix + "mlp."
    return Layer(
        RMSNorm(weights.get(prefix + "input_layernorm.weight", (c.hidden,)), c.norm_eps),
        Attention(
            weights.linear({attn + "q_proj": width, attn + "k_proj": kv_width, attn + "v_proj": kv_width}, c.hidden),
            weights.linear({attn + "o_proj": c.hidden}, width),
            c.heads,
            c.kv_heads,
            c.head_dim,
        ),
        RMSNorm(weights.get(prefix + "post_attention_layernorm.weight", (c.hidden,)), c.norm_eps),
        weights.gated(mlp + "gate_proj", mlp + "up_proj", (c.ffn, c.hidden), c.activation),
        weights.linear({mlp + "down_proj": c.hidden}, c.ffn),
    )


class Weights:
    """Takes tensors out of a checkpoint one by one, checks their shapes, and knows what was left over."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._tensors, self._dtype, self._device = tensors, dtype, device
        self._left = {name for name in tensors if not name.endswith(("rotary_emb.inv_freq", "masked_bias"))}

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor in the model's dtype, on its device."""
        if name not in self._tensors:
            raise CorruptModel(f"the checkpoint lacks {name}", "Fetch the model again")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise CorruptModel(
                f"{name} has shape {tuple(tensor.shape)} where the config means {shape}",
                "Config and weights are of different models; fetch the model again",
            )
        self._left.discard(name)
        return tensor.to(device=self._device, dtype=self._dtype)

    def linear(self, parts: Mapping[str, int], width: int) -> Linear:
        """One product for several projections of the same input, biases included where there are any."""
        weight = [self.get(name + ".weight", (out, width)) for name, out in parts.items()]
        bias = None
        if any(name + ".bias" in self._tensors for name in parts):
            bias = torch.cat([self._bias(name, out) for name, out in parts.items()])
        return linear(weight[0] if len(weight) == 1 else torch.cat(weight), bias)

    def gated(self, gate: str, up: str, shape: tuple[int, int], activation: str) -> Activation:
        """The first half of a gated MLP."""
        biases = None
        if gate + ".bias" in self._tensors or up + ".bias" in self._tensors:
            biases = (self._bias(gate, shape[0]), self._bias(up, shape[0]))
        return gated(self.get(gate + ".weight", shape), self.get(up + ".weight", shape), biases, activation)

    def _bias(self, name: str, out: int) -> Tensor:
        if name + ".bias" in self._tensors:
            return self.get(name + ".bias", (out,))
        return torch.zeros(out, dtype=self._dtype, device=self._device)

    def skip(self, name: str) -> None:
        """Leave a tensor unread that the model has no use for."""
        self._left.discard(name)

    def finish(self) -> None:
        """Raises `CorruptModel` where tensors were left over: the model would not be the one in the file."""
        if self._left:
            some = ", ".join(sorted(self._left)[:3])
            raise CorruptModel(
                f"the checkpoint holds {len(self._left)} tensors this architecture does not know ({some}, ...)",
                "It may be another architecture, or an adapter that must be merged first",
            )
