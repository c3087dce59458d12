"""What a bad member does: an authenticated worker with a bad memory module, or a mad one.

    a liar      what it sends to one peer has other bits than it should, and a checksum that holds for them
    an alarm    it reports again and again that its view cannot go on, though nothing is wrong
    a forger    what it says and gives of its state is another state, and agrees with itself
    a meddler   a relay that does with datagrams what it can: alters them, hands them to the wrong member, sends them
                again much later, or loses them

All act through the real code of its process, from the outside: no checksum, digest or rule of quicoll is touched.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from quicoll.engine.given import SEAL_BYTES, seal_given
from quicoll.engine.messages import Announce, decode_message, encode_message
from quicoll.errors import PeerError
from quicoll.local.parcels import NOTICE_BYTES, Notice
from quicoll.state.tree import flatten, rebuild
from quicoll.state.version import StateVersion
from quicoll_transport.net.runs import apart, joined
from quicoll_transport.relay.wire import HEAD_BYTES, PASSED_ON

if TYPE_CHECKING:
    from quicoll.engine.engine import Engine
    from quicoll.state.rank_state import RankState
    from quicoll.state.tree import FlatState
    from quicoll_transport.endpoint import Endpoint, Link
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun
    from quicoll_transport.net.udp import DatagramIO, OnRuns, OnUnreachable
    from quicoll_transport.sim import HostLoop

__all__ = ["Forgery", "Lies", "Meddling", "raise_alarm", "respelt", "spoilt"]

_MEDDLED_EVERY = 3  # of what is passed on: by the others a connection lives, and shows what it takes
_KEPT = 50  # datagrams that a meddler has for later


class Lies:
    """The links of one process, those to come as well, by which it lies to some of its peers.

    endpoint: of the process. to: the nodes that it lies to; what is added or removed counts from the next message on.
    by_lanes: by the numbers of messages that went to them by lanes, the checksums of what those had become: whoever
    lies to a lane leaves them there. Their notices have that checksum, and no lane looks spoilt.
    """

    def __init__(self, endpoint: Endpoint, to: dict[str, None], by_lanes: dict[int, int]) -> None:
        self._to = to
        self._by_lanes = by_lanes
        lying = _Links(self._make_lie)
        lying.update(endpoint.links)
        endpoint.links = lying
        for link in lying.values():
            self._make_lie(link)

    def _make_lie(self, link: Link) -> None:
        for name in ("send", "send_copy"):
            setattr(link, name, self._lying(link, getattr(link, name)))
        setattr(link, "send_app", self._announcing(link, link.send_app))  # noqa: B010 - a method, for this one object

    def _lying(self, link: Link, honest: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tag, payload, *more: honest(tag, self._lie(payload) if link.node in self._to else payload, *more)

    def _lie(self, payload: memoryview) -> memoryview:
        if len(payload) == NOTICE_BYTES:
            notice = Notice.read(bytes(payload))
            if notice.turn in self._by_lanes:
                return memoryview(notice._replace(checksum=self._by_lanes.pop(notice.turn)).packed())
        return spoilt(payload)

    def _announcing(self, link: Link, honest: Callable[[bytes], None]) -> Callable[[bytes], None]:
        return lambda data: honest(respelt(data, spoilt) if link.node in self._to else data)


class _Links(dict[Any, Any]):
    """Tells of every link that is put into it."""

    def __init__(self, added: Callable[[Link], None]) -> None:
        super().__init__()
        self._added = added

    def __setitem__(self, identity: Any, link: Any) -> None:
        super().__setitem__(identity, link)
        self._added(link)


def spoilt(payload: memoryview) -> memoryview:
    """Return a copy in which one bit is another one: of the last number, and not one that a rounding takes away."""
    found = bytearray(payload)
    if found:
        found[-min(2, len(found))] ^= 0x40
    return memoryview(found)


def respelt(data: bytes, change: Callable[[memoryview], memoryview]) -> bytes:
    """Return a message in which what an announcement gives is another, with a checksum that holds for it.

    Args:
        data: Any message between ranks; one that gives nothing is returned as it is.
        change: Given the bytes, returns others.
    """
    try:
        message = decode_message(data, node="")
    except PeerError:
        return data
    if not isinstance(message, Announce) or len(message.given) <= SEAL_BYTES:
        return data
    given = memoryview(message.given)[:-SEAL_BYTES]
    return encode_message(msgspec.structs.replace(message, given=seal_given(bytes(change(given)))))


def raise_alarm(engine: Engine, view_id: int, loop: asyncio.AbstractEventLoop | None) -> None:
    """Let the process report that this view cannot go on."""
    if loop is None:
        raise AssertionError("an engine without a loop")
    loop.call_soon(lambda: loop.create_task(engine.give_up(view_id, "an alarm for nothing")))


class Meddling:
    """The socket of a relay, a DatagramIO: what its process passes on goes out by it as a meddler wishes.

    Its process knows nothing of it. What it says for itself, on its own links, is left alone.
    """

    def __init__(self, inner: DatagramIO, what: Callable[[], str], done: dict[str, int]) -> None:
        """Begin.

        Args:
            inner: The socket.
            what: What is done (quicoll.sim.scenario.events.MEDDLINGS); "" for nothing.
            done: Counts how often, by what.
        """
        self._inner, self._what, self._done = inner, what, done
        self._passed = 0
        self._kept: deque[tuple[bytes, Address]] = deque(maxlen=_KEPT)

    @property
    def local_address(self) -> Address:
        return self._inner.local_address

    def start(self, on_runs: OnRuns, on_unreachable: OnUnreachable) -> None:
        self._inner.start(on_runs, on_unreachable)

    def send(self, runs: Sequence[DatagramRun]) -> None:
        what = self._what()
        if what:
            runs = joined([sent for each in apart(runs) for sent in self._meddled(what, *each)])
        self._inner.send(runs)

    async def resolve(self, host: str, port: int) -> list[Address]:
        return await self._inner.resolve(host, port)

    def close(self) -> None:
        self._inner.close()

    def _meddled(self, what: str, data: bytes, address: Address) -> list[tuple[bytes, Address]]:
        """Return what is sent for a datagram."""
        if data[0] != PASSED_ON:
            return [(data, address)]
        self._passed += 1
        if self._passed % _MEDDLED_EVERY:
            self._kept.append((data, address))
            return [(data, address)]
        other = next((each for each in reversed(self._kept) if each[1] != address), None)
        match what:
            case "alter":
                sent = [(bytes(spoilt(memoryview(data))), address)]
            case "misdirect" if other is not None:  # to another member, under a label that it takes
                sent = [(other[0][:HEAD_BYTES] + data[HEAD_BYTES:], other[1])]
            case "repeat" if self._kept:
                sent = [(data, address), (data, address), self._kept[0]]
            case "lose":
                sent = []
            case _:
                return [(data, address)]
        self._done[what] = self._done.get(what, 0) + 1
        return sent


class Forgery:
    """What one process says and gives of its state, where that is forged: one bit of its largest tensor.

    A state that is half overwritten is given to nobody, and is left as it is: its owner looks whether it got it right.
    """

    def __init__(
        self, state: RankState, what: Callable[[], str], loop: HostLoop, forged: Callable[[str], None]
    ) -> None:
        """Begin.

        Args:
            state: Of the process.
            what: What is forged (quicoll.sim.scenario.events.FORGERIES); "" for nothing.
            loop: Of the process.
            forged: Told of each forgery, with what it was.
        """
        self._state, self._what, self._loop, self._told = state, what, loop, forged
        self._honest_read, self._honest_values = state.read, state.values
        setattr(state, "read", self._read)  # noqa: B010 - methods of this one state
        setattr(state, "values", self._values)  # noqa: B010 - likewise

    def _read(self) -> FlatState | None:
        honest, what = self._honest_read(), self._what()
        at = None if honest is None or not what or self._state.torn else _largest(honest)
        if honest is None or at is None:
            return honest
        self._told(what)
        values = [part.value for part in honest.tensors]
        values[at] = _other_bit(values[at])
        if what == "chunks":
            tensors = [replace(part, value=value) for part, value in zip(honest.tensors, values, strict=True)]
            return replace(honest, tensors=tuple(tensors))
        found = flatten(rebuild(honest.skeleton, values, honest.own), self._state.own)
        if what == "manifest":
            object.__setattr__(found, "digest", honest.digest)
        if what == "version":
            self._claim()
        return found

    def _claim(self) -> None:
        """Have, for this turn of the loop, a version that nobody has committed."""
        version = self._state.version
        self._state.version = StateVersion(version.decision + 1, version.step + 1)
        self._loop.call_soon(self._take_back, version)

    def _take_back(self, version: StateVersion) -> None:
        self._state.version = version

    def _values(self) -> list[tuple[str, Any]]:
        found, what = self._honest_values(), self._what()
        honest = None if what in ("", "manifest") or self._state.torn else self._honest_read()
        at = None if honest is None else _largest(honest)
        if at is not None:
            self._told(what)
            path, value = found[at]
            found[at] = path, _other_bit(value)
        return found


def _largest(state: FlatState) -> int | None:
    """The number of the tensor that has the most bytes, of numpy's; None where it has none."""
    sizes = [part.value.nbytes if isinstance(part.value, np.ndarray) else 0 for part in state.tensors]
    return sizes.index(max(sizes)) if max(sizes, default=0) else None


def _other_bit(value: Any) -> Any:
    data = spoilt(memoryview(value.tobytes()))
    return np.frombuffer(data, value.dtype).reshape(value.shape)
