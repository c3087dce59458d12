"""What one rank holds of a state for a checkpoint: tensors that all ranks hold, shards, and what is a node's own.

    a tensor          replicated: equal on all ranks. Written once; the ranks divide it among themselves
    Shard(...)        a region of a larger tensor, of which other ranks hold the rest
    Local(tensor)     this node's own, such as the position of its sampler

Tensors are numpy arrays or torch tensors, of a dtype that safetensors has. In a file they are little-endian and in
row-major order; which of them were torch's is noted, so that they come back as they were.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from quicoll.checkpoint.regions import Region
from quicoll.errors import LocalError

if TYPE_CHECKING:
    import torch
    from typing_extensions import TypeIs

    Array: TypeAlias = np.ndarray[Any, Any] | torch.Tensor

__all__ = [
    "Contents",
    "HeldPart",
    "Local",
    "Memory",
    "Shard",
    "bytes_of",
    "copy_bytes",
    "is_torch",
    "parts_of",
    "width_of",
]

_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
_DTYPES = {code: name for name, code in _CODES.items()}
_WIDTHS = {code: 1 if code == "BOOL" or code.startswith("F8") else int(code.lstrip("BFIU")) // 8 for code in _DTYPES}
_EXTENSION_DTYPES = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})
"""Those that numpy has only through ml_dtypes."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A region of a tensor, which this rank holds and writes.

    Attributes:
        value: Its elements.
        shape: Of the whole tensor; equal on all ranks.
        offset: The index in the whole tensor at which `value` begins.
    """

    value: Array
    shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Local:
    """A tensor that is this node's own: read again by the node of the same name only.

    Attributes:
        value: The tensor.
    """

    value: Array


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """What a rank gives to a checkpoint.

    Attributes:
        tensors: By name. Those that are neither Shard nor Local are equal on all ranks.
        metadata: Text by name, equal on all ranks.
    """

    tensors: Mapping[str, Array | Shard | Local]
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeldPart:
    """What a rank holds of one tensor.

    node: whose own it is; "" for what belongs to all. code: safetensors' name of its dtype. shape: of the whole tensor.
    region: of it, what `value` holds. replicated: all ranks hold it, and whoever is told to writes it.
    """

    name: str
    node: str
    code: str
    shape: tuple[int, ...]
    region: Region
    of_torch: bool
    replicated: bool
    value: Any

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return width_of(self.code)


def width_of(code: str) -> int:
    """Return the bytes of an element. Raises LocalError for what is no dtype of a checkpoint."""
    if code not in _WIDTHS:
        raise LocalError(f"{code!r} is no dtype of a checkpoint")
    return _WIDTHS[code]


def parts_of(state: Mapping[str, Array | Shard | Local], *, node: str) -> list[HeldPart]:
    """Return what a rank holds, in order of the names.

    Args:
        state: By name.
        node: This node's name.
    Raises:
        LocalError: A name, dtype, layout or region cannot be saved.
    """
    return [_part(name, state[name], node) for name in sorted(state)]


def _part(name: str, held: Array | Shard | Local, node: str) -> HeldPart:
    if name == "__metadata__":
        raise LocalError("a tensor cannot be called __metadata__: safetensors keeps that name for itself")
    value = held.value if isinstance(held, Shard | Local) else held
    if is_torch(value):
        import torch

        if value.layout is not torch.strided or value.device.type == "meta":
            raise LocalError(
                f"tensor {name!r} is {value.layout} on {value.device}; only dense ones with data are saved"
            )
        dtype = str(value.dtype).removeprefix("torch.")
    else:
        value = np.asarray(value)
        dtype = value.dtype.name
    if dtype not in _CODES:
        raise LocalError(f"tensor {name!r} has dtype {dtype}, which a checkpoint cannot hold")
    region = Region.whole(tuple(value.shape))
    shape = region.shape
    if isinstance(held, Shard):
        shape = tuple(map(int, held.shape))
        region = Region(tuple(map(int, held.offset)), region.shape)
        region.check(shape, f"tensor {name!r}")
    replicated = not isinstance(held, Shard | Local)
    owner = node if isinstance(held, Local) else ""
    return HeldPart(name, owner, _CODES[dtype], shape, region, is_torch(value), replicated, value)


def bytes_of(part: HeldPart, region: Region) -> memoryview:
    """Return the bytes of a region as a file has them.

    Nothing is copied that is on the host, contiguous and little-endian: then they are the tensor's own memory.

    Args:
        part: Holds the region.
        region: Of the whole tensor.
    """
    place = region.slices(part.region)
    if part.of_torch:
        import torch

        taken = part.value.detach()[place].cpu().contiguous()
        flat: np.ndarray[Any, Any] = taken.reshape(-1).view(torch.uint8).numpy()
        return flat.data
    array = np.asarray(part.value[place])
    return np.ascontiguousarray(array, _little(array.dtype)).reshape(-1).view(np.uint8).data


def copy_bytes(part: HeldPart, region: Region, memory: memoryview) -> None:
    """Copy a region to memory, as a file has it: then the tensor may change.

    Args:
        part: Holds the region.
        region: Of the whole tensor.
        memory: Where to; of as many bytes, at an address that suits the dtype.
    """
    place = region.slices(part.region)
    flat = np.frombuffer(memory, np.uint8)
    if part.of_torch:
        import torch

        taken = part.value.detach()[place]
        torch.from_numpy(flat).view(taken.dtype).reshape(taken.shape).copy_(taken)
        return
    array = np.asarray(part.value[place])
    np.copyto(flat.view(_little(array.dtype)).reshape(array.shape), array)


def _little(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("<") if sys.byteorder == "big" or dtype.byteorder == ">" else dtype


class Memory:
    """New memory for a region of a tensor, filled piece by piece."""

    def __init__(self, code: str, region: Region, *, of_torch: bool) -> None:
        """Allocate it. What is not filled is not defined."""
        self._code = code
        self._region = region
        self._of_torch = of_torch
        self._words = np.empty(region.shape, f"<u{width_of(code)}")

    def place(self, held: Region) -> memoryview | None:
        """Return the memory of a region within it, as a file has the region; None where that is not in one place."""
        at: Any = (*held.slices(self._region), ...)  # "...": a view also where there is no dimension
        words = self._words[at]
        return words.reshape(-1).view(np.uint8).data if words.flags.c_contiguous else None

    def fill(self, held: Region, data: memoryview, wanted: Region) -> None:
        """Copy `wanted`, a region within both, from the bytes of the region `held`."""
        words = np.frombuffer(data, self._words.dtype).reshape(held.shape)
        self._words[wanted.slices(self._region)] = words[wanted.slices(held)]

    def array(self) -> Array:
        """Return the tensor, in this memory.

        Raises:
            LocalError: torch or ml_dtypes is not installed, or is too old for the dtype.
        """
        name = _DTYPES[self._code]
        flat: np.ndarray[Any, Any] = self._words.reshape(-1).view(np.uint8)
        try:
            if self._of_torch:
                import torch

                dtype = getattr(torch, name)
                if not flat.size:
                    return torch.empty(self._region.shape, dtype=dtype)
                return torch.from_numpy(flat).view(dtype).reshape(self._region.shape)
            if name in _EXTENSION_DTYPES:
                import ml_dtypes

                numpy_dtype = np.dtype(getattr(ml_dtypes, name))
            else:
                numpy_dtype = np.dtype(name).newbyteorder("<")
        except (ImportError, AttributeError, TypeError) as error:
            raise LocalError(f"a tensor of {name} cannot be represented here: {error!r}") from error
        array: np.ndarray[Any, Any] = flat.view(numpy_dtype).reshape(self._region.shape)
        return array


def is_torch(value: object) -> TypeIs[torch.Tensor]:
    """Return whether it is a torch tensor, without importing torch for those who do not use it."""
    loaded = sys.modules.get("torch")
    return loaded is not None and isinstance(value, loaded.Tensor)
