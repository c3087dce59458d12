"""Tensors of torch, numpy and other owners of memory as flat memory, and back.

Everything past this module sees one thing: a 1-D, C-contiguous numpy array of an element type's storage dtype. What is
neither tensor nor array is read through DLPack (jax, cupy on the host, ...) or the buffer protocol (array.array,
bytearray, memoryview, ctypes, ...); results for it are numpy arrays, unless it is the `out`. Copies, all of them:

- `source`: none for contiguous memory in C order (transposed, sliced, conjugated or negated views are copied once;
  tensors on a CUDA device are copied once, to the host);
- `allocate`: none; the collective writes into the memory that the caller gets (for a CUDA device one, as below). An
  array or a tensor is made in it when it is taken (`Fresh`). Large memory is used again (quicoll.numerics.recycled);
- `destination`: one, in `Destination.commit`. A collective works in a buffer of its own, so that one that is
  aborted leaves the caller's `out` as it was. None where it may be written meanwhile (`apart_from` says what may not),
  and is large, contiguous and shares no memory with what may not: then results come straight into it.

Autograd. No gradient goes through an operation, so a tensor that requires grad would leave its graph without a word: an
`argument` or `destination` that autograd records at the time of the call is refused, and says what to write instead.
Where nothing is recorded (torch.no_grad, torch.inference_mode) such tensors are taken, also as `out`: that is how
parameters are broadcast. `source` reads any tensor outside of autograd, for what is no operation: states, digests.

torch is imported only when a torch tensor is asked for; a caller who passes one has imported it.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np
import xxhash

from quicoll.errors import LocalError
from quicoll.numerics.dtypes import Array, DType
from quicoll.numerics.overlap import Reach, first_shared, meet, overlaps_itself, reach_of
from quicoll.numerics.recycled import LEAST_RECYCLED, Recycler

__all__ = [
    "IN_PLACE_BYTES",
    "ArrayKind",
    "Destination",
    "Fresh",
    "Source",
    "allocate",
    "argument",
    "arguments",
    "begun_digest",
    "destination",
    "detached",
    "empty",
    "memory",
    "reach",
    "require_apart",
    "source",
    "tensor_digest",
    "wrap",
    "zeros",
]

ArrayKind: TypeAlias = Literal["numpy", "torch"]

# Below this a copy of the result costs nothing beside the operation, and an operation that fails leaves `out` alone.
IN_PLACE_BYTES = 1 << 20


@dataclass(slots=True, eq=False)  # not frozen: one is made in each call, and would take four times as long
class Source:
    """A tensor that a caller passed in, to be read. Nobody changes one.

    Attributes:
        flat: 1-D, C order, of dtype.storage, not writable; the caller's own memory unless `copied`.
        dtype: The element type.
        shape: The caller's.
        kind: "numpy" or "torch".
        native: The caller's dtype object (numpy.dtype or torch.dtype).
        copied: Whether `flat` is a copy.
        device: The torch.device; None for the host.
    """

    flat: Array
    dtype: DType
    shape: tuple[int, ...]
    kind: ArrayKind
    native: Any
    copied: bool
    device: Any = None

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes


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

    def aside(self, recycler: Recycler | None = None) -> Fresh:
        """Return itself: there is no `out` to leave alone."""
        return self

    def commit(self, flat: Array | None = None) -> Any:
        """Give the finished result; see `Destination.commit`."""
        if flat is not None and flat is not self.flat:
            _demand_fit(flat, self.flat, self.dtype)
            np.copyto(self.flat, flat)
        return self.value


@dataclass(slots=True, eq=False)  # as a Source
class Destination:
    """Memory for one result that goes to a place which is there already.

    Attributes:
        value: What the caller gets: the `out` that was passed, or a new tensor on a CUDA device.
        place: An array or a tensor in the value's memory; mostly the value itself.
        flat: 1-D, writable, of dtype.storage: a buffer beside the value, unless `in_place`.
        dtype: The element type.
        shape: Of the value.
        kind: "numpy" or "torch".
        in_place: Whether `flat` is the memory of an `out` that was passed.
        name: What the caller calls it, for errors.
    """

    value: Any
    place: Any
    flat: Array
    dtype: DType
    shape: tuple[int, ...]
    kind: ArrayKind
    in_place: bool = False
    name: str = "out"

    def aside(self, recycler: Recycler | None = None) -> Destination:
        """Return one with a buffer beside the value. Raises LocalError where there is no memory for it."""
        if not self.in_place:
            return self
        return replace(self, flat=empty(self.flat.size, self.dtype, recycler), in_place=False)

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
        if result is not self.flat:
            _demand_fit(result, self.flat, self.dtype)
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


def _demand_fit(result: Array, flat: Array, dtype: DType) -> None:
    if result.shape != flat.shape or result.dtype != dtype.storage:
        raise LocalError(f"a result of {result.size} {result.dtype} does not fit {flat.size} {dtype.storage}")


def source(value: Any) -> Source:
    """View an array, a tensor, a numpy scalar, or an object with DLPack or the buffer protocol as flat memory.

    A numpy scalar counts as a 0-dimensional array. A tensor that requires grad is read outside of autograd. A tensor on
    a CUDA device is copied to the host, after what is queued for it there.

    Args:
        value: Of any shape, 0-dimensional and empty included; may be read-only. It must not change until the collective
            has ended.
    Returns:
        The view.
    Raises:
        LocalError: It has no memory of numbers, or another device, layout, byte order or dtype. Says what to pass
            instead.
    """
    if type(value) is np.ndarray:  # mostly, and faster asked than the rest
        return _from_numpy(value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_torch(value)
    array = _as_array(value)
    if array is not None:
        return _from_numpy(array)
    raise LocalError(
        f"a {type(value).__name__} is neither array nor tensor; pass numpy.asarray(x, dtype) or torch.as_tensor(x)"
    )


def argument(value: Any) -> Source:
    """As `source`, for what an operation is given.

    Args:
        value: As for `source`.
    Returns:
        The view.
    Raises:
        LocalError: As for `source`; or it requires grad and autograd records what is done.
    """
    if type(value) is not np.ndarray and _recorded(value):
        raise LocalError(
            "the tensor requires grad, and no gradient goes through an operation; pass x.detach(), or make the call "
            "under torch.no_grad()"
        )
    return source(value)


def arguments(values: Sequence[Any]) -> tuple[Source, list[Array], list[tuple[int, ...]]] | None:
    """View the tensors of a list at once, where all of them are as most are: plain, of one type, in one piece each.

    Args:
        values: One at least.
    Returns:
        The first as `argument` gives it, and the flat memory and the shape of each; None where there is one of another
        kind or type, or that `argument` would copy or refuse: then that has to look at each.
    Raises:
        LocalError: As `argument`, for the first.
    """
    first = argument(values[0])
    if first.copied:
        return None
    flats: list[Array] = []
    shapes: list[tuple[int, ...]] = []
    native = first.native
    if first.kind == "numpy":
        storage = None if native is first.dtype.storage else first.dtype.storage
        for value in values:
            if type(value) is not np.ndarray or value.dtype is not native or not value.flags.c_contiguous:
                return None
            flat = value.reshape(-1)
            if storage is not None:
                flat = flat.view(storage)
            flat.setflags(write=False)
            flats.append(flat)
            shapes.append(value.shape)
        return first, flats, shapes
    plain, unsigned = _torch().Tensor, _TORCH[native][2]
    for value in values:
        if type(value) is not plain or value.dtype is not native or value.requires_grad:
            return None
        try:  # numpy takes what is plain memory on the host, and nothing else; see `_from_torch`
            array = (value if unsigned is None else value.view(unsigned)).numpy()
        except (RuntimeError, TypeError):
            return None
        shapes.append(array.shape)
        if not array.flags.c_contiguous:
            return None
        if array.ndim != 1:
            array = array.reshape(-1)
        array.setflags(write=False)
        flats.append(array)
    return first, flats, shapes


def detached(value: Any) -> Any:
    """Return a tensor outside of autograd, in the same memory; anything else as it is."""
    torch = _torch()
    return value.detach() if torch is not None and isinstance(value, torch.Tensor) else value


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
        flat = _room(size, like.dtype, recycler)
        if like.device is None:
            fresh = Fresh(flat, like, shape)
            if not size:
                _ = fresh.value  # now: it may be of no bytes, and of more rows than an array can have
            return fresh
        value = _torch().empty(shape, dtype=like.native, device=like.device)
        return Destination(value, value, flat, like.dtype, shape, like.kind)
    except (MemoryError, ValueError, RuntimeError) as error:  # the last is torch's
        raise LocalError(f"there is no memory for a result {shape} of {like.dtype}: {error}") from error


def empty(size: int, dtype: DType, recycler: Recycler | None = None) -> Array:
    """Return flat memory for `size` elements of `dtype`, uninitialised. Raises LocalError where there is none.

    Args:
        size: Of elements.
        dtype: The element type.
        recycler: As for `allocate`.
    """
    try:
        return _room(size, dtype, recycler)
    except (MemoryError, ValueError) as error:
        raise _no_memory(size, dtype, error) from error


def zeros(size: int, dtype: DType) -> Array:
    """Return flat memory for `size` elements of `dtype`. Raises LocalError where there is none.

    For what is looked at before it is filled: a state that is learned chunk by chunk tells a peer the digests of what
    is there. Of uninitialised memory they would differ from run to run. Zeros cost no more: fresh pages are zero.
    """
    try:
        return np.zeros(size, dtype.storage)
    except (MemoryError, ValueError) as error:
        raise _no_memory(size, dtype, error) from error


def _no_memory(size: int, dtype: DType, error: Exception) -> LocalError:
    return LocalError(f"there is no memory for {size} elements of {dtype}: {error}")


def _room(size: int, dtype: DType, recycler: Recycler | None) -> Array:
    if recycler is not None and size * dtype.itemsize >= LEAST_RECYCLED:
        return recycler.take(size * dtype.itemsize).view(dtype.storage)
    return np.empty(size, dtype.storage)


def destination(
    out: Any,
    like: Source,
    shape: tuple[int, ...] | None = None,
    *,
    apart_from: Sequence[Any] | None = None,
    recycler: Recycler | None = None,
    name: str = "out",
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
    Returns:
        The destination.
    Raises:
        LocalError: Another shape or dtype; or it is read-only, requires grad where autograd records what is done, or
            has several elements in one place.
    """
    shape = like.shape if shape is None else shape
    kind: ArrayKind = "numpy"
    place: Any
    if type(out) is not np.ndarray and _is_tensor(out):
        kind = "torch"
        known = _TORCH.get(out.dtype) if type(out) is _torch().Tensor and out.is_cpu else None
        dtype = _torch_dtype(out) if known is None or out.layout is not _torch().strided else known[0]
        if _recorded(out):
            raise LocalError(f"{name} requires grad; pass {name}.detach(), or make the call under torch.no_grad()")
        place, writable, contiguous = out, True, out.is_contiguous()
    else:
        place = _as_array(out)
        if place is None:
            raise LocalError(f"{name} is a {type(out).__name__}; pass a numpy array or a torch tensor")
        dtype = _numpy_dtype(place)
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
    if apart_from is not None and size * dtype.itemsize >= IN_PLACE_BYTES:
        flat = _own_memory(place, kind, dtype)
        if flat is not None and not meet([reach_of(place)], [reach(value) for value in apart_from]):
            return Destination(out, place, flat, dtype, shape, kind, in_place=True, name=name)
    return Destination(out, place, empty(size, dtype, recycler), dtype, shape, kind, name=name)


