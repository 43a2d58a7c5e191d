"""The network of Gemma 4's assistant: decoder layers of queries alone, over the keys and values of its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.cache.attention import LayerAttention
from paceline.cache.slab import SlabCache
from paceline.errors import UnsupportedModel
from paceline.kernels.linear import linear
from paceline.models.config import LayerConfig, ModelConfig
from paceline.models.decoder import Decoder, make_layer
from paceline.models.heads import AssistantConfig
from paceline.models.norms import make_norm
from paceline.models.rope import RotarySet
from paceline.models.weights import Weights

_TABLE = "model.embed_tokens.weight"


class AssistantNetwork:
    """Each layer sees what the last layer of its kind (with a window, or without) of the target that has keys and
    values of its own has stored."""

    def __init__(self, config: AssistantConfig, tensors: Mapping[str, Tensor], host: Decoder) -> None:
        """`tensors`: under the names of `heads.py`. Raises `CorruptModel` for missing or misshapen ones, and
        `UnsupportedModel` for a target without such keys and values."""
        c = replace(config.layer, special=tuple(_placed(config.layer, one, host.config) for one in config.layer.plan))
        self._host = host
        weights = Weights(tensors, host.dtype, host.device)
        self._enter = weights.linear({"pre_projection": c.hidden}, 2 * config.target_hidden)
        self._leave = weights.linear({"post_projection": config.target_hidden}, c.hidden)
        self._layers = [make_layer(c, one, weights, f"model.layers.{i}.") for i, one in enumerate(c.plan)]
        self._norm = make_norm(c, weights, "model.norm", c.hidden)
        tied = c.tied or "lm_head.weight" not in weights
        head = weights.head(_TABLE if tied else "lm_head.weight", (c.vocab_size, c.hidden))
        weights.skip("lm_head.weight" if tied else _TABLE)
        weights.finish()
        self.logits = linear(head).precise
        """Logits [..., V] of the first result of `step`."""
        self._attentions = [
            LayerAttention(c.attention.scale or 1.0, one.window, heads=(one.kv_heads, one.head_dim), source=one.source)
            for one in c.plan
        ]
        ropes = [(one.rope, one.head_dim) for one in c.plan]
        self._ropes = RotarySet(ropes, torch.promote_types(host.dtype, torch.float32), host.device)

    @torch.inference_mode()
    def step(self, tokens: Tensor, hidden: Tensor, cache: SlabCache, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run rows [B, T] that all stand at the position after their slot's text.

        `tokens` [B, T], and `hidden` [B, T, target H]: the target's normed state before each, or the second result for
        the token before. Returns normed states [B, T, H] and what stands for the target's [B, T, target H].
        """
        attention = cache.view(slots, tokens.shape[1], self._attentions)
        lengths = [cache.lengths[slot] for slot in slots]
        positions = torch.tensor(lengths, device=tokens.device)[:, None].expand_as(tokens)
        ropes = self._ropes(positions, max(lengths) + 1, [cache.prompts[slot] for slot in slots])
        x = self._enter(torch.cat([self._host.embed(tokens), hidden.to(self._host.dtype)], -1))
        for i, layer in enumerate(self._layers):
            x = layer(x, i, ropes[self._ropes.index[i]], attention)
        x = self._norm(x)
        return x, self._leave(x)


def _placed(c: ModelConfig, layer: LayerConfig, target: ModelConfig) -> LayerConfig:
    """The layer with the target's layer whose keys and values it sees."""
    own = [
        i
        for i, one in enumerate(target.plan)
        if one.source is None and not one.recurrent and (one.window is None) == (layer.window is None)
    ]
    sizes = c.of(layer).head_dim, c.of(layer).kv_heads
    if not own or sizes != (target.of(target.plan[own[-1]]).head_dim, target.of(target.plan[own[-1]]).kv_heads):
        raise UnsupportedModel(
            "this target has no keys and values that the assistant's layers can see",
            "Use the assistant with the Gemma 4 that it was made for",
        )
    return replace(layer, source=own[-1], head_dim=sizes[0], kv_heads=sizes[1], window=target.plan[own[-1]].window)
