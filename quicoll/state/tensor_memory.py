"""The memory of one tensor, read and written in pieces, so that no copy of the whole is ever made.

A piece is a run of elements in C order, as bytes. How it is reached depends on where the elements lie:

    flat        host memory in C order: a piece is the tensor's own memory, nothing is copied
    strided     a numpy array that lies otherwise: the piece alone is copied
    torch       a tensor on a CUDA device, or one that lies otherwise or is conjugated lazily: likewise, and to the host

So the bytes, and their digest, are those of `quicoll.numerics.buffers.source`, which copies such a tensor as a whole.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quicoll.errors import LocalError
from quicoll.numerics.buffers import source
from quicoll.numerics.dtypes import Array, DType

__all__ = ["TensorMemory", "readable", "writable"]

_INDEXED = 1 << 16  # elements that are gathered at a time: each takes eight bytes of index for every dimension


class _Access(Protocol):
    def read(self, start: int, stop: int) -> Array:
        """Return elements [start, stop) as bytes: memory of the tensor's own, or a copy."""
        ...

    def write(self, start: int, stop: int, data: Array) -> None:
        """Put bytes in the place of elements [start, stop)."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TensorMemory:
    """One tensor of a state; `readable` and `writable` make it.

    Attributes:
        name: In the state.
        dtype: The element type.
        shape: The tensor's.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    _access: _Access

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def read(self, start: int, stop: int) -> Array:
        """Return elements [start, stop), in C order, as bytes (1-D uint8): the tensor's own memory, or a copy of it."""
        return self._access.read(start, stop)

    def write(self, start: int, stop: int, data: Array) -> None:
        """Put bytes (1-D uint8) in the place of elements [start, stop), in C order."""
        self._access.write(start, stop, data)


def readable(name: str, value: Any, *, dtype: str, shape: Sequence[int]) -> TensorMemory:
    """Open a tensor for reading.

    Args:
        name: In the state, for errors.
        value: The tensor, of any kind that `source` takes.
        dtype: The element type that it is said to have.
        shape: The shape that it is said to have.
    Raises:
        LocalError: It has another one, or is no tensor that can be read.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        access, found = _of_torch(torch, name, value)
    elif isinstance(value, np.ndarray) and not value.flags.c_contiguous:
        access, found = _Strided(np.asarray(value)), value.dtype.name
    else:
        read = source(value)
        access, found = _Flat(read.flat.view(np.uint8), read.dtype.itemsize), read.dtype.name
        return _checked(name, access, found, read.shape, dtype, shape)
    return _checked(name, access, found, tuple(value.shape), dtype, shape)


def writable(name: str, value: Any, *, dtype: str, shape: Sequence[int]) -> TensorMemory:
    """Open a numpy array or a torch tensor for writing.

    Args:
        name: In the state, for errors.
        value: The array or tensor. It is written outside of autograd.
        dtype: The element type that it has to have.
        shape: The shape that it has to have.
    Raises:
        LocalError: It has another one, cannot be written, or is neither array nor tensor.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        access, found = _of_torch(torch, name, value)
    elif not isinstance(value, np.ndarray):
        raise LocalError(f"{name!r} of a state is received into an array or a tensor, not a {type(value).__name__}")
    elif not value.flags.writeable:
        raise LocalError(f"{name!r} of a state cannot be received into an array that is read-only")
    elif value.flags.c_contiguous:
        flat = np.asarray(value).reshape(-1)
        access, found = _Flat(flat.view(np.uint8), value.dtype.itemsize), value.dtype.name
    else:
        access, found = _Strided(np.asarray(value)), value.dtype.name
    return _checked(name, access, found, tuple(value.shape), dtype, shape)


def _checked(
    name: str, access: _Access, found: str, has: tuple[int, ...], dtype: str, shape: Sequence[int]
) -> TensorMemory:
    if (found, has) != (dtype, tuple(shape)):
        raise LocalError(f"{name!r} of a state is {has} of {found} here, {tuple(shape)} of {dtype} in its manifest")
    return TensorMemory(name, DType.parse(found), has, access)