def reach(value: Any) -> Reach:
    """Return where the memory of an array or tensor begins and ends, as addresses; (0, 0) where it has no elements."""
    torch = _torch()
    place = value if torch is not None and isinstance(value, torch.Tensor) else _as_array(value)
    return (0, 0) if place is None else reach_of(place)


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
        flat = _flat_tensor(place.detach())
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
    with _torch().inference_mode() if place.is_inference() else _torch().no_grad():
        place.reshape(-1)[:0].zero_()  # writes nothing, and counts as a change of the whole


def require_apart(places: Sequence[Destination | Fresh]) -> None:
    """Raise LocalError where two of the destinations of one operation share memory: the later would win."""
    indices = [index for index, place in enumerate(places) if place.flat.size]
    pair = first_shared([places[index].place for index in indices])
    if pair is not None:
        first, second = sorted(indices[each] for each in pair)
        raise LocalError(f"out has items {first} and {second} in one place; pass tensors that share no memory")


def wrap(flat: Array, dtype: DType, shape: tuple[int, ...], kind: ArrayKind) -> Any:
    """Make an array or a tensor in the memory of a flat array.

    Args:
        flat: 1-D, of dtype.storage, writable.
        dtype: The element type.
        shape: Of the result.
        kind: "numpy" or "torch".
    Returns:
        The array or tensor.
    Raises:
        LocalError: torch, or ml_dtypes for types that numpy lacks, is not installed.
    """
    if kind == "torch":
        torch = _import("torch")
        tensor = torch.from_numpy(flat).reshape(shape)
        native = getattr(torch, dtype.name)
        return tensor.view(native) if native in _without_numpy(torch) else tensor
    own = dtype.storage if dtype.storage.name == dtype.name else np.dtype(getattr(_import("ml_dtypes"), dtype.name))
    return flat.view(own).reshape(shape)


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise LocalError(f"{module} is not installed, and what is asked for needs it") from error


