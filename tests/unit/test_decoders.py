"""Any bytes that a peer sends are read to a value or to an error of ours: another error would end the process.

Each decoder gets a message of ours with every byte replaced in turn by those that mean most to msgpack and to UTF-8,
and cut off at every place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from quicoll.engine.messages import Announce, Farewell, decode_message, encode_message
from quicoll.errors import QuicollError
from quicoll.membership import messages, operators, status
from quicoll.membership.link_figures import LinkFigures, MeasuredLinks
from quicoll.membership.view import Member, View
from quicoll.state.manifest import decode_manifest, encode_manifest
from quicoll.state.tree import flatten, rebuild

# Small numbers, lengths, nil, the unused byte, floats, wide integers, long strings and maps, and no UTF-8 at all.
BYTES = bytes((0x00, 0x7F, 0x80, 0x9F, 0xA1, 0xBF, 0xC0, 0xC1, 0xC6, 0xCB, 0xCF, 0xD3, 0xDB, 0xDD, 0xDF, 0xE0, 0xFF))

STATE = flatten({"a": np.ones(3), "b": [1, "text", (None, 2.5)], 4: np.float32(1.5)})
VIEW = View(
    view_id=3,
    members=(Member(rank=0, node="a", incarnation=1, addresses=(("h", 1),)),),
    seed=5,
    committed_step=7,
    committed_view=2,
)

LINKS = MeasuredLinks(
    window_ns=10**10,
    links=(LinkFigures(peer=1, rtt_ns=7, sent_rate=8, received_rate=9), LinkFigures(peer=2, carrier="memory")),
    untold=3,
)

DECODERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "announcement": (
        lambda data: decode_message(data, node="a"),
        encode_message(Announce(1, 0, 2, "op", (3,), (4, 5))),
    ),
    "farewell": (lambda data: decode_message(data, node="a"), encode_message(Farewell(1, done=True))),
    "join": (
        lambda data: messages.decode(data, sender="member"),
        messages.encode(messages.Join(incarnation=7, addresses=(("host", 1),), doubt=(3, 9), site="fra")),
    ),
    "report": (
        lambda data: messages.decode(data, sender="member"),
        messages.encode(messages.Report(view_id=3, lost=(("b", "silence"),), reason="all_reduce", culprit="b")),
    ),
    "measured": (
        lambda data: messages.decode(data, sender="member"),
        messages.encode(messages.Measured(view_id=3, links=LINKS)),
    ),
    "propose": (lambda data: messages.decode(data, sender="coordinator"), messages.encode(messages.Propose(view=VIEW))),
    "operation": (
        lambda data: operators.decode_operation(data, node="operator"),
        operators.encode_operation(operators.Scale(world_size=3, leave=("a",))),
    ),
    "status": (
        lambda data: operators.decode_answer(data, node="coordinator"),
        status.fitting(
            status.JobStatus(
                led_ns=1,
                stage="proposed",
                world_size=2,
                view_id=3,
                recent=(4, 5),
                members=(
                    status.MemberStatus(node="a", state="asked", rank=0, why="text", rtt_ns=7, links=LINKS, links_ns=5),
                ),
                events=(status.EventStatus(ago_ns=1, kind="held", said="waits"),),
            )
        ),
    ),
    "manifest": (lambda data: decode_manifest(data, giver=0, view_id=3), encode_manifest(STATE)),
    "skeleton": (
        lambda data: rebuild(data, [tensor.value for tensor in STATE.tensors]),
        decode_manifest(encode_manifest(STATE), giver=0, view_id=3).skeleton,
    ),
}


def spoiled(data: bytes) -> Iterator[bytes]:
    for place in range(len(data)):
        yield data[:place]
        for byte in BYTES:
            yield data[:place] + bytes((byte,)) + data[place + 1 :]


@pytest.mark.parametrize(("decode", "data"), DECODERS.values(), ids=DECODERS.keys())
def test_spoiled_bytes_give_a_value_or_an_error_of_ours(decode: Callable[[bytes], object], data: bytes) -> None:
    decode(data)
    refused = 0
    for bad in spoiled(data):
        try:
            decode(bad)
        except QuicollError:
            refused += 1
    assert refused > len(data)


def test_msgpack_has_an_error_that_is_none_of_its_own_errors() -> None:
    """Why decoders name UnicodeDecodeError beside msgspec's: if this fails, they need not any more."""
    with pytest.raises(UnicodeDecodeError):
        msgspec.msgpack.decode(b"\xa1\xff")
