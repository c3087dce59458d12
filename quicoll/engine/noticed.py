"""A way that has something beside its link for long payloads: the memory of a host, or a lane.

Plans stay as they are: which message goes from whom to whom, and what is reduced where. A message of a size that is
carried beside the link, which both ends know from the plan, is *noticed*: a notice (quicoll.local.parcels.Notice) goes
over the link under the message's own tag, and says how its payload comes.

    given      its payload is on its way beside the link, and its notice is sent
    direct     what is beside has no room for it: its notice says so, and the payload goes over the link, under a tag of
               its own (`direct_tag`). Also later on, where what is beside fails with it: both ends agree on that first
    told       the notice is here: what is beside brings the payload to where it belongs, and compares its checksum

Who waits for what, and until when, is the executor's affair and the communicator's, as with links.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quicoll.local.parcels import NOTICE_BYTES, Notice
from quicoll_transport.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from quicoll.engine.executor import Moving, Way
    from quicoll_transport.endpoint import Link

__all__ = ["AwaitedMessage", "Beside", "Carried", "GivenMessage", "NoticedWay", "WaysBeside", "direct_tag"]

_NOTHING = Notice(0, 0, 0, 0)  # its turn says that the payload comes over the link


class Beside(Protocol):
    """What is beside the link to one rank."""

    @property
    def whole(self) -> bool:
        """Whether it may be used: not when its view is over."""
        ...

    def carries(self, nbytes: int) -> bool:
        """Return whether messages of so many bytes are noticed; the other end says the same."""
        ...

    def give(self, given: GivenMessage) -> Notice | None:
        """Take a payload, which is copied. It is finished when it has arrived. None: there is no room for it now."""
        ...

    def take(self, notice: Notice, awaited: AwaitedMessage) -> None:
        """Bring what a notice tells of to its memory, and finish it; or let it come over the link."""
        ...


class Carried(NamedTuple):
    """What went beside a link. at_work: whether anything more may. sent, received: bytes."""

    at_work: bool
    sent: int
    received: int


class WaysBeside(Protocol):
    """All such ways of a view. ranks: of the view, that they lead to. in_memory: whether through memory alone."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def in_memory(self) -> bool: ...

    def to(self, links: Mapping[int, Link]) -> dict[int, Way]:
        """Return the ways, by rank, to those that there are links to."""
        ...

    def carried(self) -> Mapping[int, Carried]:
        """Return what went beside each link, by rank, where that is the network."""
        ...

    def end(self) -> None:
        """The view is over: stop for good."""
        ...


class NoticedWay:
    """To one rank: quicoll.engine.executor.Way."""

    def __init__(self, link: Link, beside: Beside) -> None:
        self.link = link
        self._beside = beside

    @property
    def min_rtt_ns(self) -> int | None:
        return self.link.min_rtt_ns

    def send_copy(self, tag: bytes, payload: memoryview) -> None:
        self.link.send_copy(tag, payload)

    def send(self, tag: bytes, payload: memoryview, on_done: Callable[[Moving], None]) -> Moving:
        if not self._beside.carries(len(payload)):
            return self.link.send(tag, payload, on_done)
        given = GivenMessage(self.link, tag, payload, on_done)
        notice = self._beside.give(given) if self._beside.whole else None
        if notice is None:
            self.link.send_copy(tag, memoryview(_NOTHING.packed()))
            return self.link.send(direct_tag(tag), payload, on_done)
        self.link.send_copy(tag, memoryview(notice.packed()))
        return given

    def post(self, tag: bytes, buffer: memoryview, on_done: Callable[[Moving], None]) -> Moving:
        if not self._beside.carries(len(buffer)):
            return self.link.post(tag, buffer, on_done)
        return AwaitedMessage(self.link, self._beside, tag, buffer, on_done)


class _Message:
    """A message under way: quicoll.engine.executor.Moving."""

    def __init__(self, link: Link, on_done: Callable[[Moving], None]) -> None:
        self.link = link
        self.done = False
        self.aborted = False
        self.error: TransportError | None = None
        self.under_way: Moving | None = None  # ends with this one
        self._on_done = on_done

    def finish(self, error: TransportError | None) -> None:
        """It is there, or has failed."""
        if not self.done:
            self.done = True
            self.error = error
            self.under_way = None
            self._on_done(self)

    def abort(self) -> None:
        """Nobody waits for it any more, and its memory is its owner's."""
        if not self.done:
            self.done = self.aborted = True
            under_way, self.under_way = self.under_way, None
            if under_way is not None:
                under_way.abort()

    def _over_link(self, start: Callable[[], Moving]) -> None:
        if not self.done:
            try:
                self.under_way = start()
            except TransportError as error:
                self.finish(error)

    def _came(self, transfer: Moving) -> None:
        self.finish(transfer.error)


class GivenMessage(_Message):
    """A message of this rank, until it has arrived. payload: as the caller has it, until it is done."""

    def __init__(self, link: Link, tag: bytes, payload: memoryview, on_done: Callable[[Moving], None]) -> None:
        super().__init__(link, on_done)
        self.payload = payload
        self._tag = tag

    def go_direct(self) -> None:
        """Nobody takes it beside the link any more: it goes over the link."""
        self._over_link(lambda: self.link.send(direct_tag(self._tag), self.payload, self._came))


class AwaitedMessage(_Message):
    """A message that comes to this rank. buffer: where to."""

    def __init__(
        self, link: Link, beside: Beside, tag: bytes, buffer: memoryview, on_done: Callable[[Moving], None]
    ) -> None:
        super().__init__(link, on_done)
        self.buffer = buffer
        self._beside = beside
        self._tag = tag
        notice = bytearray(NOTICE_BYTES)
        self.under_way = link.post(tag, memoryview(notice), partial(self._told, notice))

    def _told(self, packed: bytearray, transfer: Moving) -> None:
        if self.done or transfer.error is not None or not self._beside.whole:
            self.finish(transfer.error)
            return
        notice = Notice.read(packed)
        if notice.turn == 0:
            self.come_direct()
        else:
            self.under_way = None
            self._beside.take(notice, self)

    def come_direct(self) -> None:
        """It comes over the link."""
        self._over_link(lambda: self.link.post(direct_tag(self._tag), self.buffer, self._came))


def direct_tag(tag: bytes) -> bytes:
    """The tag of a payload whose notice says that it comes over the link; no message's number has that bit."""
    return tag[:-4] + bytes((tag[-4] | 0x80,)) + tag[-3:]
