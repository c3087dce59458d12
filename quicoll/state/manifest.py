"""The manifest of a state: name, type, shape and digest of each tensor, sorted by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from quicoll.errors import LocalError, PeerError
from quicoll.numerics.buffers import source, tensor_digest
from quicoll.numerics.dtypes import DType

__all__ = ["MAX_MANIFEST", "TensorRecord", "checked", "decode_manifest", "encode_manifest"]

_MAX_TENSORS = 1 << 20
MAX_MANIFEST = 1 << 30
"""Bytes that a manifest has at most."""


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor in the manifest of a state. digest: 16 bytes over type, shape and elements."""

    name: str
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    torch: bool
    digest: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[TensorRecord, ...])


def encode_manifest(state: Mapping[str, Any]) -> bytes:
    """Describe each tensor of a state, sorted by name.

    Raises:
        LocalError: A value is neither an array nor a tensor.
    """
    return _encoder.encode(tuple(_describe(name, state[name]) for name in sorted(state)))


def decode_manifest(data: bytes | memoryview, *, giver: int, view_id: int) -> tuple[TensorRecord, ...]:
    """Read a manifest that rank `giver` sent.

    Raises:
        PeerError: It is malformed, or names more tensors than a state may have.
    """
    try:
        tensors = _decoder.decode(data)
        for tensor in tensors:
            DType.parse(tensor.dtype)
    except (msgspec.MsgspecError, LocalError) as error:
        raise PeerError(f"malformed state manifest: {error}", rank=giver, view=view_id) from error
    if len(tensors) > _MAX_TENSORS:
        raise PeerError(f"a state of {len(tensors)} tensors", rank=giver, view=view_id)
    return tensors


def checked(state: object) -> dict[str, Any]:
    """Return what save() returned, if it is a state."""
    if not isinstance(state, Mapping):
        raise LocalError(f"save() gives a mapping of names to tensors, not {type(state).__name__}")
    if len(state) > _MAX_TENSORS:
        raise LocalError(f"a state has at most {_MAX_TENSORS} tensors, not {len(state)}")
    for name in state:
        try:
            name.encode()
        except (AttributeError, UnicodeEncodeError):
            raise LocalError(f"a name in the state that save() gave is no text: {name!r}") from None
    return dict(state)


def _describe(name: str, value: Any) -> TensorRecord:
    read = source(value)
    return TensorRecord(name, read.dtype.name, read.shape, read.kind == "torch", tensor_digest(read))
