"""What ranks give to an operation in its announcement: bytes, and a checksum of them.

The checksum is made on the caller's thread, where the bytes are copied from the tensor, and looked at by everyone who
uses them; as with the transport's (quicoll_transport.link.frames) it covers memory, copies and code on both sides,
which the encryption of the wire does not.
"""

from __future__ import annotations

import xxhash

from quicoll.local.small import Spoiled

__all__ = ["SEAL_BYTES", "open_given", "seal_given"]

SEAL_BYTES = 8


def seal_given(data: bytes) -> bytes:
    """Return bytes with their checksum, xxh3-64."""
    return data + xxhash.xxh3_64_digest(data)


def open_given(given: bytes, size: int, rank: int) -> bytes:
    """Return what was sealed.

    Args:
        given: What rank `rank` of the view has sent.
        size: Bytes that its call gives.
        rank: For the error.
    Raises:
        Spoiled: The checksum is another one, or the size.
    """
    if len(given) != size + SEAL_BYTES:
        raise Spoiled(rank, f"gives {len(given) - SEAL_BYTES} bytes where {size} belong", bits=False)
    data = given[:size]
    if xxhash.xxh3_64_digest(data) != given[size:]:
        raise Spoiled(rank, "what it gave differs from its checksum", bits=True)
    return data
