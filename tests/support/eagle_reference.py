"""A second, plain implementation of an EAGLE head: whole texts, dense masks, no cache, no shared code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.models.decoder import Decoder
from paceline.models.heads import EagleConfig
from paceline.types import Want
from paceline.verify.tree import pack_prefix


class Reference:
    """A head and its target, in float64."""

    def __init__(self, config: EagleConfig, tensors: Mapping[str, Tensor], target: Decoder) -> None:
        self.config, self.target = config, target
        self.t = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}

    def features(self, text: Sequence[int]) -> Tensor:
        """Return the target's hidden states at every position of a text [n, taps * H], from one pass."""
        cache = self.target.new_cache()
        rows = pack_prefix(text, cache.acquire(), 0, self.target.device)
        taps = self.target.forward(rows, cache, Want(taps=self.config.taps)).taps
        return torch.cat([taps[tap][0, : len(text)] for tap in self.config.taps], -1)

    def after(self, text: Sequence[int], path: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return logits [V], and the states [H] behind them, after a text and the drafted tokens that follow it."""
        hidden = self.fuse(self.features(text[:-1]))
        tokens = list(text[1:])
        fed, states = self.layer(tokens, hidden)
        for token in path:
            tokens.append(token)
            hidden = torch.cat([hidden, fed[-1:]])
            fed, states = self.layer(tokens, hidden)
        return self.logits(states[-1]), states[-1]

    def fuse(self, features: Tensor) -> Tensor:
        if self.config.version == 1:
            return features
        if self.config.fc_norm:
            taps = features.chunk(len(self.config.taps), -1)
            features = torch.cat([self.norm(tap, f"fc_norm.{i}") for i, tap in enumerate(taps)], -1)
        if self.config.norm_before_fc:
            features = self.norm(features, "input_norm")
        return features @ self.t["fc.weight"].T

    def layer(self, tokens: Sequence[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return, for all rows of a text, the input to the next row [n, H] and the input to the output head [n, H]."""
        ids = torch.tensor(tokens)
        embedded = self.t["embed_tokens.weight"][ids] if "embed_tokens.weight" in self.t else self.target.embed(ids)
        if self.config.version == 1:
            stream = torch.cat([embedded, hidden], -1) @ self.t["fc.weight"].T + self.t["fc.bias"]
            seen = stream
        else:
            normed = self.norm(hidden, "layers.0.hidden_norm")
            seen = torch.cat([self.norm(embedded, "layers.0.input_layernorm"), normed], -1)
            stream = normed if self.config.norm_before_residual else hidden
        for i in range(self.config.layer.layers):
            stream = stream + self.attention(seen if i == 0 else self.norm(stream, f"layers.{i}.input_layernorm"), i)
            x = self.norm(stream, f"layers.{i}.post_attention_layernorm")
            gate, up = (x @ self.t[f"layers.{i}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            stream = stream + (gate * gate.sigmoid() * up) @ self.t[f"layers.{i}.mlp.down_proj.weight"].T
        if self.config.version == 1:
            return stream, stream
        normed = self.norm(stream, "norm")
        return (normed if self.config.norm_output else stream), normed

    def attention(self, x: Tensor, layer: int) -> Tensor:
        c, n = self.config.layer, len(x)
        q, k, v = (
            (x @ self.t[f"layers.{layer}.self_attn.{name}_proj.weight"].T).view(n, -1, c.head_dim).transpose(0, 1)
            for name in "qkv"
        )
        q, k = self.turn(q), self.turn(k)
        group = c.heads // c.kv_heads
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = q @ k.mT / c.head_dim**0.5
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        return mixed.transpose(0, 1).reshape(n, -1) @ self.t[f"layers.{layer}.self_attn.o_proj.weight"].T

    def turn(self, x: Tensor) -> Tensor:
        """Apply the rotary embedding with complex numbers: rotate row t by t angles.

        Angles are float32, as in training. Their cosines and sines are exact except for one rounding.
        """
        half = x.shape[-1] // 2
        speeds = 1 / (self.config.layer.rope.theta ** (torch.arange(half) / half).double()).float()
        angles = (torch.arange(x.shape[1])[:, None] * speeds).double()
        turns = torch.complex(angles.cos().float().double(), angles.sin().float().double())
        turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turns
        return torch.cat([turned.real, turned.imag], -1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        root = (x.pow(2).mean(-1, keepdim=True) + self.config.layer.norms.eps).sqrt()
        return x / root * self.t[name + ".weight"]

    def logits(self, state: Tensor) -> Tensor:
        """Return logits over the target's tokens, with -inf for tokens that are not in the head's vocabulary."""
        if "lm_head.weight" not in self.t:
            return self.target.logits(state)
        known = self.t["lm_head.weight"] @ state
        ids = torch.arange(len(known)) + self.t.get("d2t", 0)
        return torch.full((self.target.vocab_size,), -torch.inf, dtype=torch.float64).scatter(0, ids, known)
