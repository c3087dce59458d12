"""Tensors of torch, numpy and other owners of memory as flat memory.

Everything past this module sees one thing: a 1-D, C-contiguous numpy array of an element type's storage dtype. What is
neither tensor nor array is read through DLPack (jax, cupy on the host, ...) or the buffer protocol (array.array,
bytearray, memoryview, ctypes, ...). `source` copies nothing of contiguous memory in C order: transposed, sliced,
conjugated or negated views are copied once; tensors on a CUDA device are copied once, to the host. Where results go is
the affair of quicoll.numerics.destinations.

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
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import xxhash

from quicoll.errors import LocalError
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
from quicoll.numerics.overlap import Reach, reach_of
from quicoll.numerics.recycled import LEAST_RECYCLED, Recycler

if TYPE_CHECKING:
    from quicoll.numerics.dtypes import Array, DType

__all__ = [
    "GATHERED_BYTES",
    "ArrayKind",
    "Source",
    "argument",
    "arguments",
    "begun_digest",
    "detached",
    "memory",
    "reach",
    "room",
    "source",
    "tensor_digest",
    "uninitialised",
    "wrap",
    "zeros",
]

ArrayKind: TypeAlias = Literal["numpy", "torch"]

GATHERED_BYTES = 64 << 10
"""Bytes of a list of tensors, or of a reduction's leaves, that are copied when they are given."""

_new = tuple.__new__  # of what each call makes one: a Source in the tenth of a microsecond, where Source() takes a half


class Source(NamedTuple):
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
        return _from_torch(value, value.detach() if value.requires_grad else value, torch)
    array = as_array(value)
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
    if type(value) is np.ndarray:
        return _from_numpy(value)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return source(value)
    if not value.requires_grad:
        return _from_torch(value, value, torch)
    if torch.is_grad_enabled():
        raise LocalError(
            "the tensor requires grad, and no gradient goes through an operation; pass x.detach(), or make the call "
            "under torch.no_grad()"
        )
    return _from_torch(value, value.detach(), torch)


def arguments(values: Sequence[Any]) -> tuple[Source, Array | list[Array], tuple[tuple[int, ...], ...]] | None:
    """View the tensors of a list at once, where all of them are as most are: plain, of one type, on the host.

    A list of at most GATHERED_BYTES is copied: one array of all elements costs less to make than a view of each tensor.

    Args:
        values: One at least.
    Returns:
        The first as `argument` gives it; the elements of all of them, one after the other, or the flat memory of each
        where there are more; and the shape of each. None where there is one of another kind or type, or that `argument`
        would refuse, or have to copy where the list is not copied: then that has to look at each.
    Raises:
        LocalError: As `argument`, for the first.
    """
    one = values[0]
    kind: ArrayKind = "numpy" if type(one) is np.ndarray else "torch"
    known = _known(one, kind)
    if known is None:
        argument(one)  # says what is wrong with it, or else the type is known from here on
        known = _known(one, kind)
        if known is None:
            return None
    dtype, native, unsigned = known
    many = len(values)
    if list(map(type, values)).count(type(one)) != many or list(map(_DTYPE_OF, values)).count(native) != many:
        return None
    shapes = tuple(map(_SHAPE_OF, values))
    shape = shapes[0]
    equal = shapes.count(shape) == many
    try:
        if (one.nbytes * many if equal else sum(map(_NBYTES_OF, values))) > GATHERED_BYTES:
            flats = [_flat_memory(value, dtype, unsigned, kind) for value in values]
            return Source(flats[0], dtype, shape, kind, native, copied=False), flats, shapes
        if kind == "numpy":
            whole = np.concatenate(values, axis=None)
        else:
            # As they are where that is the same: along the first dimension, of tensors that differ in no other.
            whole = torch_module().cat(values if equal and shape else [value.reshape(-1) for value in values])
        memory = _flat_memory(whole, dtype, unsigned, kind)
    except (RuntimeError, TypeError, ValueError):  # of other layouts and devices, with gaps, or recorded by autograd
        return None
    return Source(memory[: math.prod(shape)], dtype, shape, kind, native, copied=True), memory, shapes


_DTYPE_OF, _SHAPE_OF, _NBYTES_OF = attrgetter("dtype"), attrgetter("shape"), attrgetter("nbytes")


def _known(value: Any, kind: ArrayKind) -> tuple[DType, Any, Any] | None:
    """What has been learned of a plain array's or tensor's type, as READ_TORCH has it."""
    if kind == "torch":
        torch = torch_module()
        return READ_TORCH.get(value.dtype) if torch is not None and type(value) is torch.Tensor else None
    native = value.dtype
    dtype = READ_NUMPY.get(native)
    return None if dtype is None else (dtype, native, None)


