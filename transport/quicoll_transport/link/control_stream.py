"""The stream of control messages of a connection: written, cut into messages again, and looked at.

Every length that a peer names is compared with a bound of ours before memory is taken for it, and everything that the
types of quicoll_transport.link.frames do not express is looked at here, before anything else sees a message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec

from quicoll_transport.errors import ProtocolError
from quicoll_transport.link.frames import (
    INLINE_BYTES,
    LIMIT64,
    MAX_CONTROL,
    MAX_LENGTH,
    MAX_PARTIALS,
    MAX_RANGES,
    MAX_REASON,
    MAX_SIGHTED,
    Ack,
    Control,
    Hello,
    InlineMessage,
    Inquiry,
    Offer,
    RefuseMessage,
    Sighting,
    is_tag,
)

__all__ = ["ControlReader", "encode_control"]

_SIZE = struct.Struct("!I")  # of a message

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)


def encode_control(message: Control) -> bytes:
    body = _encoder.encode(message)
    if len(body) > MAX_CONTROL:
        raise ProtocolError(f"control message of {len(body)} bytes is above the limit of {MAX_CONTROL}")
    return len(body).to_bytes(4, "big") + body


def _check_ranges(message: Hello | Ack, ranges: tuple[tuple[int, int], ...], name: str) -> None:
    if len(ranges) > MAX_RANGES:
        raise ProtocolError(f"{type(message).__name__}.{name} lists {len(ranges)} ranges")
    last = 0
    for start, stop in ranges:
        if not last <= start < stop <= LIMIT64:
            raise ProtocolError(f"{type(message).__name__}.{name} has ranges out of order")
        last = stop


def _check_hello(message: Hello) -> None:
    _check_ranges(message, message.received, "received")
    _check_partial(message.partial)


def _check_ack(message: Ack) -> None:
    if message.also:
        _check_ranges(message, message.also, "also")


def _check_offer(message: Offer) -> None:
    if not is_tag(message.tag) or message.length > MAX_LENGTH:
        raise ProtocolError("offer with a malformed tag or length")


def _check_inline(message: InlineMessage) -> None:
    if len(message.payload) > INLINE_BYTES:
        raise ProtocolError(f"inline message of {len(message.payload)} bytes")


def _check_refusal(message: RefuseMessage) -> None:
    if len(message.reason) > MAX_REASON:
        raise ProtocolError(f"refusal with a reason of {len(message.reason)} characters")


def _check_inquiry(message: Inquiry) -> None:
    if len(message.filling) > INLINE_BYTES:
        raise ProtocolError(f"inquiry with {len(message.filling)} bytes")


def _check_sighting(message: Sighting) -> None:
    if len(message.host) > MAX_SIGHTED or message.port > 65535:
        raise ProtocolError("sighting with an address that is none")


def _check_partial(partial: tuple[tuple[int, int], ...]) -> None:
    if len(partial) > MAX_PARTIALS:
        raise ProtocolError(f"Hello lists {len(partial)} interrupted messages")
    last = -1
    for sequence, filled in partial:
        if not (last < sequence < LIMIT64 and 0 < filled <= MAX_LENGTH):
            raise ProtocolError("Hello lists interrupted messages out of order, or without a length")
        last = sequence


_CHECKS: dict[type, Callable[[Any], None]] = {
    Hello: _check_hello,
    Ack: _check_ack,
    Offer: _check_offer,
    InlineMessage: _check_inline,
    RefuseMessage: _check_refusal,
    Inquiry: _check_inquiry,
    Sighting: _check_sighting,
}
"""Bounds that the types do not express; each raises ProtocolError."""


class ControlReader:
    """Cuts the control stream into messages; never holds more than one message and one datagram's worth of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def waiting(self) -> int:
        """Bytes of the message that has begun and not ended, as far as its length is known; 0: there is none."""
        if len(self._buffer) < 4:
            return len(self._buffer)
        return 4 + int.from_bytes(self._buffer[:4], "big")

    def feed(self, data: bytes | memoryview) -> list[Control]:
        """Return the messages completed by `data`; raises ProtocolError at the first malformed one."""
        buffer = self._buffer
        buffer += data
        messages: list[Control] = []
        start, filled = 0, len(buffer)
        while filled - start >= 4:
            (size,) = _SIZE.unpack_from(buffer, start)
            if size > MAX_CONTROL:
                raise ProtocolError(f"control message of {size} bytes is above the limit of {MAX_CONTROL}")
            if filled - start < 4 + size:
                break
            try:
                message = _decoder.decode(buffer[start + 4 : start + 4 + size])
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
                raise ProtocolError(f"malformed control message: {error}") from error
            if (check := _CHECKS.get(type(message))) is not None:
                check(message)
            messages.append(message)
            start += 4 + size
        del buffer[:start]
        return messages
