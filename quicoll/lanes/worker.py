"""A lane, from its orders to its links. Orders go in, reports come out (orders.py); all on the endpoint's loop.

With the lane of each other node it is, in the present view,

    no pair     not ordered to join, or over
    joining     a link is made, and the two show each other what their engines have told them (`JoinLane`); what is to
                be received waits
    paired      the other side has shown it: messages go both ways
    over        the link has ended, a message of it has failed, it has shown the wrong thing, or the engine parts them

Invariants:
    - a place is read or written only for a use under way, and each use ends by one `LaneOver`
    - nothing is sent to, or taken from, a node's lane that has not shown what its engine had told ours for this view:
      beside the certificate of its node, so that no other process of the node stands in
    - a link that was made for one view serves the next ones
What comes on a link before its order is the other side's mark alone, which is kept; of other sizes it ends the link.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from quicoll.lanes.orders import (
    DenyLane,
    JoinLane,
    LaneApart,
    LaneCancel,
    LaneDeadlines,
    LaneIncarnation,
    LaneOpened,
    LaneOver,
    LanePaired,
    LanePing,
    LanePong,
    LaneReceive,
    LaneSend,
    LaneView,
    PartLanes,
)
from quicoll_transport.errors import TransportError
from quicoll_transport.security.identity import WORKER, Identity

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.lanes.memory import LanePlaces
    from quicoll.lanes.orders import LaneOrder, LaneReport
    from quicoll_transport.endpoint import Endpoint, Link
    from quicoll_transport.endpoint.transfer import Transfer

__all__ = ["MARK_BYTES", "LaneWorker"]

MARK_BYTES = 32
"""Of what two lanes show each other."""
_SHOWN = struct.Struct("!Q32s")  # the view, the mark
_TAG = struct.Struct("!QQQ")  # the view, the sender's number, 0
_MAX_WHY = 200


@dataclass(slots=True, eq=False)
class _Pair:
    node: str
    link: Link
    expects: bytes
    proved: bool = False
    over: bool = False
    waiting: list[LaneReceive] = field(default_factory=list)
    uses: dict[int, Transfer] = field(default_factory=dict)


class LaneWorker:
    """See the module's head."""

    def __init__(self, *, job: str, memory: LanePlaces, tell: Callable[[LaneReport], None]) -> None:
        """Begin without an endpoint; `use` gives it one.

        Args:
            job: The job.
            memory: The slots.
            tell: Called with each report.
        """
        self._job = job
        self._memory = memory
        self._tell = tell
        self._endpoint: Endpoint | None = None
        self._view = 0
        self._pairs: dict[str, _Pair] = {}
        self._shown: dict[str, tuple[int, bytes]] = {}  # by node, before its order

    def use(self, endpoint: Endpoint) -> None:
        """Take an endpoint, whose `on_link` is this worker's."""
        self._endpoint = endpoint
        host, port = endpoint.address[:2]
        self._tell(LaneOpened(str(host), int(port)))

    def on_link(self, link: Link) -> None:
        """Take a link that another lane has made."""
        link.listen(self._app, self._state)

    def obey(self, order: LaneOrder) -> None:
        """Carry an order out. Those of its process alone (OpenLane, RenewLane) are that one's affair."""
        match order:
            case LaneSend():
                self._send(order)
            case LaneReceive():
                self._receive(order)
            case LaneCancel():
                self._cancel(order.number)
            case LanePing():
                self._tell(LanePong())
            case LaneView():
                self._gather(order)
            case JoinLane():
                self._join(order)
            case PartLanes():
                pair = self._pairs.get(order.node)
                if pair is not None and order.view_id == self._view:
                    self._end(pair)
            case DenyLane():
                self._at_endpoint(lambda endpoint: endpoint.deny(order.fingerprint))
            case LaneIncarnation():
                self._at_endpoint(lambda endpoint: endpoint.start_over(order.incarnation))
                self._end_links("starts over as a later process")
            case LaneDeadlines():
                self._at_endpoint(
                    lambda endpoint: endpoint.set_deadlines(lost_after_ns=order.lost_ns, connect_ns=order.connect_ns)
                )
                self._end_links("takes other deadlines")

    def _at_endpoint(self, do: Callable[[Endpoint], None]) -> None:
        if self._endpoint is not None:
            do(self._endpoint)

    def _end_links(self, reason: str) -> None:
        for link in list(self._endpoint.links.values() if self._endpoint is not None else ()):
            link.close(reason)

    # -- pairs ---------------------------------------------------------------------------------------------------

    def _gather(self, order: LaneView) -> None:
        for pair in self._pairs.values():
            self._end(pair)
        self._pairs.clear()
        old, self._view = self._view, order.view_id
        for link in list(self._endpoint.links.values() if self._endpoint is not None else ()):
            if link.node not in order.nodes:
                link.close("its node is not in the view")
            elif old:
                link.discard(old.to_bytes(8, "big"))

    def _join(self, order: JoinLane) -> None:
        if order.view_id != self._view or order.node in self._pairs or self._endpoint is None:
            return
        identity = Identity(self._job, WORKER, order.node)
        existing = self._endpoint.links.get(identity)
        if existing is not None and existing.remote_incarnation not in (0, order.incarnation):
            existing.close("the node has started anew")
        try:
            addresses = ((order.host, order.port),) if order.dials else ()
            link = self._endpoint.link(identity, addresses=addresses, dial=order.dials)
            pair = self._pairs[order.node] = _Pair(order.node, link, order.expects)
            link.listen(self._app, self._state)
            link.send_app(_SHOWN.pack(order.view_id, order.shows))
        except TransportError as error:
            self._tell(LaneApart(order.view_id, order.node, str(error)[:_MAX_WHY]))
            return
        view_id, mark = self._shown.pop(order.node, (0, b""))
        if view_id == self._view:
            self._look(pair, mark)

    def _app(self, link: Link, data: bytes) -> None:
        if len(data) != _SHOWN.size:
            link.close("a lane says nothing of this size")
            return
        view_id, mark = _SHOWN.unpack(data)
        pair = self._pairs.get(link.node)
        if view_id == self._view and pair is not None and pair.link is link:
            self._look(pair, mark)
        elif view_id >= self._view:
            self._shown[link.node] = view_id, mark

    def _look(self, pair: _Pair, mark: bytes) -> None:
        if pair.proved or pair.over:
            return
        if not hmac.compare_digest(mark, pair.expects):
            self._fail(pair, "it has not shown what it was told")
            return
        pair.proved = True
        self._tell(LanePaired(self._view, pair.node))
        pair.link.later(self._begin_waiting, pair)  # not in the middle of what is being taken in

    def _begin_waiting(self, pair: _Pair) -> None:
        waiting, pair.waiting = pair.waiting, []
        for order in waiting:
            self._receive(order)

    def _state(self, link: Link) -> None:
        if link.ended:
            self._shown.pop(link.node, None)
            pair = self._pairs.get(link.node)
            if pair is not None and pair.link is link:
                self._fail(pair, link.cause)

    def _fail(self, pair: _Pair, why: str) -> None:
        if not pair.over:
            self._tell(LaneApart(self._view, pair.node, why[:_MAX_WHY]))  # first: what is over now is because of it
            self._end(pair)

    def _end(self, pair: _Pair) -> None:
        pair.over = True
        waiting, pair.waiting = pair.waiting, []
        uses, pair.uses = pair.uses, {}
        for transfer in uses.values():
            transfer.abort()
        for number in (*(order.number for order in waiting), *uses):
            self._tell(LaneOver(number, False))

    # -- uses ----------------------------------------------------------------------------------------------------

    def _pair_of(self, order: LaneSend | LaneReceive) -> _Pair | None:
        pair = self._pairs.get(order.node)
        return None if pair is None or pair.over or order.view_id != self._view else pair

    def _send(self, order: LaneSend) -> None:
        pair = self._pair_of(order)
        if pair is None or not pair.proved:
            self._tell(LaneOver(order.number, False))
            return
        tag = _TAG.pack(order.view_id, order.number, 0)
        payload = self._memory.place(order.slot, order.nbytes)
        self._begin(pair, order.number, lambda heard: pair.link.send(tag, payload, heard))

    def _receive(self, order: LaneReceive) -> None:
        pair = self._pair_of(order)
        if pair is None:
            self._tell(LaneOver(order.number, False))
        elif not pair.proved:
            pair.waiting.append(order)
        else:
            tag = _TAG.pack(order.view_id, order.sent, 0)
            target = self._memory.place(order.slot, order.nbytes)
            self._begin(pair, order.number, lambda heard: pair.link.post(tag, target, heard))

    def _begin(self, pair: _Pair, number: int, start: Callable[[Callable[[Transfer], None]], Transfer]) -> None:
        try:
            pair.uses[number] = start(partial(self._done, pair, number))
        except TransportError as error:
            self._fail(pair, str(error))
            self._tell(LaneOver(number, False))

    def _done(self, pair: _Pair, number: int, transfer: Transfer) -> None:
        if pair.uses.pop(number, None) is not None:
            if transfer.error is not None:
                self._fail(pair, str(transfer.error))
            self._tell(LaneOver(number, transfer.error is None))

    def _cancel(self, number: int) -> None:
        for pair in self._pairs.values():
            transfer = pair.uses.pop(number, None)
            if transfer is not None:
                transfer.abort()
                self._tell(LaneOver(number, False))
                return
            for order in pair.waiting:
                if order.number == number:
                    pair.waiting.remove(order)
                    self._tell(LaneOver(number, False))
                    return