def _flat_memory(value: Any, dtype: DType, unsigned: Any, kind: ArrayKind) -> Array:
    """View a plain array or tensor of a known type. Raises RuntimeError, TypeError and ValueError."""
    if kind == "torch":
        # numpy takes what is plain memory on the host, and nothing else; see `_from_torch`
        value = (value if unsigned is None else value.view(unsigned)).numpy()
    if not value.flags.c_contiguous:
        raise ValueError("it has gaps")
    flat: Array = value if value.ndim == 1 and kind == "torch" else value.reshape(-1)  # another object than a caller's
    if flat.dtype is not dtype.storage:
        flat = flat.view(dtype.storage)
    flat.setflags(write=False)
    return flat


def detached(value: Any) -> Any:
    """Return a tensor outside of autograd, in the same memory; anything else as it is."""
    torch = torch_module()
    return value.detach() if torch is not None and isinstance(value, torch.Tensor) else value


def uninitialised(size: int, dtype: DType, recycler: Recycler | None = None) -> Array:
    """Return flat memory for `size` elements of `dtype`, uninitialised. Raises LocalError where there is none.

    Args:
        size: Of elements.
        dtype: The element type.
        recycler: As for `allocate`.
    """
    try:
        return room(size, dtype, recycler)
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


def room(size: int, dtype: DType, recycler: Recycler | None) -> Array:
    """As `uninitialised`, where the caller has words of his own for it. Raises MemoryError and ValueError."""
    if recycler is not None and size * dtype.itemsize >= LEAST_RECYCLED:
        return recycler.take(size * dtype.itemsize).view(dtype.storage)
    return np.empty(size, dtype.storage)


def _no_memory(size: int, dtype: DType, error: Exception) -> LocalError:
    return LocalError(f"there is no memory for {size} elements of {dtype}: {error}")


def reach(value: Any) -> Reach:
    """Return where the memory of an array or tensor begins and ends, as addresses; (0, 0) where it has no elements."""
    torch = torch_module()
    place = value if torch is not None and isinstance(value, torch.Tensor) else as_array(value)
    return (0, 0) if place is None else reach_of(place)


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
        return tensor.view(native) if native in without_numpy(torch) else tensor
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


def _from_numpy(value: np.ndarray[Any, Any]) -> Source:
    native = value.dtype
    exact = type(value) is np.ndarray
    dtype = (READ_NUMPY.get(native) if exact else None) or numpy_dtype(value)  # of other classes one is refused
    plain = value if exact else np.asarray(value)
    copied = not plain.flags.c_contiguous
    try:
        flat = (np.ascontiguousarray(plain) if copied else plain).reshape(-1)
    except MemoryError as error:
        raise LocalError(f"there is no memory for a contiguous copy of {value.shape} of {dtype}: {error}") from error
    if native is not dtype.storage:
        flat = flat.view(dtype.storage)
    flat.setflags(write=False)
    return _new(Source, (flat, dtype, value.shape, "numpy", native, copied, None))


def _from_torch(value: Any, read: Any, torch: Any) -> Source:
    """read: the tensor outside of autograd."""
    # Mostly it is plain memory on the host. Then numpy takes it as it is, which it does with nothing else: no other
    # device or layout, nothing quantised, lazily conjugated or negated.
    known = READ_TORCH.get(value.dtype)
    if known is None:
        return _from_any_torch(value)
    if type(read) is not torch.Tensor:
        return _from_any_torch(value)
    dtype, native, unsigned = known
    try:
        array = (read if unsigned is None else read.view(unsigned)).numpy()
    except (RuntimeError, TypeError):
        return _from_any_torch(value)
    if not array.flags.c_contiguous:
        return _from_any_torch(value)
    flat = array if array.ndim == 1 else array.reshape(-1)
    flat.setflags(write=False)
    return _new(Source, (flat, dtype, array.shape, "torch", native, False, None))


def _from_any_torch(value: Any) -> Source:
    dtype = torch_dtype(value)
    shape = tuple(value.shape)
    plain, device = value.detach(), None
    if value.is_cuda:
        plain, device = plain.cpu(), value.device
    strange = plain.is_neg() or plain.is_conj() or not plain.is_contiguous()
    copied = strange or device is not None
    try:
        flat = flat_tensor(plain.resolve_neg().resolve_conj().contiguous() if strange else plain)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        # Subclasses that only stand for data elsewhere (DTensor, FakeTensor, functorch's wrappers) fail here, each
        # its own way.
        raise LocalError(
            f"a {type(value).__name__} has no memory that can be read; pass the local tensor: {error}"
        ) from error
    flat.flags.writeable = False
    unsigned = without_numpy(torch_module()).get(value.dtype)
    READ_TORCH[value.dtype] = dtype, value.dtype, unsigned
    return Source(flat, dtype, shape, "torch", value.dtype, copied, device)
