"""Recurrent layers in the data structures of the kernels: the mixer of a layer (`delta_net.h`, `mamba.h`,
`gated_convolution.h`), and the states of a pass (`stretches.h`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from ctypes import Structure, addressof, c_float, c_int32, c_void_p
from itertools import accumulate

import torch
from torch import Tensor

from paceline.cache.state import StatePass, Stretch, Tensors, Tree
from paceline.kernels.cpu.matrix import LANES, CMatrix, NativeLinear, fields
from paceline.models.config import MatrixConfig, ShortConvConfig
from paceline.models.mamba import Mamba2
from paceline.models.recurrent import Convolution, DeltaNet, MatrixState, ShortConv

_Config = MatrixConfig | ShortConvConfig
_MATRIX_FIELDS = ("entries_before", "before"), ("entries", "decay", "keys", "changes"), ("last_entries", "after")
_CONVOLUTION_FIELDS = ("entries_before",), ("entries",), ("last_entries",)
"""Fields of `CStretch` for the tensors of the state before a stretch, its updates, and the state after it."""


class CMatrixState(Structure):
    """The structure `MatrixState` in matrix_state.h."""

    _fields_ = fields(
        (c_void_p, "conv_weight conv_bias"), (c_int32, "heads key_heads keys values conv_width tiled activated")
    )


class CDeltaNet(Structure):
    """The structure `DeltaNet` in delta_net.h."""

    _fields_ = fields(
        (CMatrix, "beta time_step"),
        (c_void_p, "decay_rate step_bias query_norm key_norm output_norm"),
        (CMatrixState, "state"),
        (c_float, "qk_eps output_eps"),
    )


class CMamba(Structure):
    """The structure `Mamba` in mamba.h."""

    _fields_ = fields(
        (c_void_p, "decay_rate step_bias skip output_norm"),
        (CMatrixState, "state"),
        (c_float, "output_eps"),
        (c_int32, "norm_first"),
    )


class CGatedConvolution(Structure):
    """The structure `GatedConvolution` in gated_convolution.h."""

    _fields_ = fields((c_void_p, "weight bias"), (c_int32, "channels width"))


class CStretch(Structure):
    """The structure `Stretch` in stretches.h."""

    _fields_ = fields(
        (c_int32, "first count start"),
        (c_void_p, "parents history entries_before before entries decay keys changes last_entries after"),
    )


def native_gates(mixer: DeltaNet) -> tuple[NativeLinear, NativeLinear] | None:
    """Return the projections that compute beta and the time step of the decay, or None if the kernels cannot run them
    together."""
    beta, step = mixer.beta_projection, mixer.step_projection
    if not (isinstance(beta, NativeLinear) and isinstance(step, NativeLinear)):
        return None
    return (beta, step) if beta.matrix.kinds == step.matrix.kinds and len(beta.matrix.kinds) == 1 else None


def delta_net(mixer: DeltaNet, pointer: Callable[[Tensor | None], int | None]) -> CDeltaNet:
    """Return the structure of a mixer. `pointer`: Pads a vector, keeps it alive, and returns its address."""
    gates = native_gates(mixer)
    assert gates
    (beta, step), (queries, keys) = gates, mixer.recurrence.qk_norms
    return CDeltaNet(
        *(beta.matrix.c, step.matrix.c, pointer(mixer.decay_rate), pointer(mixer.step_bias)),
        *(pointer(queries.weight), pointer(keys.weight), pointer(mixer.norm.weight)),
        *(_matrix_state(mixer.recurrence), queries.eps, mixer.norm.eps),
    )


def mamba(mixer: Mamba2, pointer: Callable[[Tensor | None], int | None]) -> CMamba:
    """Return the structure of a mixer. `pointer`: See `delta_net`."""
    norm, vectors = mixer.norm, (mixer.decay_rate, mixer.step_bias, mixer.recurrence.skip)
    weight, eps, first = (norm.padded_weight(LANES), norm.eps, norm.first) if norm else (None, 0.0, False)
    return CMamba(*map(pointer, (*vectors, weight)), _matrix_state(mixer.recurrence), eps, first)


def _matrix_state(state: MatrixState) -> CMatrixState:
    c, convolution = state.config, state.convolution
    return CMatrixState(
        *_weights(convolution),
        *(c.heads, c.key_heads, c.key_dim, c.value_dim, c.width, c.tiled, convolution.activated),
    )


def gated_convolution(mixer: ShortConv) -> CGatedConvolution:
    """Return the structure of a mixer."""
    return CGatedConvolution(*_weights(mixer.recurrence.convolution), mixer.config.channels, mixer.config.width)


def _weights(convolution: Convolution) -> tuple[int, int | None]:
    """Return the addresses of a convolution's weight and bias."""
    return convolution.weight.data_ptr(), None if convolution.bias is None else convolution.bias.data_ptr()