def _of_torch(torch: Any, name: str, value: Any) -> tuple[_Access, str]:
    if value.layout is not torch.strided or value.is_quantized or value.device.type not in ("cpu", "cuda"):
        raise LocalError(
            f"{name!r} of a state is a tensor whose memory cannot be reached: {value.layout}, {value.device}"
        )
    plain = value.detach()
    found = str(value.dtype).removeprefix("torch.")
    if not plain.is_contiguous():
        return _TorchStrided(torch, plain), found
    flat = plain.reshape(-1)
    if plain.device.type != "cpu" or plain.is_conj() or plain.is_neg():
        return _TorchFlat(torch, flat), found
    return _Flat(flat.view(torch.uint8).numpy(), value.element_size()), found


class _Flat:
    def __init__(self, flat: Array, itemsize: int) -> None:
        self._flat, self._itemsize = flat, itemsize

    def read(self, start: int, stop: int) -> Array:
        return self._flat[start * self._itemsize : stop * self._itemsize]

    def write(self, start: int, stop: int, data: Array) -> None:
        self._flat[start * self._itemsize : stop * self._itemsize] = data


class _Strided:
    def __init__(self, array: Array) -> None:
        self._array = array

    def read(self, start: int, stop: int) -> Array:
        return self._array.flat[start:stop].view(np.uint8)

    def write(self, start: int, stop: int, data: Array) -> None:
        self._array.flat[start:stop] = data.view(self._array.dtype)


class _TorchFlat:
    """flat: 1-D."""

    def __init__(self, torch: Any, flat: Any) -> None:
        self._torch, self._flat = torch, flat

    def read(self, start: int, stop: int) -> Array:
        return _bytes_of(self._torch, self._flat[start:stop])

    def write(self, start: int, stop: int, data: Array) -> None:
        with _outside_of_autograd(self._torch, self._flat):
            self._flat[start:stop].copy_(_tensor_of(self._torch, data, self._flat.dtype))


class _TorchStrided:
    def __init__(self, torch: Any, tensor: Any) -> None:
        # Not every type can be indexed; the bytes of those of one byte can.
        one = tensor.element_size() == 1 and not tensor.is_neg()
        self._torch, self._tensor = torch, tensor.view(torch.uint8) if one else tensor

    def read(self, start: int, stop: int) -> Array:
        cuts = range(start, stop, _INDEXED)
        return np.concatenate(
            [_bytes_of(self._torch, self._tensor[self._index(cut, min(cut + _INDEXED, stop))]) for cut in cuts]
        )

    def write(self, start: int, stop: int, data: Array) -> None:
        itemsize = self._tensor.element_size()
        with _outside_of_autograd(self._torch, self._tensor):
            for cut in range(start, stop, _INDEXED):
                end = min(cut + _INDEXED, stop)
                part = data[(cut - start) * itemsize : (end - start) * itemsize]
                values = _tensor_of(self._torch, part, self._tensor.dtype).to(self._tensor.device)
                self._tensor[self._index(cut, end)] = values

    def _index(self, start: int, stop: int) -> tuple[Any, ...]:
        """Where elements [start, stop) in C order are, one index for each dimension."""
        rest = self._torch.arange(start, stop, device=self._tensor.device)
        found = []
        for size in reversed(self._tensor.shape):
            found.append(rest % size)
            rest = rest // size
        return tuple(reversed(found))


def _bytes_of(torch: Any, part: Any) -> Array:
    # torch is handed in and not imported, so its types are not known here.
    plain = part.resolve_conj().resolve_neg().cpu().contiguous()
    array: Array = plain.view(torch.uint8).numpy()
    return array


def _tensor_of(torch: Any, data: Array, dtype: Any) -> Any:
    """A tensor of bytes; of its own memory where these are not aligned, which torch takes for granted."""
    return torch.from_numpy(data if data.ctypes.data % 16 == 0 else data.copy()).view(dtype)


def _outside_of_autograd(torch: Any, tensor: Any) -> Any:
    """A tensor that was made under inference mode may be written only there."""
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()