def memory(flat: Array) -> memoryview:
    """Return the bytes of a flat array, without a copy; writable if the array is."""
    return flat.view(np.uint8).data


def tensor_digest(value: Source | Any) -> bytes:
    """Return a digest over dtype name, shape and elements in C order; the same for an array and an equal tensor.

    Equal bits give equal digests; -0.0 and +0.0, and NaN of other payloads, are different bits. No defence against
    an adversary.

    Args:
        value: A Source, an array or a tensor.
    Returns:
        16 bytes, xxh3-128.
    Raises:
        LocalError: As `source`.
    """
    read = value if isinstance(value, Source) else source(value)
    state = begun_digest(read.dtype, read.shape)
    state.update(memory(read.flat))
    return state.digest()


def begun_digest(dtype: DType, shape: tuple[int, ...]) -> xxhash.xxh3_128:
    """Return the state of `tensor_digest` before the elements, for a tensor that is read in pieces."""
    return xxhash.xxh3_128(f"{dtype}{list(shape)}".encode())


# ---------------------------------------------------------------------------------------------------------------------
# numpy


def _from_numpy(value: np.ndarray[Any, Any]) -> Source:
    native = value.dtype
    exact = type(value) is np.ndarray
    dtype = (_NATIVE.get(native) if exact else None) or _numpy_dtype(value)  # of other classes one is refused
    plain = value if exact else np.asarray(value)
    copied = not plain.flags.c_contiguous
    try:
        flat = (np.ascontiguousarray(plain) if copied else plain).reshape(-1)
    except MemoryError as error:
        raise LocalError(f"there is no memory for a contiguous copy of {value.shape} of {dtype}: {error}") from error
    if native is not dtype.storage:
        flat = flat.view(dtype.storage)
    flat.setflags(write=False)
    return Source(flat, dtype, value.shape, "numpy", native, copied)


