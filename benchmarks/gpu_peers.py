"""Baselines on a GPU: plain decoding by transformers, and by a bare compiled loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from gpu_models import RandomWeights
from torch import Tensor

Peer = Callable[[Sequence[int], int], list[int]]
"""(prompt, tokens) -> the greedy reply of exactly that many tokens."""


def transformers_static(raw: Mapping[str, Any], weights: RandomWeights) -> Peer:
    """`generate` with a static cache, which transformers compiles by itself on CUDA."""
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
    """Plain decoding in the manner of gpt-fast: one token, a static cache, one compiled step that ends in its argmax.

    After the idea of https://github.com/pytorch-labs/gpt-fast, with no line of it: whole-graph compilation with
    CUDA graphs ("reduce-overhead"), and attention over the whole static cache under a mask.
    """

    def __init__(self, weights: RandomWeights, length: int, compiled: bool) -> None:
        """`length`: positions of the static cache, which every step reads in full."""
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
        # A compiled graph copies at every step whatever is not marked static, here the weights.
        for tensor in (*self._w.values(), self._cache, self._mask, self._cos, self._sin):
            torch._dynamo.mark_static_address(tensor)
        compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(self._pass, mode="reduce-overhead", fullgraph=True)
        return compiled

    @torch.inference_mode()
    def __call__(self, prompt: Sequence[int], tokens: int) -> list[int]:
        text = torch.tensor([prompt], device=self._cos.device)
        place = torch.arange(len(prompt), device=self._cos.device)
        # Prefill is not measured, and not compiled.
        token, out = self._pass(text, place), []
        place = place[-1:] + 1
        for _ in range(tokens):
            out.append(token)
            token = self._step(token.clone(), place).clone()
            place = place + 1
        return torch.cat(out, 1)[0].tolist()

    def _pass(self, tokens: Tensor, place: Tensor) -> Tensor:
        """The next token [1, 1] after tokens [1, T] at `place` [T]."""
        x = F.embedding(tokens, self._w["model.embed_tokens.weight"])
        for layer in range(self._config.layers):
            prefix = f"model.layers.{layer}."
            x = x + self._attend(self._norm(x, prefix + "input_layernorm"), layer, prefix + "self_attn.", place)
            y = self._norm(x, prefix + "post_attention_layernorm")
            gate, up = (self._product(y, f"{prefix}mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self._product(F.silu(gate) * up, prefix + "mlp.down_proj")
        return self._product(self._norm(x[:, -1:], "model.norm"), "lm_head").argmax(-1)

    def _attend(self, x: Tensor, layer: int, prefix: str, place: Tensor) -> Tensor:
        c, t = self._config, x.shape[1]
        q, k, v = (self._product(x, f"{prefix}{n}_proj").view(1, t, -1, c.head_dim).transpose(1, 2) for n in "qkv")
        cache = self._cache[layer]
        cache[0].index_copy_(2, place, self._turn(k, place))
        cache[1].index_copy_(2, place, v)
        grouped = c.heads != c.kv_heads
        mask = self._mask[place]
        y = F.scaled_dot_product_attention(self._turn(q, place), cache[0], cache[1], mask, enable_gqa=grouped)
        return self._product(y.transpose(1, 2).reshape(1, t, -1), prefix + "o_proj")

    def _turn(self, x: Tensor, place: Tensor) -> Tensor:
        left, right = x.float().chunk(2, -1)
        turned = torch.cat([-right, left], -1)
        return (x * self._cos[place] + turned * self._sin[place]).to(x.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._w[name + ".weight"], self._config.norms.eps)

    def _product(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._w[name + ".weight"], self._w.get(name + ".bias"))
