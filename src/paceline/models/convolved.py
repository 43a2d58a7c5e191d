"""Decoder layers whose blocks run between convolutions with input-dependent kernels (DFlash 2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.models.layers import Layer
from paceline.models.rope import Rope
from paceline.models.weights import Weights
from paceline.protocols import Pass


class BlockConvolution:
    """Two depthwise convolutions along a drafted block: one before attention or the MLP of a layer, and one after it.

    The kernels of a row are `base_kernel` [2, taps, H] plus a projection of the normed row that enters the first
    convolution. The projection has one element per side, tap and group, in that order of `kernel_projection`'s rows,
    and all channels of a group share it. The block is padded with zeros at its start.
    """

    def __init__(self, weights: Weights, prefix: str, hidden: int, taps: int, group: int) -> None:
        """Load the kernels.

        Args:
            weights: The checkpoint's tensors.
            prefix: Prefix of the tensors' names.
            hidden: Number of channels H.
            taps: Number of tokens that a kernel covers.
            group: Number of channels that share the input-dependent part of a kernel.

        Raises:
            CorruptModel: If a tensor is missing or has the wrong shape.
        """
        self._base = weights.get(prefix + "base_kernel", (2, taps, hidden))
        self._projection = weights.linear({prefix + "kernel_projection": 2 * taps * (hidden // group)}, hidden)
        self._shape, self._group = (2, taps, hidden // group), group

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve blocks [B, size, H]. Return the input of attention or the MLP, and the input-dependent parts of the
        kernels, which `after` needs."""
        added = self._projection(x).unflatten(-1, self._shape)
        return self._convolve(x, added, 0), added

    def after(self, x: Tensor, added: Tensor) -> Tensor:
        """Convolve the output [B, size, H] of attention or the MLP. The result is then added to the stream."""
        return self._convolve(x, added, 1)

    def _convolve(self, x: Tensor, added: Tensor, side: int) -> Tensor:
        count, total = x.shape[1], torch.zeros_like(x)
        for tap, base in enumerate(self._base[side]):
            kernel = base.unflatten(0, (-1, self._group)) + added[:, :, side, tap, :, None]
            total += kernel.flatten(2) * F.pad(x, (0, 0, tap, 0))[:, :count]
        return total


class ConvolvedLayer(Layer):
    """A pre-norm layer with a `BlockConvolution` around attention and another around the feed-forward block. Every slot
    of x must hold a whole drafted block."""

    def __init__(self, layer: Layer, attention: BlockConvolution, mlp: BlockConvolution) -> None:
        super().__init__(layer.mixer_norm, layer.mixer, layer.out, layer.mlp_norm, None)
        self.mlp = layer.mlp
        self._around_attention, self._around_mlp = attention, mlp

    def __call__(
        self,
        x: Tensor,
        layer: int,
        rope: Rope,
        view: Pass,
        mixer_input: Tensor | None = None,
        token_embeddings: Tensor | None = None,
    ) -> Tensor:
        """See `Layer`. These layers have neither `post_norms` nor per-layer embeddings."""
        assert self.mlp_norm
        norm, mixer, out, mlp = self._parts()
        seen, added = self._around_attention.before(norm(x))
        mixed = out(mixer.mix(seen, layer, rope, view))
        x = x + self._around_attention.after(mixed, added)
        seen, added = self._around_mlp.before(self.mlp_norm(x))
        return x + self._around_mlp.after(mlp(seen), added)
