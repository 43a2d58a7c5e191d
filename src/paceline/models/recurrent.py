"""Layers with a recurrent state instead of keys and values (`cache/state.py`): Gated DeltaNet and short convolutions.
Mamba-2 is in `mamba.py`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.cache.layout import NONE
from paceline.cache.state import Recurrence, Tensors, Tree
from paceline.kernels.cpu.convolution import convolve
from paceline.kernels.cpu.delta import apply_delta, scan_delta, scans_natively
from paceline.kernels.linear import Linear
from paceline.models.config import DeltaNetConfig, MatrixConfig, ModelConfig, RecurrentConfig, ShortConvConfig
from paceline.models.layers import Mixer, sigmoid
from paceline.models.norms import RMSNorm
from paceline.models.rope import Rope
from paceline.models.weights import Weights
from paceline.protocols import RecurrentPass

_CHUNK = 64
"""Number of prompt tokens that are processed together."""


class Convolution:
    """A causal depthwise convolution, in which each row sees its own path through the tree."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, activated: bool = False) -> None:
        """Build the convolution.

        Args:
            weight: [width, channels] in float32 or wider, with the newest entry last.
            bias: [channels].
            activated: Apply SiLU to the results.
        """
        self.weight, self.bias, self.activated = weight, bias, activated

    def empty(self) -> Tensor:
        """Return the entries before a text, [width - 1, channels]."""
        return torch.zeros_like(self.weight[1:])

    def run(self, before: Tensor, entries: Tensor, tree: Tree) -> Tensor:
        """Convolve the rows of a pass.

        The terms are added in a fixed order, so that the bits of a row do not depend on the other rows.

        Args:
            before: The entries before the tree, [width - 1, channels].
            entries: The entries of all rows of the tree, including rows of earlier passes.
            tree: The tree.

        Returns:
            The results of the pass's rows, [T, channels].
        """
        history = tree.history(len(self.weight))
        if scans_natively(self.weight):
            return convolve(before, entries, history, self.weight, self.bias, self.activated)
        every, history = torch.cat([before, entries]), history.to(entries.device)
        total = every[history[:, 0]] * self.weight[0]
        for column, weight in zip(history[:, 1:].unbind(1), self.weight[1:], strict=True):
            total += every[column] * weight
        if self.bias is not None:
            total += self.bias
        return total * sigmoid(total) if self.activated else total

    def advance(self, before: Tensor, entries: Tensor) -> Tensor:
        """Return the last width - 1 entries after appending `entries` [n, channels]."""
        return torch.cat([before, entries])[len(entries) :].clone()  # a view would keep all of the entries in memory


class ConvolutionState(Recurrence):
    """The state of a layer that only has a convolution: the last entries. The update of a row is its own entry."""

    def __init__(self, convolution: Convolution) -> None:
        self.convolution = convolution

    def empty(self) -> Tensors:
        return (self.convolution.empty(),)

    def scan(
        self, state: Tensors, earlier: Tensors | None, tree: Tree, inputs: Tensors, prompt: bool
    ) -> tuple[Tensor, Tensors, Tensors | None]:
        """See `Recurrence.scan`. `inputs` holds the entries [T, channels]."""
        every = torch.cat([earlier[0], inputs[0]]) if earlier else inputs[0]
        out = self.convolution.run(state[0], every, tree)
        end = (self.convolution.advance(state[0], every),) if tree.is_chain else None
        return out, () if prompt else inputs, end

    def apply(self, state: Tensors, updates: Tensors, rows: Sequence[int]) -> Tensors:
        return (self.convolution.advance(state[0], updates[0][list(rows)]),)


