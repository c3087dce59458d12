"""What torch, numpy and other owners of memory bring: their types as ours, and their memory as numpy sees it.

Nothing here is copied, and torch is used only where somebody else has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from quicoll.errors import LocalError
from quicoll.numerics.dtypes import Array, DType

__all__ = [
    "READ_NUMPY",
    "READ_TORCH",
    "as_array",
    "asked_dtype",
    "flat_tensor",
    "numpy_dtype",
    "torch_dtype",
    "torch_module",
    "without_numpy",
]

# Those that have been looked at and are of this machine's order. numpy makes a name anew each time, of many parts.
READ_NUMPY: dict[np.dtype[Any], DType] = {}

# By torch's types that have been read: ours, and by which type numpy passes over one that it has not.
READ_TORCH: dict[Any, tuple[DType, Any, Any]] = {}

_DLPACK_HOST = (1, 3)  # kDLCPU and kDLCUDAHost of dlpack.h


def as_array(value: Any) -> Array | None:
    """Return an array in the memory of `value`; None if it has none that could be looked at.

    Raises LocalError for memory on another device, or that cannot be read as numbers.
    """
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


def _looked_at(value: Any, look: Callable[[Any], Array]) -> Array:
    try:
        return look(value)
    except (BufferError, RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        # Each producer refuses in its own way: types that numpy has not, read-only memory, formats that are no numbers.
        raise LocalError(
            f"the memory of a {type(value).__name__} cannot be read as numbers; pass a numpy array: {error}"
        ) from error


def numpy_dtype(value: np.ndarray[Any, Any]) -> DType:
    """Return the type of an array's elements. Raises LocalError where it has none that could be taken as they are."""
    if isinstance(value, np.ma.MaskedArray):
        raise LocalError("a masked array would lose its mask; pass value.filled(...)")
    return READ_NUMPY.get(value.dtype) or _native_dtype(value.dtype)


def _native_dtype(dtype: np.dtype[Any]) -> DType:
    if not dtype.isnative:
        raise LocalError(f"dtype {dtype.str} is not in this machine's byte order; pass value.astype({dtype.name!r})")
    # ml_dtypes registers bfloat16 under this name; its module need not be known.
    known = READ_NUMPY[dtype] = DType.parse(dtype.name)
    return known


def torch_module() -> Any:
    """Return torch, where somebody has imported it; else None."""
    return sys.modules.get("torch")


def torch_dtype(value: Any) -> DType:
    """Return the type of a tensor's elements. Raises LocalError where it has none that can be looked at."""
    if value.layout is not torch_module().strided:
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


def asked_dtype(dtype: Any) -> tuple[Literal["numpy", "torch"], DType]:
    """Return what a caller means by a dtype: whose it is, and ours.

    Args:
        dtype: A torch.dtype; or what numpy takes for one, by name as well.
    Raises:
        LocalError: It is none, or none of ours.
    """
    torch = torch_module()
    if torch is not None and isinstance(dtype, torch.dtype):
        return "torch", _named_dtype(dtype)
    try:
        native = None if dtype is None else np.dtype(dtype)
    except TypeError:
        native = None
    if native is not None:
        return "numpy", READ_NUMPY.get(native) or _native_dtype(native)
    if isinstance(dtype, str):  # of ml_dtypes, which nobody may have imported yet
        return "numpy", DType.parse(dtype)
    raise LocalError(f"dtype {dtype!r} is none; pass one of numpy's or torch's, or a name")


def flat_tensor(value: Any) -> Array:
    """Return a contiguous tensor's memory as a flat array. Raises RuntimeError and TypeError where it has none here."""
    flat = value if value.dim() == 1 else value.reshape(-1)
    unsigned = without_numpy(torch_module()).get(value.dtype)
    array: Array = (flat if unsigned is None else flat.view(unsigned)).numpy()
    return array


@lru_cache(maxsize=1)
def without_numpy(torch: Any) -> dict[Any, Any]:
    """Return torch's types that numpy has not, and the type of equal size by which their memory is passed over."""
    return {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}
