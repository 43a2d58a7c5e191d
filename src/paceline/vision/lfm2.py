"""The image processor of LFM2-VL. Unlike transformers' own (Lfm2VlImageProcessor), it does not need torchvision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.files.reading import read_json_if_exists
from paceline.files.schema import FLAG, check, each, integer, list_of, number

_SETTINGS: Mapping[str, Any] = {
    "downsample_factor": 2,
    "do_image_splitting": True,
    "min_tiles": 2,
    "max_tiles": 10,
    "use_thumbnail": True,
    "min_image_tokens": 64,
    "max_image_tokens": 256,
    "encoder_patch_size": 16,
    "tile_size": 512,
    "max_pixels_tolerance": 2.0,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_KINDS = {
    **each(FLAG, "do_image_splitting", "use_thumbnail"),
    **each(integer(1, 64), "downsample_factor", "min_tiles", "max_tiles"),
    **each(integer(1, 1 << 16), "min_image_tokens", "max_image_tokens", "encoder_patch_size", "tile_size"),
    "max_pixels_tolerance": number(0, 1e3),
    **each(list_of(number(0, 1)), "image_mean", "image_std"),
}


class TileProcessor:
    """Cuts large images into tiles of one size, in rows and columns, followed by a small copy of the whole image.

    Small images are only resized. The results equal transformers' up to the rounding of single pixels.
    """

    def __init__(self, settings: Path | Mapping[str, Any]) -> None:
        """`settings`: Contents of preprocessor_config.json, or its folder. Raise `CorruptModel` if a setting is
        wrong."""
        if isinstance(settings, Path):
            whole_file = read_json_if_exists(settings / "processor_config.json", {})
            settings = whole_file.get("image_processor") or read_json_if_exists(
                settings / "preprocessor_config.json", {}
            )
        own = {**_SETTINGS, **{key: value for key, value in settings.items() if key in _SETTINGS}}
        check("preprocessor_config.json", own, _KINDS)
        self._own = own
        self._patch: int = own["encoder_patch_size"]
        self._factor: int = self._patch * own["downsample_factor"]
        """Number of pixels, in each direction, that a row of the prompt stands for."""

    def __call__(self, image: Any) -> tuple[dict[str, Tensor], int, int]:
        """Process an image.

        Args:
            image: A Pillow image in RGB.

        Returns:
            The inputs of the tower, and the numbers of rows and columns of tiles.
        """
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
        height, width = pixels.shape[2:]
        rows, columns = self._grid(height, width)
        small = _resized(pixels, *self._size(height, width))
        if (rows, columns) == (1, 1):
            return self._inputs([small]), 1, 1
        tile = self._own["tile_size"]
        large = _resized(pixels, rows * tile, columns * tile)
        tiles = [one for line in large.split(tile, 2) for one in line.split(tile, 3)]
        return self._inputs([*tiles, *([small] if self._own["use_thumbnail"] else [])]), rows, columns

    def rows(self, height: int, width: int) -> int:
        """Return the number of rows that an image of this size gets in a prompt."""
        whole_image = math.prod(side // self._factor for side in self._size(height, width))
        tiles = math.prod(self._grid(height, width))
        if tiles == 1:
            return whole_image
        side: int = self._own["tile_size"] // self._factor
        return tiles * side**2 + (whole_image if self._own["use_thumbnail"] else 0)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the numbers of rows and columns of tiles."""
        own = self._own
        low, high = own["min_tiles"], own["max_tiles"]
        area = max(self._patch, _multiple(height, self._factor)) * max(self._patch, _multiple(width, self._factor))
        largest = own["max_image_tokens"] * self._factor**2 * own["max_pixels_tolerance"]
        if area <= largest or not own["do_image_splitting"] or low == high == 1:
            return 1, 1
        sides = range(1, high + 1)
        grids = sorted(
            {(w, h) for w in sides for h in sides if low <= w * h <= high}, key=lambda grid: grid[0] * grid[1]
        )
        best, least = (1, 1), math.inf
        for grid in grids:
            apart = abs(width / height - grid[0] / grid[1])
            covers = height * width > 0.5 * own["tile_size"] ** 2 * grid[0] * grid[1]
            if apart < least or (apart == least and covers):
                best, least = grid, min(apart, least)
        return best[1], best[0]

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of the copy of the whole image. Both sides are multiples of a row's size, and the number of
        rows is within the limits."""
        factor = self._factor
        low, high = (self._own[key] * factor**2 for key in ("min_image_tokens", "max_image_tokens"))
        tall, wide = (max(factor, _multiple(side, factor)) for side in (height, width))
        if tall * wide > high:
            scale = math.sqrt(height * width / high)
            return max(factor, int(height / scale / factor) * factor), max(factor, int(width / scale / factor) * factor)
        if tall * wide < low:
            scale = math.sqrt(low / (height * width))
            return math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor
        return tall, wide

    def _inputs(self, images: list[Tensor]) -> dict[str, Tensor]:
        """Return the inputs of the tower for images [1, 3, height, width] with values from 0 to 255."""
        mean, std = (torch.tensor(self._own[key])[:, None, None] for key in ("image_mean", "image_std"))
        patches, shapes = list[Tensor](), list[tuple[int, int]]()
        for image in images:
            # This rounds like transformers, which includes the division by 255 in the mean and the deviation.
            normed = (image - mean * 255) / (std * 255)
            cut = normed[0].unflatten(2, (-1, self._patch)).unflatten(1, (-1, self._patch))
            shapes.append((cut.shape[1], cut.shape[3]))
            patches.append(cut.permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1))
        most = max(map(len, patches))
        return {
            "pixel_values": torch.stack([F.pad(one, (0, 0, 0, most - len(one))) for one in patches]),
            "pixel_attention_mask": torch.tensor([[i < len(one) for i in range(most)] for one in patches]).int(),
            "spatial_shapes": torch.tensor(shapes),
        }


def _multiple(side: int, factor: int) -> int:
    return round(side / factor) * factor


def _resized(pixels: Tensor, height: int, width: int) -> Tensor:
    """Return pixels of another size, rounded to whole values."""
    return F.interpolate(pixels, (height, width), mode="bilinear", antialias=True).round_().clamp_(0, 255)
