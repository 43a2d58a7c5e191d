"""The network of Gemma 4's assistant. Its decoder layers compute only queries, and read the target's keys and
values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.cache.attention import LayerAttention
from paceline.cache.slab import SlabCache
from paceline.errors import UnsupportedModel
from paceline.kernels.cpu.attention import attend, attends_natively
from paceline.kernels.linear import linear
from paceline.models.config import LayerConfig, ModelConfig
from paceline.models.decoder import Decoder, make_layer
from paceline.models.heads import AssistantConfig
from paceline.models.norms import make_norm
from paceline.models.rope import RotarySet
from paceline.models.weights import Weights

_TABLE = "model.embed_tokens.weight"


class AssistantNetwork:
    """The layers of Gemma 4's assistant, which attend to the target's KV cache.

    Each layer reads the keys and values of one target layer: the last layer of the same type (sliding or full
    attention) that stores keys and values of its own.
    """

    def __init__(self, config: AssistantConfig, tensors: Mapping[str, Tensor], host: Decoder) -> None:
        """Build the network.

        Args:
            config: The assistant's architecture.
            tensors: Weights, under the names in `heads.py`.
            host: The target.

        Raises:
            CorruptModel: If a tensor is missing or has the wrong shape.
            UnsupportedModel: If the target has no keys and values that the assistant's layers can read.
        """
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
        """Maps the normed states, which are the first result of `step`, to logits [..., V]."""
        kernel = attend if attends_natively(host.dtype, host.device) else None
        self._attentions = [
            LayerAttention(c.attention.scale or 1.0, one.window, source=one.source, kernel=kernel) for one in c.plan
        ]
        ropes = [(one.rope, one.head_dim) for one in c.plan]
        self._ropes = RotarySet(ropes, torch.promote_types(host.dtype, torch.float32), host.device)

    @torch.inference_mode()
    def step(self, tokens: Tensor, hidden: Tensor, cache: SlabCache, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run one step for each slot, at the position after its text.

        Args:
            tokens: Token ids [B, T].
            hidden: For each token, the hidden state of the token before it, [B, T, target H]: the target's normed
                state, or the second result of the step for that token.
            cache: The target's cache.
            slots: The slot of each row of the batch.

        Returns:
            The normed states [B, T, H], and a prediction of the target's hidden states [B, T, target H].
        """
        view = cache.view(slots, tokens.shape[1], self._attentions)
        lengths = [cache.lengths[slot] for slot in slots]
        positions = torch.tensor(lengths, device=tokens.device)[:, None].expand_as(tokens)
        ropes = self._ropes(positions, max(lengths) + 1, [cache.prompts[slot] for slot in slots])
        x = self._enter(torch.cat([self._host.embed(tokens), hidden.to(self._host.dtype)], -1))
        for i, layer in enumerate(self._layers):
            x = layer(x, i, ropes[self._ropes.index[i]], view)
        x = self._norm(x)
        return x, self._leave(x)


def _placed(c: ModelConfig, layer: LayerConfig, target: ModelConfig) -> LayerConfig:
    """Return the config of an assistant layer, completed with the target layer whose keys and values it reads."""
    own = [
        i
        for i, one in enumerate(target.plan)
        if one.source is None and not one.recurrent and (one.window is None) == (layer.window is None)
    ]
    sizes = c.of(layer).head_dim, c.of(layer).kv_heads
    if not own or sizes != (target.of(target.plan[own[-1]]).head_dim, target.of(target.plan[own[-1]]).kv_heads):
        raise UnsupportedModel(
            "this target has no keys and values that the assistant's layers can read",
            "Use the assistant with the Gemma 4 model that it was trained for",
        )
    return replace(layer, source=own[-1], head_dim=sizes[0], kv_heads=sizes[1], window=target.plan[own[-1]].window)