def _as_array(value: Any) -> Array | None:
    """An array in the memory of `value`; None if it has none that could be looked at."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, np.generic):
        array = np.asarray(value)  # a copy, so nothing may be written to it
        array.flags.writeable = False
        return array
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        device = int(value.__dlpack_device__()[0])
        if device not in _DLPACK_HOST:
            raise LocalError(
                f"a {type(value).__name__} on DLPack device type {device} is not supported; pass a copy on the host"
            )
        return _looked_at(value, np.from_dlpack)
    try:
        view = memoryview(value)
    except TypeError:
        return None
    return _looked_at(view, np.asarray)


_DLPACK_HOST = (1, 3)  # kDLCPU and kDLCUDAHost of dlpack.h


def _looked_at(value: Any, look: Callable[[Any], Array]) -> Array:
    try:
        return look(value)
    except (BufferError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        # Each producer refuses in its own way: types that numpy has not, read-only memory, formats that are no numbers.
        raise LocalError(
            f"the memory of a {type(value).__name__} cannot be read as numbers; pass a numpy array: {error}"
        ) from error


def _numpy_dtype(value: np.ndarray[Any, Any]) -> DType:
    if isinstance(value, np.ma.MaskedArray):
        raise LocalError("a masked array would lose its mask; pass value.filled(...)")
    return _NATIVE.get(value.dtype) or _native_dtype(value.dtype)


# Those that have been looked at and are of this machine's order. numpy makes a name anew each time, of many parts.
_NATIVE: dict[np.dtype[Any], DType] = {}


def _native_dtype(dtype: np.dtype[Any]) -> DType:
    if not dtype.isnative:
        raise LocalError(f"dtype {dtype.str} is not in this machine's byte order; pass value.astype({dtype.name!r})")
    # ml_dtypes registers bfloat16 under this name; its module need not be known.
    known = _NATIVE[dtype] = DType.parse(dtype.name)
    return known


# ---------------------------------------------------------------------------------------------------------------------
# torch


def _torch() -> Any:
    return sys.modules.get("torch")


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _recorded(value: Any) -> bool:
    """Whether autograd would record what is done with this."""
    return bool(_is_tensor(value) and value.requires_grad and _torch().is_grad_enabled())


def _from_torch(value: Any) -> Source:
    # Mostly it is plain memory on the host. Then numpy takes it as it is, which it does with nothing else: no other
    # device or layout, nothing quantised, lazily conjugated or negated.
    known = _TORCH.get(value.dtype)
    if known is None:
        return _from_any_torch(value)
    read = value.detach() if value.requires_grad else value
    if type(read) is not _torch().Tensor:
        return _from_any_torch(value)
    dtype, native, unsigned = known
    try:
        array = (read if unsigned is None else read.view(unsigned)).numpy()
    except (RuntimeError, TypeError):
        return _from_any_torch(value)
    if not array.flags.c_contiguous:
        return _from_any_torch(value)
    flat = array.reshape(-1)
    flat.setflags(write=False)
    return Source(flat, dtype, array.shape, "torch", native, copied=False)


def _from_any_torch(value: Any) -> Source:
    dtype = _torch_dtype(value)
    shape = tuple(value.shape)
    plain, device = value.detach(), None
    if value.is_cuda:
        plain, device = plain.cpu(), value.device
    strange = plain.is_neg() or plain.is_conj() or not plain.is_contiguous()
    copied = strange or device is not None
    try:
        flat = _flat_tensor(plain.resolve_neg().resolve_conj().contiguous() if strange else plain)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        # Subclasses that only stand for data elsewhere (DTensor, FakeTensor, functorch's wrappers) fail here, each
        # its own way.
        raise LocalError(
            f"a {type(value).__name__} has no memory that can be read; pass the local tensor: {error}"
        ) from error
    flat.flags.writeable = False
    unsigned = _without_numpy(_torch()).get(value.dtype)
    _TORCH[value.dtype] = dtype, value.dtype, unsigned
    return Source(flat, dtype, shape, "torch", value.dtype, copied, device)


# By torch's types that have been read: ours, and by which type numpy passes over one that it has not.
_TORCH: dict[Any, tuple[DType, Any, Any]] = {}


def _torch_dtype(value: Any) -> DType:
    """The type of a tensor's elements. Raises LocalError where it has none that can be looked at."""
    if value.layout is not _torch().strided:
        raise LocalError(f"a tensor of layout {value.layout} is not supported; pass value.to_dense()")
    if value.is_quantized:
        raise LocalError(
            f"a quantised tensor ({value.dtype}) is not supported; pass value.int_repr() or value.dequantize()"
        )
    kind = value.device.type
    if kind == "meta":
        raise LocalError("a tensor on device meta has no elements; pass one that has been materialised")
    if kind not in ("cpu", "cuda"):
        raise LocalError(f"a tensor on device {value.device} is not supported; pass value.cpu()")
    return _named_dtype(value.dtype)


