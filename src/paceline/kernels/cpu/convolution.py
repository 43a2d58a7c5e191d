"""Short convolutions on the CPU kernels (`convolution.h`)."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int32, c_void_p

import torch
from torch import Tensor

from paceline.kernels.cpu.build import kernel
from paceline.kernels.cpu.matrix import fields


class _ShortConvolution(Structure):
    """The structure `ShortConvolution` in convolution.h."""

    _fields_ = fields((c_int32, "rows width channels activated"), (c_void_p, "before entries weight bias history out"))


def convolve(
    before: Tensor, entries: Tensor, history: Tensor, weight: Tensor, bias: Tensor | None, activated: bool
) -> Tensor:
    """Run a causal depthwise convolution over the rows of a tree, in float32.

    Args:
        before: The entries before the tree, [width - 1, channels].
        entries: The entries of all rows of the tree, [n, channels].
        history: For each of T rows, the numbers of the entries that it sees, int64 [T, width]. Numbers from
            `width` - 1 on are of the tree.
        weight: [width, channels].
        bias: [channels].
        activated: Apply SiLU to the sums.

    Returns:
        [T, channels].
    """
    width, channels = weight.shape
    out = torch.empty(len(history), channels, dtype=torch.float32, device="cpu")
    inputs = [None if x is None else x.contiguous() for x in (before, entries, weight, bias, history)]
    addresses = (None if x is None else x.data_ptr() for x in inputs)
    call = _ShortConvolution(len(history), width, channels, activated, *addresses, out.data_ptr())
    kernel("paceline_convolve", POINTER(_ShortConvolution), c_int32)(byref(call), torch.get_num_threads())
    return out
