"""The manifest of a state: its skeleton, and a record of each tensor. It goes from the giver to those who receive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from quicoll.errors import LocalError, PeerError
from quicoll.numerics.dtypes import DType
from quicoll.state.tree import MAX_NODES, MAX_SKELETON

if TYPE_CHECKING:
    from quicoll.state.tree import FlatState

__all__ = ["MAX_MANIFEST", "Manifest", "TensorRecord", "decode_manifest", "encode_manifest"]

MAX_MANIFEST = 1 << 30
"""Bytes that a manifest has at most."""
_DIGEST = 16


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor in the manifest of a state. digest: 16 bytes over type, shape and elements."""

    path: str
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    kind: Literal["numpy", "torch"]
    digest: Annotated[bytes, msgspec.Meta(min_length=_DIGEST, max_length=_DIGEST)]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A state without its tensors' elements. See quicoll.state.tree."""

    skeleton: bytes
    records: tuple[TensorRecord, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(state: FlatState) -> bytes:
    """Describe a state.

    Raises:
        LocalError: The description is longer than MAX_MANIFEST.
    """
    records = tuple(TensorRecord(part.path, part.dtype, part.shape, part.kind, part.digest) for part in state.tensors)
    packed = _encoder.encode(Manifest(state.skeleton, records))
    if len(packed) > MAX_MANIFEST:
        raise LocalError(f"the state's manifest has {len(packed)} bytes; at most {MAX_MANIFEST} are sent")
    return packed


def decode_manifest(data: bytes | memoryview, *, giver: int, view_id: int) -> Manifest:
    """Read a manifest that rank `giver` sent.

    Raises:
        PeerError: It is malformed, or names more than a state may have.
    """
    try:
        manifest = _decoder.decode(data)
        for record in manifest.records:
            DType.parse(record.dtype)
    except (msgspec.MsgspecError, UnicodeDecodeError, LocalError) as error:
        raise PeerError(f"malformed state manifest: {error}", rank=giver, view=view_id) from error
    if len(manifest.records) > MAX_NODES or len(manifest.skeleton) > MAX_SKELETON:
        raise PeerError(
            f"a state of {len(manifest.records)} tensors and a skeleton of {len(manifest.skeleton)} bytes",
            rank=giver,
            view=view_id,
        )
    return manifest
