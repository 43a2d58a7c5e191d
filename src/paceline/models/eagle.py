"""The network of an EAGLE head: a decoder layer or a few that continue the target's hidden states.

Row t of a text pairs the target's features g_t at position t with token t + 1, and predicts token t + 2. Where g_t is
unknown because the token is only drafted, the parent row's hidden state takes its place. Rows have rotary position t,
as in SafeAILab's code, vLLM and SGLang; speculators trains with t + 1, which is equivalent: rotary scores depend on
distances alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.slab import SlabCache
from paceline.errors import CorruptModel
from paceline.kernels.activations import Activation
from paceline.models.decoder import make_layer
from paceline.models.heads import EagleConfig
from paceline.models.norms import make_norm
from paceline.models.output import output_head
from paceline.models.stack import LayerStack
from paceline.models.weights import Weights
from paceline.protocols import TargetWithHead
from paceline.types import Rows

_LAYER = "layers.0."


class EagleNetwork:
    """EAGLE-3 (arXiv 2503.01840), EAGLE-1/2 (2401.15077, 2406.16858) or a target's MTP layer, by `config`."""

    def __init__(self, config: EagleConfig, tensors: Mapping[str, Tensor], host: TargetWithHead) -> None:
        """`tensors`: under the names of `heads.py`, any float dtype. Raises `CorruptModel` for missing or misshapen
        ones, and if the head's vocabulary is not the host's."""
        layer = replace(
            config.layer, norms=replace(config.layer.norms, after=False)
        )  # a head has no further norms, not even one for Gemma
        weights = Weights(tensors, host.dtype, host.device)
        self._embed = _embedding(config, weights, host)
        self._entry = (_Eagle3Input if config.version == 3 else _Eagle1Input)(config, weights)
        widths = [self._entry.width, *[None] * (layer.layers - 1)]  # later layers are the family's own
        layers = [
            make_layer(layer, kind, weights, f"layers.{i}.", width)
            for i, (kind, width) in enumerate(zip(layer.plan, widths, strict=True))
        ]
        self._stack = LayerStack(layer, layers, host)
        # EAGLE-1 learns the normed state itself, so its layer leads straight to the target's head.
        normed = config.built_in or "norm.weight" in weights
        self._norm = make_norm(layer, weights, "norm", layer.hidden) if normed else None
        self._feeds_normed, self._layers = config.norm_output, layer.layers
        self.subset, self.logits = output_head(weights, host, config.draft_vocab, layer.hidden, config.head_tokens)
        """The tokens of the logits' columns (None: all), and logits [..., C] of the second result of `step`."""
        self.mask = _mask(config, weights)
        """P-EAGLE's mask token, and the features [taps * target H] that go with it."""
        weights.finish()

    def new_cache(self) -> SlabCache:
        """A cache for the host's context length: the one in a head's config is only that of its training texts."""
        return self._stack.new_cache()

    @torch.inference_mode()
    def fuse(self, features: Tensor) -> Tensor:
        """From the target's taps side by side [..., taps * target H] to a row's hidden state [..., H]."""
        return self._entry.fuse(features)

    @torch.inference_mode()
    def step(self, rows: Rows, hidden: Tensor, cache: SlabCache) -> tuple[Tensor, Tensor]:
        """Feed rows whose tokens *follow* those of `hidden` [B, T, H]: fused features, or hidden states of a step.

        Returns two [B, T, H]: hidden states for the next step, and the input of `logits`.
        """
        entry, residual = self._entry.enter(self._embed(rows.tokens), hidden)
        ropes = self._stack.ropes(rows.positions, rows.end, [cache.prompts[slot] for slot in rows.slots])
        x, _ = self._stack.run(residual, 0, self._layers, ropes, cache.begin(rows), entry)
        normed = x if self._norm is None else self._norm(x)
        return (normed if self._feeds_normed else x), normed


class _Eagle3Input:
    """Input of EAGLE-3: queries, keys and values see embedding and hidden state, each normed; the stream continues the
    hidden state. `width`: of the input of attention."""

    def __init__(self, config: EagleConfig, weights: Weights) -> None:
        c, wide = config.layer, len(config.taps) * config.target_hidden
        self.width = 2 * c.hidden
        self._input_norm = make_norm(c, weights, _LAYER + "input_layernorm", c.hidden)
        self._hidden_norm = make_norm(c, weights, _LAYER + "hidden_norm", c.hidden)
        self._normed_residual = config.norm_before_residual
        self._target_hidden = config.target_hidden
        self._tap_norms = [
            make_norm(c, weights, f"fc_norm.{i}", config.target_hidden)
            for i in range(len(config.taps) * config.fc_norm)
        ]
        self._wide_norm = make_norm(c, weights, "input_norm", wide) if config.norm_before_fc else None
        self._fc = weights.linear({"fc": c.hidden}, wide)

    def fuse(self, features: Tensor) -> Tensor:
        if self._tap_norms:
            taps = features.split(self._target_hidden, -1)
            features = torch.cat([norm(tap) for norm, tap in zip(self._tap_norms, taps, strict=True)], -1)
        if self._wide_norm is not None:
            features = self._wide_norm(features)
        return self._fc(features)

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The input of attention [..., width], and the residual stream [..., H]."""
        normed = self._hidden_norm(hidden)
        both = torch.cat([self._input_norm(embedded), normed], -1)
        return both, normed if self._normed_residual else hidden


class _Eagle1Input:
    """Input of EAGLE-1 and 2: embedding and hidden state are fused before a Llama layer without an input norm. The
    hidden state is the target's last one after its norm (transformers' `hidden_states[-1]`, the tap "final"). An MTP
    layer norms both, and has an input norm; MiMo's sees the last state before the target's norm."""

    def __init__(self, config: EagleConfig, weights: Weights) -> None:
        c = config.layer
        self.width = c.hidden
        self._fc = weights.linear({"fc": c.hidden}, c.hidden + config.target_hidden)
        name = _LAYER + "input_layernorm"
        normed = config.built_in or name + ".weight" in weights
        self._norm = make_norm(c, weights, name, c.hidden) if normed else None
        self._turned = config.hidden_first
        self._norms = [
            make_norm(c, weights, f"pre_fc_norm_{part}", c.hidden)
            for part in ("embedding", "hidden")
            if config.built_in
        ]

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        both = [embedded, hidden]
        if self._norms:
            both = [norm(x) for norm, x in zip(self._norms, both, strict=True)]
        x = self._fc(torch.cat(both[::-1] if self._turned else both, -1))
        return (x if self._norm is None else self._norm(x)), x


def _mask(config: EagleConfig, weights: Weights) -> tuple[int, Tensor] | None:
    token, vocab = config.mask_token, config.layer.vocab_size
    if token is None:
        return None
    if not 0 <= token < vocab:
        raise CorruptModel(f"the head's mask token is {token}, of a vocabulary of {vocab}", "Fetch the head again")
    return token, weights.get("mask_hidden", (1, 1, len(config.taps) * config.target_hidden))[0, 0]


def _embedding(config: EagleConfig, weights: Weights, host: TargetWithHead) -> Activation:
    """The head's own embedding, or the target's."""
    if "embed_tokens.weight" in weights:
        table = weights.get("embed_tokens.weight", (config.layer.vocab_size, config.layer.hidden))
        return lambda tokens: F.embedding(tokens, table)
    if config.layer.hidden != config.target_hidden:
        raise CorruptModel(
            f"the head is {config.layer.hidden} wide, its target {config.target_hidden}, and it has no embedding",
            "Fetch the head again",
        )
    return host.embed
