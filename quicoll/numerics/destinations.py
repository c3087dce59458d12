"""Memory for results, and the way from there to what the caller gets: a new array or tensor, or the caller's `out`.

- `allocate` copies nothing: the collective writes into the memory that the caller gets (for a CUDA device into a buffer
  on the host). An array or a tensor is made in it when it is taken (`Fresh`). Large memory is used again
  (quicoll.numerics.recycled);
- `destination` costs one copy, in `Destination.commit`. A collective works in a buffer of its own, so that one that is
  aborted leaves the caller's `out` as it was. None where it may be written meanwhile (`apart_from` says what may not),
  and is large, contiguous and shares no memory with what may not: then results come straight into it.

What is neither tensor nor array gets its results as numpy arrays, unless it is the `out`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.errors import LocalError
from quicoll.numerics.buffers import reach, room, uninitialised
from quicoll.numerics.natives import (
    READ_NUMPY,
    READ_TORCH,
    as_array,
    flat_tensor,
    numpy_dtype,
    torch_dtype,
    torch_module,
    without_numpy,
)
from quicoll.numerics.overlap import first_shared, meet, overlaps_itself, reach_of

if TYPE_CHECKING:
    from quicoll.numerics.buffers import ArrayKind, Source
    from quicoll.numerics.dtypes import Array, DType
    from quicoll.numerics.recycled import Recycler

__all__ = ["IN_PLACE_BYTES", "Destination", "Fresh", "allocate", "destination", "require_apart"]

# Below this a copy of the result costs nothing beside the operation, and an operation that fails leaves `out` alone.
IN_PLACE_BYTES = 1 << 20
# Up to this a buffer is made when the result comes, which the call does not wait for.
_LATE_BYTES = 4096


class Fresh:
    """Memory for one result that the caller gets: an array or a tensor in it, made when it is taken.

    Attributes:
        flat: 1-D, writable, of dtype.storage.
        dtype: The element type.
        shape: Of the value.
        kind: "numpy" or "torch".
    """

    __slots__ = ("_made", "_native", "dtype", "flat", "kind", "shape")

    in_place = False  # as of a Destination

    def __init__(self, flat: Array, like: Source, shape: tuple[int, ...]) -> None:
        self.flat = flat
        self.dtype = like.dtype
        self.shape = shape
        self.kind = like.kind
        self._native = like.native
        self._made: Any = None

    @property
    def value(self) -> Any:
        """What the caller gets; the same each time."""
        if self._made is None:
            self._made = _shaped(self.flat, self._native, self.shape, self.kind)
        return self._made

    @property
    def place(self) -> Any:
        """As of a Destination."""
        return self.value

    @property
    def size(self) -> int:
        """Of elements."""
        return self.flat.size

    def aside(self, recycler: Recycler | None = None) -> Fresh:
        """Return itself: there is no `out` to leave alone."""
        return self

    def commit(self, flat: Array | None = None) -> Any:
        """Give the finished result; see `Destination.commit`."""
        if flat is not None and flat is not self.flat:
            _demand_fit(flat, self.size, self.dtype)
            np.copyto(self.flat, flat)
        return self.value


class Destination:
    """Memory for one result that goes to a place which is there already.

    Attributes:
        value: What the caller gets: the `out` that was passed, or a new tensor on a CUDA device.
        place: An array or a tensor in the value's memory; mostly the value itself.
        dtype: The element type.
        shape: Of the value.
        kind: "numpy" or "torch".
        in_place: Whether `flat` is the memory of an `out` that was passed.
        name: What the caller calls it, for errors.
    """

    __slots__ = ("_flat", "dtype", "in_place", "kind", "name", "place", "shape", "value")

    def __init__(
        self,
        value: Any,
        place: Any,
        flat: Array | None,
        dtype: DType,
        shape: tuple[int, ...],
        kind: ArrayKind,
        in_place: bool = False,
        name: str = "out",
    ) -> None:
        """flat: as below; None: it is made when it is asked for."""
        self.value = value
        self.place = place
        self._flat = flat
        self.dtype = dtype
        self.shape = shape
        self.kind = kind
        self.in_place = in_place
        self.name = name

    @property
    def size(self) -> int:
        """Of elements."""
        return math.prod(self.shape)

    @property
    def flat(self) -> Array:
        """1-D, writable, of dtype.storage: a buffer beside the value, unless `in_place`."""
        if self._flat is None:
            self._flat = uninitialised(self.size, self.dtype)
        return self._flat

    def aside(self, recycler: Recycler | None = None) -> Destination:
        """Return one with a buffer beside the value. Raises LocalError where there is no memory for it."""
        if not self.in_place:
            return self
        flat = uninitialised(self.flat.size, self.dtype, recycler)
        return Destination(self.value, self.place, flat, self.dtype, self.shape, self.kind, name=self.name)

    def commit(self, flat: Array | None = None) -> Any:
        """Write the finished result into `value`.

        Nothing is copied if the result is in place. Autograd sees the write as any other in-place change.

        Args:
            flat: The result where it is not in `self.flat`: 1-D, of dtype.storage.
        Returns:
            `value`.
        Raises:
            LocalError: `value` cannot be written any more: its owner has resized it or made it read-only.
        """
        result = self.flat if flat is None else flat
        if result is not self._flat:
            _demand_fit(result, self.size, self.dtype)
            if self.in_place:
                np.copyto(self.flat, result)
        try:
            if self.in_place:
                _demand_place(self.place, self.flat)
            elif self.kind == "numpy":
                np.copyto(self.place, result.view(self.place.dtype).reshape(self.shape))
            else:
                _write_tensor(self.place, result.reshape(self.shape))
        except (ValueError, TypeError, RuntimeError) as error:
            raise LocalError(f"{self.name} was changed while the operation was under way: {error}") from error
        return self.value


def _demand_fit(result: Array, size: int, dtype: DType) -> None:
    if result.shape != (size,) or result.dtype != dtype.storage:
        raise LocalError(f"a result of {result.size} {result.dtype} does not fit {size} {dtype.storage}")


def allocate(
    like: Source, shape: tuple[int, ...] | None = None, recycler: Recycler | None = None
) -> Fresh | Destination:
    """Take memory for a new array or tensor, uninitialised.

    Args:
        like: Its kind and dtype count.
        shape: None: that of `like`.
        recycler: Gives memory that has been used before, for large results; None: it is new.
    Returns:
        The memory, and with it the array or tensor to be.
    Raises:
        LocalError: There is no memory for it.
    """
    if shape is None:
        shape, size = like.shape, like.flat.size
    else:
        size = math.prod(shape)
    try:
        flat = room(size, like.dtype, recycler)
        if like.device is None:
            fresh = Fresh(flat, like, shape)
            if not size:
                _ = fresh.value  # now: it may be of no bytes, and of more rows than an array can have
            return fresh
        value = torch_module().empty(shape, dtype=like.native, device=like.device)
        return Destination(value, value, flat, like.dtype, shape, like.kind)
    except (MemoryError, ValueError, RuntimeError) as error:  # the last is torch's
        raise LocalError(f"there is no memory for a result {shape} of {like.dtype}: {error}") from error


def destination(
    out: Any,
    like: Source,
    shape: tuple[int, ...] | None = None,
    *,
    apart_from: Sequence[Any] | None = None,
    recycler: Recycler | None = None,
    name: str = "out",
    buffered: bool = True,
) -> Destination:
    """Check a caller's `out` and put a buffer beside it; `commit` writes it.

    While the Destination lives, a bytearray or array.array that is `out` cannot change its length.

    Args:
        out: An array or tensor of either kind, or any object with DLPack or the buffer protocol; may be strided, and be
            or overlap the input.
        like: The dtype that it must have.
        shape: The shape that it must have; None: that of `like`.
        apart_from: Arrays and tensors that must stay as they are. If given, an `out` of IN_PLACE_BYTES or more that
            shares no memory with them needs no buffer, where it is contiguous and on the host.
        recycler: As for `allocate`.
        name: What the caller calls it, for errors.
        buffered: Whether it gets a buffer now, so that a lack of memory is told by the call; one of a few bytes comes
            when it is asked for.
    Returns:
        The destination.
    Raises:
        LocalError: Another shape or dtype; or it is read-only, requires grad where autograd records what is done, or
            has several elements in one place.
    """
    shape = like.shape if shape is None else shape
    kind: ArrayKind = "numpy"
    place: Any
    torch = sys.modules.get("torch")
    if type(out) is np.ndarray:
        place, dtype = out, READ_NUMPY.get(out.dtype) or numpy_dtype(out)
        flags = out.flags
        writable, contiguous = flags.writeable, flags.c_contiguous
    elif torch is not None and isinstance(out, torch.Tensor):
        kind = "torch"
        known = READ_TORCH.get(out.dtype) if type(out) is torch.Tensor and out.is_cpu else None
        dtype = torch_dtype(out) if known is None or out.layout is not torch.strided else known[0]
        if out.requires_grad and torch.is_grad_enabled():
            raise LocalError(f"{name} requires grad; pass {name}.detach(), or make the call under torch.no_grad()")
        place, writable, contiguous = out, True, out.is_contiguous()
    else:
        place = as_array(out)
        if place is None:
            raise LocalError(f"{name} is a {type(out).__name__}; pass a numpy array or a torch tensor")
        dtype = numpy_dtype(place)
        flags = place.flags
        writable, contiguous = flags.writeable, flags.c_contiguous
    if place.shape != shape or dtype is not like.dtype:
        raise LocalError(f"{name} is {tuple(place.shape)} of {dtype}, the result {shape} of {like.dtype}")
    if not writable:
        raise LocalError(f"{name} is read-only")
    if not contiguous:
        strides = place.strides if kind == "numpy" else tuple(step * out.element_size() for step in out.stride())
        if overlaps_itself(shape, strides, dtype.itemsize):
            raise LocalError(
                f"{name} has several elements in one place (strides {strides} bytes); pass a contiguous copy"
            )
    size = like.flat.size if shape is like.shape else math.prod(shape)
    nbytes = size * dtype.itemsize
    if nbytes <= _LATE_BYTES or not buffered:
        return Destination(out, place, None, dtype, shape, kind, False, name)
    if apart_from is not None and nbytes >= IN_PLACE_BYTES:
        flat = _own_memory(place, kind, dtype)
        if flat is not None and not meet([reach_of(place)], [reach(value) for value in apart_from]):
            return Destination(out, place, flat, dtype, shape, kind, True, name)
    return Destination(out, place, uninitialised(size, dtype, recycler), dtype, shape, kind, False, name)


def require_apart(places: Sequence[Destination | Fresh]) -> None:
    """Raise LocalError where two of the destinations of one operation share memory: the later would win."""
    indices = [index for index, place in enumerate(places) if place.size]
    pair = first_shared([places[index].place for index in indices])
    if pair is not None:
        first, second = sorted(indices[each] for each in pair)
        raise LocalError(f"out has items {first} and {second} in one place; pass tensors that share no memory")


def _own_memory(place: Any, kind: ArrayKind, dtype: DType) -> Array | None:
    """The memory of an `out` as a flat array that can be written; None where it cannot be had without a copy."""
    if kind == "numpy":
        if not (place.flags.c_contiguous and place.flags.aligned):
            return None
        return np.asarray(place).reshape(-1).view(dtype.storage)
    if place.device.type != "cpu":
        return None
    if not place.is_contiguous() or place.is_neg() or place.is_conj():
        return None
    try:
        flat = flat_tensor(place.detach())
    except (RuntimeError, TypeError, NotImplementedError):  # subclasses that only stand for data elsewhere
        return None
    return flat if flat.flags.writeable else None


def _demand_place(place: Any, flat: Array) -> None:
    """Raise ValueError unless `flat` is still the memory of `place`, and tell autograd that it was written."""
    if reach_of(place)[0] != flat.__array_interface__["data"][0]:
        raise ValueError("its memory is another one")
    if isinstance(place, np.ndarray):
        if not place.flags.writeable:
            raise ValueError("it is read-only")
        return
    with torch_module().inference_mode() if place.is_inference() else torch_module().no_grad():
        place.reshape(-1)[:0].zero_()  # writes nothing, and counts as a change of the whole


def _shaped(flat: Array, native: Any, shape: tuple[int, ...], kind: ArrayKind) -> Any:
    """An array or tensor in flat memory. As a view it would be of no use for some of what its owner may do with it:
    torch detaches none in place."""
    if kind == "numpy":
        array = flat if flat.dtype is native else flat.view(native)
        return array if array.shape == shape else array.reshape(shape)
    torch = torch_module()
    if native not in without_numpy(torch):
        return torch.from_numpy(flat.reshape(shape))
    return torch.empty(0, dtype=native, device="cpu").set_(torch.from_numpy(flat).untyped_storage(), 0, shape)


def _write_tensor(out: Any, result: Array) -> None:
    torch = torch_module()
    if not result.flags.writeable:  # torch has no read-only tensors, and warns
        result = result.copy()
    tensor = torch.from_numpy(result)
    if out.dtype in without_numpy(torch):
        tensor = tensor.view(out.dtype)
    # A tensor made under inference mode may be written only there.
    if out.is_inference():
        with torch.inference_mode():
            out.copy_(tensor)
    elif out.requires_grad:
        with torch.no_grad():
            out.copy_(tensor)
    else:  # nothing that autograd could record: entering a mode costs as much as a short copy
        out.copy_(tensor)
