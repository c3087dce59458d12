"""Gradients in flat buffers, so that one collective carries many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.errors import LocalError
from quicoll.numerics.buffers import argument

if TYPE_CHECKING:
    from quicoll.checkpoint.parts import Array

__all__ = ["Bucket", "cut"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """The layout of gradients in one flat float32 buffer, so that one collective carries all of them.

    It changes no bits: an element never meets another one.

    Attributes:
        shapes: Of the gradients, in order.
    """

    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, gradients: Sequence[Array]) -> Bucket:
        """Make the layout for gradients of these shapes, in this order, without gaps.

        Args:
            gradients: Only their shapes count.
        Returns:
            The layout.
        """
        return cls(tuple(tuple(gradient.shape) for gradient in gradients))

    @property
    def size(self) -> int:
        """Number of float32 elements."""
        return sum(_count(shape) for shape in self.shapes)

    def pack(self, gradients: Sequence[Array]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Copy gradients into a new buffer.

        Args:
            gradients: float32, of the layout's shapes.
        Returns:
            An array of shape (size,).
        Raises:
            LocalError: Other shapes or dtypes; or a gradient that requires grad itself, where autograd records.
        """
        flat = np.empty(self.size, np.float32)
        found = tuple(tuple(gradient.shape) for gradient in gradients)
        if found != self.shapes:
            raise LocalError(f"gradients have shapes {found}, the bucket was made for {self.shapes}")
        start = 0
        for gradient, shape in zip(gradients, self.shapes, strict=True):
            if str(gradient.dtype).removeprefix("torch.") != "float32":
                raise LocalError(f"a bucket holds float32, this gradient is {gradient.dtype}")
            flat[start : start + _count(shape)] = argument(gradient).flat
            start += _count(shape)
        return flat

    def unpack(self, flat: Array, like: Sequence[Array]) -> list[Array]:
        """Return views into a buffer, one for each gradient.

        Args:
            flat: A buffer of `size` elements.
            like: One tensor for each view; where it is torch's, the view is a torch tensor, otherwise a numpy array.
        Returns:
            The views, with the layout's shapes.
        """
        buffer = np.asarray(flat).reshape(-1)
        out: list[Array] = []
        start = 0
        for shape, model in zip(self.shapes, like, strict=True):
            view = buffer[start : start + _count(shape)].reshape(shape)
            out.append(view if isinstance(model, np.ndarray) else _torch_view(view))
            start += _count(shape)
        return out


def cut(gradients: Sequence[Array], most: int) -> list[slice]:
    """Return gradients, in order, in runs of at most so many bytes, or of one that is larger.

    Args:
        gradients: Only their shapes count; they are float32.
        most: Bytes of a run; 0: all in one.
    """
    cuts, filled = [0], 0
    for index, gradient in enumerate(gradients):
        nbytes = 4 * _count(tuple(gradient.shape))
        if most and filled and filled + nbytes > most:
            cuts.append(index)
            filled = 0
        filled += nbytes
    return [slice(start, stop) for start, stop in pairwise([*cuts, len(gradients)])]


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _torch_view(array: np.ndarray[Any, Any]) -> Array:
    import torch

    return torch.from_numpy(array)
