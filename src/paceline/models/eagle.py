"""The network of an EAGLE head: one or a few decoder layers that extrapolate the target's hidden states.

Row t of a text combines the target's features g_t at position t with token t + 1, and predicts token t + 2. For drafted
tokens, g_t is not known, and the hidden state of the parent row takes its place. Row t has rotary position t, as in
SafeAILab's code, vLLM and SGLang. Speculators trains with position t + 1, which is equivalent, because rotary scores
depend only on distances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from paceline.types import Given, Rows

_LAYER = "layers.0."


class EagleNetwork:
    """The network of EAGLE-3 (arXiv 2503.01840), EAGLE-1/2 (2401.15077, 2406.16858) or an MTP layer, depending on
    `config`."""

    def __init__(self, config: EagleConfig, tensors: Mapping[str, Tensor], host: TargetWithHead) -> None:
        """Build the network.

        Args:
            config: The head's architecture.
            tensors: Weights in any float dtype, under the names in `heads.py`.
            host: The target.

        Raises:
            CorruptModel: If a tensor is missing or has the wrong shape, or the head's tokens are not in the target's
                vocabulary.
        """
        layer = replace(
            config.layer, norms=replace(config.layer.norms, after=False)
        )  # heads have no norms after attention and MLP, even for Gemma targets
        weights = Weights(tensors, host.dtype, host.device)
        self._embed = _embedding(config, weights, host)
        self._input = (_Eagle3Input if config.version == 3 else _Eagle1Input)(config, weights)
        # Later layers read the plain stream, as in the target.
        widths = [self._input.width, *[None] * (layer.layers - 1)]
        layers = [
            make_layer(layer, kind, weights, f"layers.{i}.", width)
            for i, (kind, width) in enumerate(zip(layer.plan, widths, strict=True))
        ]
        self._stack = LayerStack(layer, layers, host)
        # An EAGLE-1 head without a norm predicts normed states, which go straight to the target's output head.
        normed = config.built_in or "norm.weight" in weights
        self._norm = make_norm(layer, weights, "norm", layer.hidden) if normed else None
        self._continues_normed, self._layers = config.norm_output, layer.layers
        self.subset, self.logits = output_head(weights, host, config.draft_vocab, layer.hidden, config.head_tokens)
        """The token ids of the logits' columns (None for all tokens), and a function that maps the second result of
        `step` to logits [..., C]."""
        self.mask = _mask(config, weights)
        """P-EAGLE's mask token and its features [taps * target H]. None for other heads."""
        weights.finish()

    def new_cache(self) -> SlabCache:
        """Create a cache for the host's context length. The context length in a head's config only describes its
        training."""
        return self._stack.new_cache()

    @torch.inference_mode()
    def fuse(self, features: Tensor) -> Tensor:
        """Convert the target's concatenated taps [..., taps * target H] to the hidden states [..., H] that `step`
        takes."""
        return self._input.fuse(features)

    @torch.inference_mode()
    def step(
        self, rows: Rows, hidden: Tensor, cache: SlabCache, images: Sequence[Given | None] = ()
    ) -> tuple[Tensor, Tensor]:
        """Run one step of the head.

        Args:
            rows: The tokens. Each token *follows* the token of its hidden state.
            hidden: Hidden states [B, T, H]: fused features, or the first result of an earlier step.
            cache: The head's cache.
            images: For each slot, the images among its tokens. Empty if no slot has any.

        Returns:
            The hidden states for the next step, and the input of `logits`. Both are [B, T, H].
        """
        embedded = self._embed(rows.tokens)
        for line, given in zip(embedded, images, strict=False):
            if given and given.embeddings.shape[-1] == line.shape[-1]:
                line[given.rows.to(line.device)] = given.embeddings.to(line)
        mixer_input, residual = self._input.enter(embedded, hidden)
        ropes = self._stack.ropes(rows.positions, rows.end, [cache.prompts[slot] for slot in rows.slots])
        x, _ = self._stack.run(residual, 0, self._layers, ropes, cache.begin(rows), mixer_input)
        normed = x if self._norm is None else self._norm(x)
        return (normed if self._continues_normed else x), normed


class _Eagle3Input:
    """The input of EAGLE-3. Attention reads the embedding and the hidden state, which are normed separately and then
    concatenated. The residual stream continues the hidden state. `width` is the width of the input of attention."""

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
        """Return the input of attention [..., width] and the residual stream [..., H]."""
        normed = self._hidden_norm(hidden)
        both = torch.cat([self._input_norm(embedded), normed], -1)
        return both, normed if self._normed_residual else hidden


class _Eagle1Input:
    """Input of EAGLE-1, EAGLE-2 and MTP layers.

    `fc` fuses the embedding and the hidden state. In EAGLE-1 and 2, a Llama layer without an input norm follows. The
    hidden state is the target's last state after its final norm (transformers' `hidden_states[-1]`, the tap "final").
    An MTP layer norms both inputs of `fc` and has an input norm. MiMo's MTP layer reads the target's last state before
    its final norm.
    """

    def __init__(self, config: EagleConfig, weights: Weights) -> None:
        c = config.layer
        self.width = c.hidden
        self._fc = weights.linear({"fc": c.hidden}, c.hidden + config.target_hidden)
        name = _LAYER + "input_layernorm"
        normed = config.built_in or name + ".weight" in weights
        self._norm = make_norm(c, weights, name, c.hidden) if normed else None
        self._hidden_first = config.hidden_first
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
        x = self._fc(torch.cat(both[::-1] if self._hidden_first else both, -1))
        return (x if self._norm is None else self._norm(x)), x


def _mask(config: EagleConfig, weights: Weights) -> tuple[int, Tensor] | None:
    token, vocab = config.mask_token, config.layer.vocab_size
    if token is None:
        return None
    if not 0 <= token < vocab:
        raise CorruptModel(
            f"the head's mask token {token} is outside its vocabulary of {vocab} tokens", "Fetch the head again"
        )
    return token, weights.get("mask_hidden", (1, 1, len(config.taps) * config.target_hidden))[0, 0]


def _embedding(config: EagleConfig, weights: Weights, host: TargetWithHead) -> Activation:
    """Return the head's own embedding. If it has none, return the target's."""
    if "embed_tokens.weight" in weights:
        table = weights.get("embed_tokens.weight", (config.layer.vocab_size, config.layer.hidden))
        return lambda tokens: F.embedding(tokens, table)
    if config.layer.hidden != config.target_hidden:
        raise CorruptModel(
            f"the head has no embedding, and its width {config.layer.hidden} is not its target's, "
            f"{config.target_hidden}",
            "Fetch the head again",
        )
    return host.embed
