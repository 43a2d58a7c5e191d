"""Baselines on a GPU: plain decoding by transformers, and by a bare compiled loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from gpu_models import RandomWeights
from torch import Tensor

Peer = Callable[[Sequence[int], int], list[int]]
"""Function (prompt, tokens) -> the greedy reply with exactly that many tokens."""


def transformers_static(raw: Mapping[str, Any], weights: RandomWeights) -> Peer:
    """Return `generate` with a static cache, which transformers compiles automatically on CUDA."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sample = weights["model.norm.weight"]
    config = AutoConfig.for_model(**raw)
    with sample.device:
        model = AutoModelForCausalLM.from_config(config, dtype=sample.dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])

    def run(prompt: Sequence[int], tokens: int) -> list[int]:
        ids = torch.tensor([prompt], device=sample.device)
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        mask = torch.ones_like(ids)
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, cache_implementation="static", eos_token_id=None, **length
        )
        return out[0, len(prompt) :].tolist()

    return run


class BareLoop:
    """Plain decoding like gpt-fast: a static cache, and one compiled step per token, which ends with the argmax.

    It uses the ideas of https://github.com/pytorch-labs/gpt-fast, but not its code: whole-graph compilation with CUDA
    graphs ("reduce-overhead"), and attention over the whole static cache with a mask.
    """

    def __init__(self, weights: RandomWeights, length: int, compiled: bool) -> None:
        """Create a static cache of `length` positions. Every step reads all of them."""
        c = self._config = weights.config
        first = weights["model.norm.weight"]
        self._w = {name: weights[name] for name in weights}
        self._cache = first.new_zeros(c.layers, 2, 1, c.kv_heads, length, c.head_dim)
        self._mask = torch.ones(length, length, dtype=torch.bool, device=first.device).tril_()
        half = torch.arange(0, c.head_dim, 2, device=first.device) / c.head_dim
        angles = torch.arange(length, device=first.device)[:, None] / c.rope.theta ** torch.cat([half, half])
        self._cos, self._sin = angles.cos(), angles.sin()
        self._step = self._compiled() if compiled else self._pass

    def _compiled(self) -> Callable[[Tensor, Tensor], Tensor]:
        # At every step, a compiled graph copies all tensors that are not marked as static, such as the weights.
        for tensor in (*self._w.values(), self._cache, self._mask, self._cos, self._sin):
            torch._dynamo.mark_static_address(tensor)
        compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(self._pass, mode="reduce-overhead", fullgraph=True)
        return compiled

    @torch.inference_mode()
    def __call__(self, prompt: Sequence[int], tokens: int) -> list[int]:
        text = torch.tensor([prompt], device=self._cos.device)
        positions = torch.arange(len(prompt), device=self._cos.device)
        # Prefill is neither measured nor compiled.
        token, out = self._pass(text, positions), []
        positions = positions[-1:] + 1
        for _ in range(tokens):
            out.append(token)
            token = self._step(token.clone(), positions).clone()
            positions = positions + 1
        return torch.cat(out, 1)[0].tolist()

    def _pass(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the next token [1, 1] after tokens [1, T] at `positions` [T]."""
        x = F.embedding(tokens, self._w["model.embed_tokens.weight"])
        for layer in range(self._config.layers):
            prefix = f"model.layers.{layer}."
            x = x + self._attend(self._norm(x, prefix + "input_layernorm"), layer, prefix + "self_attn.", positions)
            y = self._norm(x, prefix + "post_attention_layernorm")
            gate, up = (self._product(y, f"{prefix}mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self._product(F.silu(gate) * up, prefix + "mlp.down_proj")
        return self._product(self._norm(x[:, -1:], "model.norm"), "lm_head").argmax(-1)

    def _attend(self, x: Tensor, layer: int, prefix: str, positions: Tensor) -> Tensor:
        c, t = self._config, x.shape[1]
        q, k, v = (self._product(x, f"{prefix}{n}_proj").view(1, t, -1, c.head_dim).transpose(1, 2) for n in "qkv")
        cache = self._cache[layer]
        cache[0].index_copy_(2, positions, self._rotate(k, positions))
        cache[1].index_copy_(2, positions, v)
        grouped = c.heads != c.kv_heads
        mask = self._mask[positions]
        y = F.scaled_dot_product_attention(self._rotate(q, positions), cache[0], cache[1], mask, enable_gqa=grouped)
        return self._product(y.transpose(1, 2).reshape(1, t, -1), prefix + "o_proj")

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        left, right = x.float().chunk(2, -1)
        rotated = torch.cat([-right, left], -1)
        return (x * self._cos[positions] + rotated * self._sin[positions]).to(x.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._w[name + ".weight"], self._config.norms.eps)

    def _product(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._w[name + ".weight"], self._w.get(name + ".bias"))