class KernelStates:
    """The stretches of a pass (`cache.state.Stretch`) for consecutive layers, and the memory for their results.

    The pass refers to this memory from the start, and the kernels fill it.
    """

    def __init__(self, view: StatePass, configs: Mapping[int, _Config]) -> None:
        """`configs`: Index of a recurrent layer -> its sizes."""
        counts = view.rows.counts
        self._view, self._first_rows = view, list(accumulate(counts, initial=0))
        self._kept_alive: list[object] = []
        """The objects that `table` points to."""
        self._trees: dict[tuple[Tree, int], tuple[int, int]] = {}
        self._prompts: dict[tuple[_Config, int], Tensors] = {}
        layers = [list(self._stretches(layer, c)) for layer, c in configs.items()]
        self.count = len(layers[0]) if layers else 0
        """Number of stretches of each layer."""
        self.table = (CStretch * (self.count * len(layers)))(*(one for stretches in layers for one in stretches))
        """The stretches of all layers, layer by layer."""

    def _stretches(self, layer: int, c: _Config) -> Iterator[CStretch]:
        for stretch in self._view.stretches(layer):
            tree, state = stretch.tree, tuple(x.contiguous() for x in stretch.state)
            every, updates = self._updates(layer, c, stretch)
            end = tuple(torch.empty_like(x) for x in state) if tree.is_chain else None
            self._view.keep(layer, stretch, every, end)
            self._kept_alive += [state, updates, end]
            rows, pointers = stretch.rows, dict[str, int]()
            names_of = _MATRIX_FIELDS if isinstance(c, MatrixConfig) else _CONVOLUTION_FIELDS
            for names, tensors in zip(names_of, (state, updates, end), strict=True):
                if tensors is not None:
                    pointers |= {name: x.data_ptr() for name, x in zip(names, tensors, strict=True)}
            first = self._first_rows[stretch.slot] + rows.start
            yield CStretch(first, rows.stop - rows.start, tree.start, *self._tree(tree, c.width), **pointers)

    def _updates(self, layer: int, c: _Config, stretch: Stretch) -> tuple[Tensors, Tensors]:
        """Return the updates that the pass keeps, and the memory for the updates of the stretch's tree.

        The pass keeps the updates of all rows since the last commit. Their memory includes that of the tree.
        """
        view, b = self._view, stretch.slot
        if view.rows.prefill:  # a prompt keeps no updates, so the layers can share memory
            if (c, b) not in self._prompts:
                self._prompts[c, b] = _updates(c, view.rows.counts[b])
            every = self._prompts[c, b]
            return (), tuple(x[stretch.rows] for x in every)
        known = view.known(layer, b)
        start = len(known[0]) if known else 0
        every = _updates(c, start + view.rows.counts[b])
        for x, own in zip(every, known or (), strict=False):
            x[:start] = own
        return every, tuple(x[len(x) - len(stretch.tree.parents) :] for x in every)

    def _tree(self, tree: Tree, width: int) -> tuple[int, int]:
        """Return the addresses of the rows' parents and of their histories."""
        if (tree, width) not in self._trees:
            parents, history = (c_int32 * len(tree.parents))(*tree.parents), tree.history(width)
            self._kept_alive += [parents, history]
            self._trees[tree, width] = addressof(parents), history.data_ptr()
        return self._trees[tree, width]


def _updates(c: _Config, rows: int) -> Tensors:
    """Return memory for the updates of a state (see `recurrent.MatrixState` and `recurrent.ConvolutionState`)."""
    shapes: tuple[tuple[int, ...], ...] = ((c.channels,),)
    if isinstance(c, MatrixConfig):
        shapes += (c.heads,), (c.key_heads, c.key_dim), (c.heads, c.value_dim)
    # The kernels write float32 into main memory, whatever defaults the user has set in torch.
    return tuple(torch.empty(rows, *shape, dtype=torch.float32, device="cpu") for shape in shapes)
