"""torch and numpy to flat memory and back.

Everything past this module sees one thing: a 1-D, C-contiguous numpy array of an element type's storage dtype.
Copies, all of them:

- `source`: none for a C-contiguous numpy array or a contiguous CPU tensor (transposed, sliced, conjugated or
  negated views are copied once);
- `allocate`: none; the collective writes into the memory that the caller gets;
- `destination`: one, in `Destination.commit`. A collective works in a buffer of its own, so that one that is
  aborted leaves the caller's `out` as it was.

torch is imported for who asks for a tensor of it, and for nobody else: a caller who passes one has imported it.
"""

from __future__ import annotations

import importlib
import math
import sys
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import xxhash

from quicoll.dtypes import Array, DType
from quicoll.errors import LocalError

__all__ = ["Destination", "Kind", "Source", "allocate", "destination", "digest", "memory", "source", "wrap"]

Kind: TypeAlias = Literal["numpy", "torch"]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What a caller passed in, to be read.

    flat: 1-D, C order, of dtype.storage, not writable; the caller's own memory unless `copied`. shape: the
    caller's. native: the caller's dtype object (numpy.dtype or torch.dtype), for allocating its like.
    """

    flat: Array
    dtype: DType
    shape: tuple[int, ...]
    kind: Kind
    native: Any
    copied: bool

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Destination:
    """Where a result goes.

    value: what the caller gets: an array or a tensor of `shape` and `dtype`. flat: 1-D, writable, of dtype.storage:
    the value's own memory if it is fresh, else a buffer beside it.
    """

    value: Any
    flat: Array
    dtype: DType
    shape: tuple[int, ...]
    kind: Kind
    fresh: bool

    def commit(self, flat: Array | None = None) -> Any:
        """Write the finished result into `value` and return it.

        flat: the result where it is not in `self.flat`: 1-D, of dtype.storage. Nothing is copied if the value is
        fresh and the result is in place. Autograd sees the write as any other in-place change of a tensor.
        """
        result = self.flat if flat is None else flat
        if result.shape != self.flat.shape or result.dtype != self.dtype.storage:
            raise LocalError(
                f"a result of {result.size} {result.dtype} does not fit {self.flat.size} {self.dtype.storage}"
            )
        if self.fresh:
            if result is not self.flat:
                np.copyto(self.flat, result)
        elif self.kind == "numpy":
            np.copyto(self.value, result.view(self.value.dtype).reshape(self.shape))
        else:
            _write_tensor(self.value, result.reshape(self.shape))
        return self.value


def source(value: Any) -> Source:
    """Look at a numpy array or a torch tensor as flat memory.

    Any shape, 0-dimensional and empty included; read-only arrays too; a tensor that requires grad is read as it is,
    outside of autograd. The memory must not change until the collective has ended. Raises LocalError that says what
    to pass instead: for what is neither array nor tensor, another device, layout, byte order or dtype.
    """
    torch = _torch()
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_torch(value)
    if isinstance(value, np.ndarray):
        return _from_numpy(value)
    raise LocalError(
        f"a {type(value).__name__} is neither array nor tensor; pass numpy.asarray(x, dtype) or torch.as_tensor(x)"
    )


def allocate(like: Source, shape: tuple[int, ...] | None = None) -> Destination:
    """A new array or tensor of the kind and dtype of `like`, uninitialised, of `shape` (by default that of `like`)."""
    shape = like.shape if shape is None else shape
    if like.kind == "numpy":
        value: Any = np.empty(shape, like.native)
        flat = value.reshape(-1).view(like.dtype.storage)
    else:
        value = _torch().empty(shape, dtype=like.native, device="cpu")
        flat = _flat_tensor(value)
    return Destination(value, flat, like.dtype, shape, like.kind, fresh=True)


def destination(out: Any, like: Source, shape: tuple[int, ...] | None = None) -> Destination:
    """A caller's `out`, checked, with a buffer beside it; `commit` writes it.

    `out` may be an array for a tensor and the other way round, be strided, and be (or overlap) the input. Raises
    LocalError unless it has `shape` (by default that of `like`) and the dtype of `like`, can be written, does not
    require grad, and has a place of its own for each element.
    """
    shape = like.shape if shape is None else shape
    torch = _torch()
    if torch is not None and isinstance(out, torch.Tensor):
        kind: Kind = "torch"
        dtype = _torch_dtype(out)
        if out.requires_grad:
            raise LocalError("out requires grad; pass out.detach(), or a tensor made under torch.no_grad()")
        strides, writable = tuple(step * out.element_size() for step in out.stride()), True
    elif isinstance(out, np.ndarray):
        kind = "numpy"
        dtype = _numpy_dtype(out)
        strides, writable = out.strides, out.flags.writeable
    else:
        raise LocalError(f"out is a {type(out).__name__}; pass a numpy array or a torch tensor")
    if tuple(out.shape) != shape or dtype is not like.dtype:
        raise LocalError(f"out is {tuple(out.shape)} of {dtype}, the result {shape} of {like.dtype}")
    if not writable:
        raise LocalError("out is read-only")
    if _overlaps_itself(shape, strides, dtype.itemsize):
        raise LocalError(f"out has several elements in one place (strides {strides} bytes); pass a contiguous copy")
    return Destination(out, np.empty(math.prod(shape), dtype.storage), dtype, shape, kind, fresh=False)


def wrap(flat: Array, dtype: DType, shape: tuple[int, ...], kind: Kind) -> Any:
    """An array or a tensor of `dtype` and `shape` in the memory of `flat` (1-D, of dtype.storage, writable).

    Imports torch for "torch", and ml_dtypes for numpy arrays of types that numpy has not; LocalError without them.
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
    """The bytes of a flat array, without a copy; writable if the array is."""
    return flat.view(np.uint8).data