@lru_cache(maxsize=64)
def _named_dtype(dtype: Any) -> DType:
    """The type of a torch.dtype, which is none of its tensors' memory: those are not kept."""
    return DType.parse(str(dtype).removeprefix("torch."))


def _flat_tensor(value: Any) -> Array:
    """A contiguous tensor's memory as a flat array."""
    flat = value if value.dim() == 1 else value.reshape(-1)
    unsigned = _without_numpy(_torch()).get(value.dtype)
    array: Array = (flat if unsigned is None else flat.view(unsigned)).numpy()
    return array


def _shaped(flat: Array, native: Any, shape: tuple[int, ...], kind: ArrayKind) -> Any:
    """An array or tensor in flat memory. As a view it would be of no use for some of what its owner may do with it:
    torch detaches none in place."""
    if kind == "numpy":
        array = flat if flat.dtype is native else flat.view(native)
        return array if array.shape == shape else array.reshape(shape)
    torch = _torch()
    if native not in _without_numpy(torch):
        return torch.from_numpy(flat.reshape(shape))
    return torch.empty(0, dtype=native, device="cpu").set_(torch.from_numpy(flat).untyped_storage(), 0, shape)


@lru_cache(maxsize=1)
def _without_numpy(torch: Any) -> dict[Any, Any]:
    """torch's types that numpy has not, and the type of equal size by which their memory is passed over."""
    return {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


def _write_tensor(out: Any, result: Array) -> None:
    torch = _torch()
    if not result.flags.writeable:  # torch has no read-only tensors, and warns
        result = result.copy()
    tensor = torch.from_numpy(result)
    if out.dtype in _without_numpy(torch):
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
