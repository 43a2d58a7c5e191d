"""Prompts with images: token ids, with embeddings at some positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256, shake_256

import numpy as np
import torch
from torch import Tensor

from paceline.types import Given, Mutual


@dataclass(frozen=True, eq=False)  # without slots, for `row_ids`
class EncodedImage:
    """An image as a language model reads it.

    Attributes:
        text: Text that stands for the image in the prompt, with one placeholder token per row of `embeddings`.
        embeddings: Inputs of layer 0, [n, H].
        deep: See `Given.deep`, each [n, H].
        grid: For M-RoPE, the number of positions (time, height, width) that the rows take. None for other models.
        mutual: Layers that let the rows see each other. If there are such layers, or if there is a grid, the rows are
            adjacent in the prompt.
    """

    text: str
    embeddings: Tensor
    deep: tuple[Tensor, ...] = ()
    grid: tuple[int, int, int] | None = None
    mutual: Mutual = "none"

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.embeddings, *self.deep))

    @cached_property
    def row_ids(self) -> list[int]:
        """For each row, a negative 32-bit number that stands for everything on which the row's inputs depend.

        The numbers are hashes of all embeddings, because the rows of an image may see each other. They are computed
        once for all turns of a conversation.
        """
        whole = sha256(repr((tuple(self.embeddings.shape), str(self.embeddings.dtype), self.grid)).encode())
        for part in (self.embeddings, *self.deep):
            whole.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
        numbers = np.frombuffer(shake_256(whole.digest()).digest(4 * len(self.embeddings)), "<i4")
        return [int(number) for number in numbers | np.int32(-(2**31))]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image in a prompt. `rows` are the positions of its rows in the prompt, in ascending order, [n]."""

    image: EncodedImage
    rows: Sequence[int]


class ImagePrompt(list[int]):
    """The token ids of a prompt. The rows of images have the id of the model's placeholder token.

    It can be used wherever a list of token ids is expected. Copies of the list are prompts without images.
    """

    def __init__(self, tokens: Sequence[int], images: Sequence[PlacedImage]) -> None:
        """`images`: The images, in the order of their rows."""
        super().__init__(tokens)
        self.images = images

    @cached_property
    def cache_ids(self) -> list[int]:
        """The ids, with negative numbers in place of the ids of image rows. Two prompts share a prefix if these ids are
        equal."""
        ids = list(self)
        for placed in self.images:
            for row, number in zip(placed.rows, placed.image.row_ids, strict=True):
                ids[row] = number
        return ids

    @cached_property
    def _axes(self) -> Tensor | None:
        """For M-RoPE, the rotary positions [3, n] of the prompt up to the last image."""
        if not any(placed.image.grid for placed in self.images):
            return None
        parts, done, position = list[Tensor](), 0, 0
        for placed in self.images:
            assert placed.image.grid
            text = placed.rows[0] - done
            parts.append(position + torch.arange(text).expand(3, -1))
            position += text
            parts.append(position + torch.cartesian_prod(*map(torch.arange, placed.image.grid)).T)
            position, done = position + max(placed.image.grid), placed.rows[-1] + 1
        return torch.cat(parts, 1)

    @property
    def lag(self) -> int:
        """See `protocols.KVCache.lags`."""
        return 0 if self._axes is None else self._axes.shape[1] - 1 - int(self._axes.max())

    def given(self, start: int, end: int) -> Given | None:
        """Return the inputs of rows `start` to `end` - 1 that do not come from token ids, or None if there are none."""
        parts, rows = list[tuple[Tensor, ...]](), list[int]()
        mutual: Mutual = "none"
        for placed in self.images:
            inside = [i for i, row in enumerate(placed.rows) if start <= row < end]
            if inside:
                own = slice(inside[0], inside[-1] + 1)
                rows += [row - start for row in placed.rows[own]]
                mutual = placed.image.mutual
                parts.append(tuple(x[own] for x in (placed.image.embeddings, *placed.image.deep)))
        positions = self._positions(start, end)
        if not rows and positions is None:
            return None
        if not rows:
            return Given(torch.tensor([], dtype=torch.int64), self.images[0].image.embeddings[:0], (), positions)
        embeddings, *deep = [torch.cat(x) for x in zip(*parts, strict=True)]
        return Given(torch.tensor(rows), embeddings, tuple(deep), positions, mutual)

    def _positions(self, start: int, end: int) -> Tensor | None:
        """Return the rotary positions [3, end - start], or None if all rows come after the last image."""
        if self._axes is None or start >= self._axes.shape[1]:
            return None
        later = torch.arange(self._axes.shape[1], max(end, self._axes.shape[1])) - self.lag
        return torch.cat([self._axes, later.expand(3, -1)], 1)[:, start:end]

    def chunk_end(self, start: int, end: int) -> int:
        """Return the end of a chunk, moved if necessary so that the chunk does not cut an image whose rows see each
        other."""
        for placed in self.images:
            first, last = placed.rows[0], placed.rows[-1] + 1
            if placed.image.mutual != "none" and first <= start < last:
                return last
            if placed.image.mutual != "none" and start < first < end:
                return first
        return end

    def without_partial_image(self, length: int) -> int:
        """Return the length of the longest prefix of at most `length` tokens that does not end inside such an image."""
        cut = (placed.rows[0] for placed in self.images if placed.image.mutual != "none" and length in placed.rows[1:])
        return next(cut, length)


def cache_ids(prompt: Sequence[int]) -> Sequence[int]:
    """Return the ids that prefix caches compare for a prompt."""
    return prompt.cache_ids if isinstance(prompt, ImagePrompt) else prompt
