"""What ranks send each other beside payloads: what is accepted, and how much memory it takes."""

from __future__ import annotations

import msgspec
import pytest

from quicoll.checks import MAX_MEMBERS
from quicoll.engine.messages import MAX_NUMBER, Announce, Farewell, decode_message, encode_message, size_in_memory
from quicoll.errors import PeerError

LARGEST = Announce(
    MAX_NUMBER,
    MAX_NUMBER,
    MAX_NUMBER,
    "\U0001f600" * 4096,
    (MAX_NUMBER,) * MAX_MEMBERS,
    (MAX_NUMBER,) * (1 + 2 * MAX_MEMBERS),
)


@pytest.mark.parametrize("message", [LARGEST, Announce(1, 0, 0, ""), Farewell(1), Farewell(1, done=True)], ids=repr)
def test_what_is_encoded_is_decoded(message: Announce | Farewell) -> None:
    assert decode_message(encode_message(message), node="a") == message


@pytest.mark.parametrize(
    "message",
    [
        Announce(1, 0, 0, "s" * 4097),
        Announce(1, 0, 0, "s", (1,) * (MAX_MEMBERS + 1)),
        Announce(1, 0, 0, "s", (), (1,) * (2 * MAX_MEMBERS + 2)),
        Announce(-1, 0, 0, "s"),
        Announce(1, 0, MAX_NUMBER + 1, "s"),
        Announce(1, 0, 0, "s", (-1,)),
        Farewell(MAX_NUMBER + 1),
    ],
    ids=lambda message: repr(message)[:40],
)
def test_what_is_out_of_bounds_is_refused(message: Announce | Farewell) -> None:
    with pytest.raises(PeerError):
        decode_message(encode_message(message), node="a")


def test_a_message_that_claims_more_than_it_has_takes_no_memory() -> None:
    claims = msgspec.msgpack.encode([1, 1, 0, 0, "s"])[:-2] + b"\xdb\xff\xff\xff\xff"  # a string of 4 GiB
    with pytest.raises(PeerError, match="malformed"):
        decode_message(claims, node="a")


def test_the_memory_of_an_announcement_is_not_underestimated() -> None:
    text = len(LARGEST.signature) * 4
    numbers = (len(LARGEST.counts) + len(LARGEST.measured)) * (8 + 36)
    assert size_in_memory(LARGEST) >= 0.9 * (text + numbers)


def test_text_that_is_not_utf_8_is_malformed() -> None:
    with pytest.raises(PeerError, match="malformed"):
        decode_message(encode_message(Announce(1, 0, 0, "s")).replace(b"\xa1s", b"\xa1\xff"), node="a")
