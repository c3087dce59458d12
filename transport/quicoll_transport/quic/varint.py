"""Variable-length integers of QUIC (RFC 9000 section 16): the first two bits say how many bytes there are.

Written in the fewest bytes. Read in whatever length the peer chose, which section 16 allows everywhere but for the
type of a frame (see frames).
"""

from __future__ import annotations

__all__ = ["MAX_VARINT", "pull", "varint", "varint_size"]

MAX_VARINT = (1 << 62) - 1


def varint(value: int) -> bytes:
    """Return the shortest form of a number.

    Raises:
        OverflowError: it is negative or above MAX_VARINT.
    """
    if value < 0x40:
        return value.to_bytes(1, "big")
    if value < 0x4000:
        return (value | 0x4000).to_bytes(2, "big")
    if value < 0x40000000:
        return (value | 0x80000000).to_bytes(4, "big")
    if value > MAX_VARINT:
        raise OverflowError(f"a variable-length integer is at most 2^62 - 1, not {value}")
    return (value | 0xC000000000000000).to_bytes(8, "big")


def varint_size(value: int) -> int:
    """Return how many bytes the shortest form of a number takes."""
    return 1 if value < 0x40 else 2 if value < 0x4000 else 4 if value < 0x40000000 else 8


def pull(data: bytes | bytearray | memoryview, at: int) -> tuple[int, int]:
    """Return the number that begins at `at`, and where the byte behind it is.

    Raises:
        IndexError: the data ends before the number does.
    """
    first = data[at]
    if first < 0x40:
        return first, at + 1
    if first < 0x80:
        return (first & 0x3F) << 8 | data[at + 1], at + 2
    end = at + (1 << (first >> 6))
    if end > len(data):
        raise IndexError("a variable-length integer is cut short")
    return int.from_bytes(data[at:end], "big") & ((1 << (8 * (end - at) - 2)) - 1), end