def digest(value: Source | Any) -> bytes:
    """16 bytes, xxh3-128, over dtype name, shape and elements in C order; the same for an array and a tensor that
    are equal.

    Equal bits give equal digests; -0.0 and +0.0, and NaN of different payloads, are different bits. Not a defence
    against an adversary. value: a Source, an array or a tensor. Raises LocalError as `source` does.
    """
    read = value if isinstance(value, Source) else source(value)
    state = xxhash.xxh3_128(f"{read.dtype}{list(read.shape)}".encode())
    state.update(memory(read.flat))
    return state.digest()


# ---------------------------------------------------------------------------------------------------------------------
# numpy


def _from_numpy(value: np.ndarray[Any, Any]) -> Source:
    dtype = _numpy_dtype(value)
    copied = not value.flags.c_contiguous
    flat = np.ascontiguousarray(value).reshape(-1).view(dtype.storage)
    flat.flags.writeable = False
    return Source(flat, dtype, value.shape, "numpy", value.dtype, copied)


def _numpy_dtype(value: np.ndarray[Any, Any]) -> DType:
    if isinstance(value, np.ma.MaskedArray):
        raise LocalError("a masked array would lose its mask; pass value.filled(...)")
    if not value.dtype.isnative:
        raise LocalError(
            f"dtype {value.dtype.str} is not in this machine's byte order; pass value.astype({value.dtype.name!r})"
        )
    # ml_dtypes registers bfloat16 under this name; its module need not be known.
    return DType.parse(value.dtype.name)


# ---------------------------------------------------------------------------------------------------------------------
# torch


def _torch() -> Any:
    return sys.modules.get("torch")


def _from_torch(value: Any) -> Source:
    dtype = _torch_dtype(value)
    shape = tuple(value.shape)
    plain = value.detach()
    copied = plain.is_neg() or plain.is_conj() or not plain.is_contiguous()
    try:
        flat = _flat_tensor(plain.resolve_neg().resolve_conj().contiguous())
    except (RuntimeError, TypeError, NotImplementedError) as error:
        # Subclasses that only stand for data elsewhere (DTensor, FakeTensor, functorch's wrappers) fail here, each
        # its own way.
        raise LocalError(
            f"a {type(value).__name__} has no memory that can be read; pass the local tensor: {error}"
        ) from error
    flat.flags.writeable = False
    return Source(flat, dtype, shape, "torch", value.dtype, copied)


def _torch_dtype(value: Any) -> DType:
    if value.layout is not _torch().strided:
        raise LocalError(f"a tensor of layout {value.layout} is not supported; pass value.to_dense()")
    if value.is_quantized:
        raise LocalError(
            f"a quantised tensor ({value.dtype}) is not supported; pass value.int_repr() or value.dequantize()"
        )
    if value.device.type == "meta":
        raise LocalError("a tensor on device meta has no elements; pass one that has been materialised")
    if value.device.type != "cpu":
        raise LocalError(f"a tensor on device {value.device} is not supported; pass value.cpu()")
    return DType.parse(str(value.dtype).removeprefix("torch."))


def _flat_tensor(value: Any) -> Array:
    """A contiguous tensor's memory as a flat array."""
    torch = _torch()
    flat = value.reshape(-1)
    unsigned = _without_numpy(torch).get(value.dtype)
    return (flat if unsigned is None else flat.view(unsigned)).numpy()  # type: ignore[no-any-return]


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
    with torch.inference_mode() if out.is_inference() else torch.no_grad():
        out.copy_(tensor)


def _overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether two elements may share memory: unless each dimension steps over all that the ones below it span.

    Views made by slicing and transposing pass; expanded, broadcast and sliding-window ones do not. A few strange
    layouts that interleave without overlapping are refused too: to decide those exactly is NP-hard.
    """
    if 0 in shape:
        return False
    span = itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride < span:
            return True
        span += stride * (size - 1)
    return False
