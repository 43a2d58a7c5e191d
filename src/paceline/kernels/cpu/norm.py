"""The norm of `layers.cpp`, for rows that do not pass through a whole layer."""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from paceline.errors import OutOfMemory
from paceline.kernels.cpu.build import library
from paceline.kernels.cpu.matrix import LANES, SMALLER, check_rows


class NativeNorm:
    """See `models.layers.RMSNorm`, for bfloat16 on a CPU."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight.float().contiguous(), eps
        lib = library()
        assert lib is not None
        self._run = lib.paceline_norm
        self._run.argtypes = (c_void_p, c_int32, c_int64, c_void_p, c_float, c_void_p)

    @staticmethod
    def suits(weight: Tensor) -> bool:
        return weight.device.type == "cpu" and weight.shape[-1] % LANES == 0

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        y, size = torch.empty_like(x), self._weight.shape[0]
        check_rows(x, size)
        if self._run(x.data_ptr(), size, x.numel() // size, self._weight.data_ptr(), self._eps, y.data_ptr()):
            raise OutOfMemory(f"no memory for a norm of {size} elements", SMALLER)
        return y
