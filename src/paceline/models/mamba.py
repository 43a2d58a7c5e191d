"""Mamba-2 (arXiv 2405.21060): layers with a decaying matrix state, possibly in parallel with attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.state import Tensors
from paceline.kernels.linear import Linear
from paceline.models.config import Mamba2Config, ModelConfig, RecurrentConfig
from paceline.models.layers import Addend, Attention, sigmoid
from paceline.models.norms import RMSNorm
from paceline.models.recurrent import (
    Convolution,
    MatrixState,
    RecurrentMixer,
    between,
    make_convolution,
    make_recurrent,
)
from paceline.models.rope import Rope
from paceline.models.weights import Weights
from paceline.protocols import RecurrentPass


class Selective(MatrixState):
    """Mamba-2's state. B is the key, and C is the query. The change is the value times the row's time step, which is
    passed as the gate. The value times `skip` [heads] is added directly to the output."""

    def __init__(self, config: Mamba2Config, convolution: Convolution, skip: Tensor) -> None:
        super().__init__(config, convolution)
        self.skip = skip

    def split(self, mixed: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """See `MatrixState.split`."""
        k, q = (x.unflatten(-1, (-1, self.config.key_dim)) for x in mixed[:, self._values :].chunk(2, -1))
        return q, k, self._value(mixed) * gates[..., None], None

    def finish(self, out: Tensor, mixed: Tensor) -> Tensor:
        """See `MatrixState.finish`."""
        return out + self._value(mixed) * self.skip[:, None]

    def in_chunk(self, matrix: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, beta: Tensor | None) -> Tensors:
        """See `MatrixState.in_chunk`. Follows section 6 of the paper."""
        return (q * sums.exp()) @ matrix + (q @ k.transpose(1, 2) * between(sums)) @ v, v

    @property
    def _values(self) -> int:
        return self.config.heads * self.config.value_dim

    def _value(self, mixed: Tensor) -> Tensor:
        value: Tensor = mixed[:, : self._values].unflatten(-1, (-1, self.config.value_dim))
        return value


class GroupNorm:
    """An RMS norm of each group of channels. If `first` is True, it is applied before the gate, and otherwise after the
    gate."""

    def __init__(self, weight: Tensor, groups: int, eps: float, first: bool) -> None:
        """`weight` is [channels]."""
        self._weight, self._groups, self.first, self.eps = weight, groups, first, eps
        self._norm = RMSNorm(torch.ones_like(weight[: len(weight) // groups]), eps)

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Norm x and apply the gate, both [..., channels]."""
        if not self.first:
            x = x * gate
        x = self._norm(x.unflatten(-1, (self._groups, -1))).flatten(-2).mul(self._weight)
        return x * gate if self.first else x

    def padded_weight(self, lanes: int) -> Tensor:
        """Return the weight with each group padded to whole lanes, as one vector."""
        each = self._weight.unflatten(0, (self._groups, -1))
        return F.pad(each, (0, -each.shape[1] % lanes)).flatten()


class Mamba2(RecurrentMixer):
    """The mixer of a Mamba-2 layer."""

    def __init__(
        self,
        config: Mamba2Config,
        in_projection: Linear,
        state: Selective,
        decay: tuple[Tensor, Tensor],
        norm: GroupNorm | None,
    ) -> None:
        """Build the mixer.

        Args:
            config: Sizes.
            in_projection: Linear layer that computes the output gate, the inputs of the convolution and the time steps.
            state: The state.
            decay: The negative rate A of the decay, and the bias of its time step, both [heads].
            norm: Norm of the output, or None.
        """
        self.config, self.in_projection, self.norm = config, in_projection, norm
        self.recurrence: Selective = state
        self.decay_rate, self.step_bias = decay

    def mix(self, x: Tensor, layer: int, rope: Rope, view: RecurrentPass) -> Tensor:
        """See `layers.Mixer.mix`."""
        c, wide = self.config, self.decay_rate.dtype
        values = c.heads * c.value_dim
        gate, entries, step = self.in_projection.precise(x).to(wide).split([values, c.channels, c.heads], -1)
        # Compute this in float64, because in float32 torch uses another function for the last elements of a tensor (see
        # `sigmoid`).
        step = F.softplus((step + self.step_bias).double())
        out = view.recur(layer, (entries, (self.decay_rate * step).to(wide), step.to(wide))).flatten(2)
        gate = gate * sigmoid(gate)
        return (out * gate if self.norm is None else self.norm(out, gate)).to(x.dtype)


class Parallel(RecurrentMixer):
    """Attention in parallel with a recurrent state, on the same rows (Falcon-H1)."""

    def __init__(self, attention: Attention, other: RecurrentMixer) -> None:
        self.attention, self.other, self.recurrence = attention, other, other.recurrence

    def mix(self, x: Tensor, layer: int, rope: Rope, view: RecurrentPass) -> Tensor:
        """Return the outputs of attention and of the state, concatenated, [B, T, *]."""
        return torch.cat([one.mix(x, layer, rope, view) for one in (self.attention, self.other)], -1)


class SplitLinear(Addend):
    """The sum of two linear layers. The first takes the first `width` elements of a row, the second takes the rest."""

    def __init__(self, first: Linear, second: Linear, width: int) -> None:
        self.parts, self._width = (first, second), width

    def __call__(self, x: Tensor) -> Tensor:
        first, second = self._split(x)
        return self.parts[1].onto(second, self.parts[0](first))

    def onto(self, x: Tensor, residual: Tensor) -> Tensor:
        """See `layers.Addend.onto`."""
        first, second = self._split(x)
        return self.parts[1].onto(second, self.parts[0].onto(first, residual))

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., : self._width].contiguous(), x[..., self._width :].contiguous()


def make_state(c: ModelConfig, kind: RecurrentConfig, weights: Weights, prefix: str) -> tuple[RecurrentMixer, str, int]:
    """Build the mixer of a layer with a state. Return the mixer, and the name and the input width of its output
    projection."""
    if not isinstance(kind, Mamba2Config):
        return make_recurrent(c, kind, weights, prefix)

    def each_head(name: str) -> Tensor:
        return weights.get(f"{prefix}mamba.{name}", (kind.heads,), weights.precise_dtype)

    values, norm = kind.heads * kind.value_dim, None
    if (name := prefix + "mamba.norm.weight") in weights:
        norm = GroupNorm(
            weights.get(name, (values,), weights.precise_dtype), kind.key_heads, c.norms.eps, kind.norm_first
        )
    in_projection = weights.linear({prefix + "mamba.in_proj": values + kind.channels + kind.heads}, c.hidden)
    state = Selective(kind, make_convolution(kind, weights, prefix + "mamba.conv1d"), each_head("D"))
    mixer = Mamba2(kind, in_projection, state, (-each_head("A_log").exp(), each_head("dt_bias")), norm)
    return mixer, "mamba.out_proj", values
