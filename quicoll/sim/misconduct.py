"""What a bad member does: an authenticated worker with a bad memory module, or a mad one.

    a liar      what it sends to one peer has other bits than it should, and a checksum that holds for them
    an alarm    it reports again and again that its view cannot go on, though nothing is wrong

Both act through the real code of its process, from the outside: no checksum, digest or rule of quicoll is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quicoll.engine.engine import Engine
    from quicoll_transport.endpoint import Endpoint, Link
    from quicoll_transport.sim import HostLoop

__all__ = ["Lies", "raise_alarm"]


class Lies:
    """The links of one process, those to come as well, by which it lies to some of its peers.

    endpoint: of the process. to: the nodes that it lies to; what is added or removed counts from the next message on.
    """

    def __init__(self, endpoint: Endpoint, to: dict[str, None]) -> None:
        self._to = to
        lying = _Links(self._make_lie)
        lying.update(endpoint.links)
        endpoint.links = lying
        for link in lying.values():
            self._make_lie(link)

    def _make_lie(self, link: Link) -> None:
        honest = link.send

        def send(tag: bytes, payload: memoryview) -> Any:
            return honest(tag, spoilt(payload) if link.node in self._to else payload)

        setattr(link, "send", send)  # noqa: B010 - a method of this one link


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


def raise_alarm(engine: Engine, view_id: int, loop: HostLoop) -> None:
    """Let the process report that this view cannot go on."""
    loop.call_soon(lambda: loop.create_task(engine.give_up(view_id, "an alarm for nothing")))
