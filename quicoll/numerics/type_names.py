"""Names of element types, of tensors and of what travels in their place: told to a process that has the same code.

float32             of a tensor
exact_float32       an accumulator of exact sums
int8|float32        a block of a wire format, of numbers of that type
64*float32          the accumulators of so many numbers of a block
"""

from __future__ import annotations

from quicoll.errors import LocalError
from quicoll.numerics.codec import BlockType
from quicoll.numerics.codecs import codec_of, wire_dtype
from quicoll.numerics.dtypes import DType
from quicoll.numerics.exact import exact_accumulator
from quicoll.numerics.reduce import block_accumulator

__all__ = ["type_name", "type_named"]

_EXACT = "exact_"


def type_name(dtype: DType) -> str:
    """Return the name of a type."""
    if not isinstance(dtype, BlockType):
        return dtype.name
    if dtype.part is None:
        raise AssertionError("a block without numbers")
    part = type_name(dtype.part)
    return f"{dtype.numbers}*{part}" if dtype.codec is None else f"{dtype.codec.name}|{part}"


def type_named(name: str) -> DType:
    """Return the type of a name, one object for each.

    Args:
        name: As `type_name` gives it.
    Raises:
        LocalError: There is no such type.
    """
    codec, block, part = name.partition("|")
    if block:
        return wire_dtype(codec_of(codec), type_named(part))
    numbers, many, part = name.partition("*")
    if many:
        if not numbers.isdecimal():
            raise LocalError(f"there is no type {name!r}")
        return block_accumulator(type_named(part), int(numbers))
    if name.startswith(_EXACT):
        return exact_accumulator(DType.parse(name.removeprefix(_EXACT))).wide
    return DType.parse(name)