class MatrixState(Recurrence):
    """A matrix state S [heads, K, V], indexed by keys, after a short convolution.

    For each row, S decays, then a change is added under the row's key, and then the row's query reads it:

        S' = decay S + k d^T
        out = S'^T q

    The row's update is (decay, k, d) plus the convolution's entry. All of this is in float32 (float64 in a float64
    model).
    """

    def __init__(self, config: MatrixConfig, convolution: Convolution) -> None:
        self.config, self.convolution = config, convolution

    @abstractmethod
    def split(self, mixed: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Split the convolution's results into the inputs of the state.

        Args:
            mixed: The convolution's results [T, channels].
            gates: Gates [T, heads].

        Returns:
            Queries and keys [T, key_heads, K], values [T, heads, V], and beta [T, heads]. If beta is None, the values
            are the changes.
        """

    @abstractmethod
    def in_chunk(self, matrix: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, beta: Tensor | None) -> Tensors:
        """Process a chain of T rows with matrix multiplications.

        Args:
            matrix: The state before the chain, [heads, K, V].
            q: Queries [heads, T, K].
            k: Keys [heads, T, K].
            v: Values [heads, T, V].
            sums: Cumulative sums of the decays' logarithms, [heads, T, 1].
            beta: Beta [heads, T, 1], if the state has one.

        Returns:
            Outputs and changes, both [heads, T, V].
        """

    def finish(self, out: Tensor, mixed: Tensor) -> Tensor:
        """Return the outputs [T, heads, V], given the queries' results and the convolution's results."""
        return out

    def empty(self) -> Tensors:
        c, weight = self.config, self.convolution.weight
        return self.convolution.empty(), weight.new_zeros(c.heads, c.key_dim, c.value_dim)

    def scan(
        self, state: Tensors, earlier: Tensors | None, tree: Tree, inputs: Tensors, prompt: bool
    ) -> tuple[Tensor, Tensors, Tensors | None]:
        """See `Recurrence.scan`. `inputs` holds the convolution's entries [T, channels], and the logarithms of the
        decays and the gates, both [T, heads]."""
        (before, matrix), (entries, decay, gates) = state, inputs
        entries = entries.to(matrix.dtype)
        every = torch.cat([earlier[0], entries]) if earlier else entries
        mixed = self.convolution.run(before, every, tree)
        q, k, v, beta = self.split(mixed, gates)
        last, native = self.convolution.advance(before, every), scans_natively(matrix)
        if prompt and not native:
            out, matrix = self._in_chunks(matrix, self._each(q), self._each(k), v, decay, beta)
            return self.finish(out, mixed), (), (last, matrix)
        decay = decay.double().exp().to(matrix.dtype)
        if native:
            known = earlier[1:] if earlier else None
            out, changes, end = scan_delta(matrix, tree.parents, known, q, k, v, decay, beta, self.config.tiled)
        else:
            out, changes, end = self._one_by_one(matrix, earlier, tree, q, k, v, decay, beta)
        updates = () if prompt else (entries, decay, k, changes)
        return self.finish(out, mixed), updates, None if end is None else (last, end)

    def apply(self, state: Tensors, updates: Tensors, rows: Sequence[int]) -> Tensors:
        (before, matrix), (entries, decays, keys, changes) = state, (x[list(rows)] for x in updates)
        last = self.convolution.advance(before, entries)
        if scans_natively(matrix):
            return last, apply_delta(matrix, decays, keys, changes, self.config.tiled)
        for decay, k, change in zip(decays, keys, changes, strict=True):
            matrix = _write(_decayed(matrix, decay), self._each(k), change)
        return last, matrix

    def _each(self, x: Tensor) -> Tensor:
        """Repeat keys or queries [..., key_heads, K] for each value head."""
        repeats = self.config.heads // self.config.key_heads
        if self.config.tiled:
            return x.repeat(*(1,) * (x.dim() - 2), repeats, 1)
        return x.repeat_interleave(repeats, -2)

    def _one_by_one(
        self,
        matrix: Tensor,
        earlier: Tensors | None,
        tree: Tree,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decays: Tensor,
        beta: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Process rows one after the other. Returns outputs and changes [T, heads, V], and the matrix after the last
        row if the tree is a chain."""
        q, k = self._each(q), self._each(k)
        after = {NONE: matrix}
        for row in range(tree.start):
            assert earlier
            _, decay, keys, known = (x[row] for x in earlier)
            after[row] = _write(_decayed(after[tree.parents[row]], decay), self._each(keys), known)
        out, changes = torch.empty_like(v), v.clone()
        last = {parent: row for row, parent in enumerate(tree.parents)}
        for i, decay in enumerate(decays):
            row, parent = tree.start + i, tree.parents[tree.start + i]
            matrix = _decayed(after[parent], decay)
            if beta is not None:
                torch.mul(v[i] - _read(matrix, k[i]), beta[i, :, None], out=changes[i])
            out[i] = _read(_write(matrix, k[i], changes[i]), q[i])
            if row in last:
                after[row] = matrix
            if last[parent] == row:
                del after[parent]
        return out, changes, matrix if tree.is_chain else None

    def _in_chunks(
        self, matrix: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Process a chain of T rows in chunks.

        `q` and `k` are [T, heads, K], `v` is [T, heads, V], `decay` (logarithms) and `beta` are [T, heads]. Returns the
        outputs [T, heads, V] and the matrix after the last row.
        """
        parts = []
        for start in range(0, len(q), _CHUNK):
            here = slice(start, start + _CHUNK)
            qs, ks, vs = (x[here].transpose(0, 1) for x in (q, k, v))
            sums = decay[here].cumsum(0).T[..., None]
            out, changes = self.in_chunk(matrix, qs, ks, vs, sums, None if beta is None else beta[here].T[..., None])
            parts.append(out.transpose(0, 1))
            left = (sums[:, -1:] - sums).exp()
            matrix = matrix * sums[:, -1:].exp() + (ks * left).transpose(1, 2) @ changes
        return torch.cat(parts), matrix


def between(sums: Tensor) -> Tensor:
    """Return the decay [heads, T, T] from each row of a chunk to each later row, from sums of logarithms [heads, T,
    1]."""
    return (sums - sums.transpose(1, 2)).tril().exp().tril()


class DeltaRule(MatrixState):
    """Gated DeltaNet (arXiv 2412.06464). The state's value under a row's key moves towards the row's value by the
    fraction beta: d = beta (v - decay S^T k)."""

    def __init__(self, config: DeltaNetConfig, convolution: Convolution) -> None:
        super().__init__(config, convolution)
        # x / sqrt(sum(x^2) + 1e-6) is an RMS norm. Queries are also scaled by 1 / sqrt(K).
        size, full = config.key_dim, convolution.weight.new_full
        queries, keys = full((size,), 1 / size), full((size,), size**-0.5)
        self.qk_norms = RMSNorm(queries, 1e-6 / size), RMSNorm(keys, 1e-6 / size)

    def split(self, mixed: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `MatrixState.split`. Queries and keys are normalised to length 1, queries are then scaled, and the gates
        are beta."""
        c, keys = self.config, self.config.key_heads * self.config.key_dim
        q, k, v = mixed.split([keys, keys, mixed.shape[-1] - 2 * keys], -1)
        q, k = (norm(x.unflatten(-1, (-1, c.key_dim))) for x, norm in zip((q, k), self.qk_norms, strict=True))
        return q, k, v.unflatten(-1, (-1, c.value_dim)), gates

    def in_chunk(self, matrix: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, beta: Tensor | None) -> Tensors:
        """See `MatrixState.in_chunk`. Follows section 3.3 of the paper."""
        assert beta is not None
        decays = between(sums)
        system = (beta * k) @ k.transpose(1, 2) * decays
        both = torch.cat([beta * v, beta * k * sums.exp()], -1)
        solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
        new, old = solved.split([v.shape[-1], k.shape[-1]], -1)
        changes = new - old @ matrix
        return (q * sums.exp()) @ matrix + (q @ k.transpose(1, 2) * decays) @ changes, changes


def _decayed(matrix: Tensor, decay: Tensor) -> Tensor:
    return matrix * decay[:, None, None]


def _write(matrix: Tensor, key: Tensor, change: Tensor) -> Tensor:
    """Add a change under a key to a matrix, in place."""
    return matrix.addcmul_(key[:, :, None], change[:, None])


def _read(matrix: Tensor, key: Tensor) -> Tensor:
    return (matrix * key[:, :, None]).sum(1)


class RecurrentMixer(Mixer):
    """The mixer of a layer with a recurrent state."""

    recurrence: Recurrence


class ShortConv(RecurrentMixer):
    """The mixer of LFM2: a short convolution between two gates. The gates are projections of the layer's input."""

    def __init__(self, config: ShortConvConfig, in_projection: Linear, convolution: Convolution) -> None:
        """`in_projection` computes the gate before the convolution, the gate after it, and the convolution's
        entries."""
        self.config, self.in_projection = config, in_projection
        self.recurrence: ConvolutionState = ConvolutionState(convolution)

    def mix(self, x: Tensor, layer: int, rope: Rope, view: RecurrentPass) -> Tensor:
        """See `layers.Mixer.mix`."""
        before, after, entries = self.in_projection.precise(x).chunk(3, -1)
        return (after * view.recur(layer, (before * entries,))).to(x.dtype)


class DeltaNet(RecurrentMixer):
    """The mixer of a Gated DeltaNet layer (Qwen3-Next, Qwen3.5)."""

    def __init__(
        self,
        config: DeltaNetConfig,
        convolution: Convolution,
        in_projection: Linear,
        gates: tuple[Linear, Linear],
        decay: tuple[Tensor, Tensor],
        norm: RMSNorm,
    ) -> None:
        """Build the mixer.

        Args:
            config: Sizes.
            convolution: The convolution of queries, keys and values.
            in_projection: Linear layer for queries, keys and values before the convolution, and for the output gate.
            gates: Linear layers for beta and for the time step of the decay.
            decay: The decay's negative rate A and the bias of its time step, both [heads].
            norm: Norm of each head's output.
        """
        self.config, self.in_projection, self.norm = config, in_projection, norm
        self.beta_projection, self.step_projection = gates
        self.recurrence: DeltaRule = DeltaRule(config, convolution)
        self.decay_rate, self.step_bias = decay

    def mix(self, x: Tensor, layer: int, rope: Rope, view: RecurrentPass) -> Tensor:
        """See `layers.Mixer.mix`."""
        c = self.config
        entries, gate = self.in_projection(x).split([c.channels, c.heads * c.value_dim], -1)
        wide = self.decay_rate.dtype
        step = F.softplus((self.step_projection.precise(x).to(wide) + self.step_bias).double())
        beta = sigmoid(self.beta_projection.precise(x).to(wide))
        out = view.recur(layer, (entries, (self.decay_rate * step).to(wide), beta))
        gate = gate.to(wide)
        mixed: Tensor = self.norm(out).flatten(2) * (gate * sigmoid(gate))
        return mixed.to(x.dtype)


def make_recurrent(
    c: ModelConfig, kind: DeltaNetConfig | ShortConvConfig, weights: Weights, prefix: str
) -> tuple[RecurrentMixer, str, int]:
    """Build the mixer of a recurrent layer. Return the mixer, and the name and the input width of its output
    projection."""
    if isinstance(kind, ShortConvConfig):
        in_projection = weights.linear({prefix + "conv.in_proj": 3 * kind.channels}, c.hidden)
        convolution = make_convolution(kind, weights, prefix + "conv.conv")
        return ShortConv(kind, in_projection, convolution), "conv.out_proj", kind.channels
    prefix += "linear_attn."
    rate = -weights.get(prefix + "A_log", (kind.heads,), weights.precise_dtype).exp()
    bias = weights.get(prefix + "dt_bias", (kind.heads,), weights.precise_dtype)
    norm = RMSNorm(weights.get(prefix + "norm.weight", (kind.value_dim,), weights.precise_dtype), c.norms.eps)
    mixed, gates = _projections(c, kind, weights, prefix)
    mixer = DeltaNet(kind, make_convolution(kind, weights, prefix + "conv1d"), mixed, gates, (rate, bias), norm)
    return mixer, "linear_attn.out_proj", kind.heads * kind.value_dim


def make_convolution(kind: RecurrentConfig, weights: Weights, name: str) -> Convolution:
    weight = weights.get(name + ".weight", (kind.channels, 1, kind.width), weights.precise_dtype)[:, 0].T.contiguous()
    has_bias = name + ".bias" in weights
    bias = weights.get(name + ".bias", (kind.channels,), weights.precise_dtype) if has_bias else None
    return Convolution(weight, bias, activated=not isinstance(kind, ShortConvConfig))


def _projections(
    c: ModelConfig, kind: DeltaNetConfig, weights: Weights, prefix: str
) -> tuple[Linear, tuple[Linear, Linear]]:
    """Build the linear layers for queries, keys, values and output gate, and those for beta and the time step."""
    values, each = kind.heads * kind.value_dim, kind.heads // kind.key_heads
    if prefix + "in_proj_qkvz.weight" in weights:  # Qwen3-Next groups the rows by key head
        parts = _grouped(kind.key_heads, (kind.key_dim, kind.key_dim, each * kind.value_dim, each * kind.value_dim))
        mixed = weights.linear({prefix + "in_proj_qkvz": kind.channels + values}, c.hidden, torch.cat(parts))
    else:
        mixed = weights.linear({prefix + "in_proj_qkv": kind.channels, prefix + "in_proj_z": values}, c.hidden)
    if prefix + "in_proj_ba.weight" in weights:
        halves = _grouped(kind.key_heads, (each, each))
        beta, step = (weights.router(prefix + "in_proj_ba", (2 * kind.heads, c.hidden), half) for half in halves)
    else:
        beta, step = (weights.router(f"{prefix}in_proj_{x}", (kind.heads, c.hidden)) for x in "ba")
    return mixed, (beta, step)


def _grouped(groups: int, sizes: Sequence[int]) -> list[Tensor]:
    """Return the row indices of each part of a matrix that consists of `groups` groups, each with all parts in
    order."""
    rows = torch.arange(groups * sum(sizes)).view(groups, -1).split(list(sizes), 1)
    return [part.flatten() for part in rows]
