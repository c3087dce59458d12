"""What the ranks of a view tell each other beside payloads: small messages, in order, exactly once
(quicoll.engine.communicator)."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from quicoll.errors import PeerError

__all__ = ["MAX_NUMBER", "Announce", "Farewell", "Word", "decode_word", "encode_word"]

_MAX_SIGNATURE = 4096
MAX_NUMBER = (1 << 62) - 1  # of what is announced


class Announce(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t", tag=1):
    """What a rank called as operation `seq` of `group`. counts: this rank's own sizes, where they may differ.

    measured: of its links, from the operation by which the group agrees on its network; see `Mesh._measured`.
    """

    view_id: int
    group: int
    seq: int
    signature: str
    counts: tuple[int, ...] = ()
    measured: tuple[int, ...] = ()


class Farewell(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t", tag=2):
    """A rank will leave once its peers need nothing more of this view that it took part in. done: the answer to it."""

    view_id: int
    done: bool = False


Word: TypeAlias = Announce | Farewell
"""What ranks tell each other beside payloads."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Word] = msgspec.msgpack.Decoder(Word)


def encode_word(word: Word) -> bytes:
    return _encoder.encode(word)


def decode_word(data: bytes, *, node: str) -> Word:
    """Raises PeerError for what no rank of ours would send."""
    try:
        word = _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PeerError(f"malformed announcement: {error}", node=node) from error
    numbers: tuple[int, ...] = (word.view_id,)
    if isinstance(word, Announce):
        numbers = (word.view_id, word.group, word.seq, *word.counts, *word.measured)
        if len(word.signature) > _MAX_SIGNATURE:
            raise PeerError("announcement out of bounds", node=node)
    if not all(0 <= number <= MAX_NUMBER for number in numbers):
        raise PeerError("announcement out of bounds", node=node)
    return word
