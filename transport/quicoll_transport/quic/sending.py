"""What goes into the next packet, and which packets go now.

In this order, again and again until nothing may go:

    probes of paths     a challenge or a response, alone in a datagram of 1200 bytes to the path that it is about
    a probe of the MTU  when there is something to send; the window is kept free for it, once it is twice as large
    packets             ACK, control frames, urgent streams, small streams, lost pieces of bulk; several in one packet
    a run               of the oldest bulk stream: packets of one size that carry nothing but its bytes
    parity              of what was sent lately, once nothing else is to be sent (`protection`)

After `_SMALL` packets of small streams a run goes, so that small ones without end do not starve bulk.

Who may send, and when:

    ACK alone                        always; it is not congestion-controlled (RFC 9002 section 7)
    control, urgent                  while the window has room for it; not paced, for they are few bytes
    small, bulk, parity              while the window has room beyond a reserve that is kept for the two above, and the
                                     pacer lets
    what a probe timeout asks for    always (section 6.2.4)

Nothing goes to an address beyond three times what came from it, before it is validated (`Path.room`). Runs wait until
the window has room for enough packets to be worth one: the acknowledgement that makes room is on its way.

Memory. Runs are made in `_slab`, which is written anew by each `datagrams`: what it returned before is void then. A
record of what is in flight names streams and offsets, never memory, so a stream that is reset is let go of at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from quicoll_transport.net.runs import DatagramRun
from quicoll_transport.quic.control import Saying
from quicoll_transport.quic.frames import (
    PROTOCOL_VIOLATION,
    AckFrame,
    FairRateFrame,
    FrameError,
    PathChallengeFrame,
    PathResponseFrame,
    StampFrame,
    stream_head,
)
from quicoll_transport.quic.mtu import LEAST_DATAGRAM_BYTES, PathMtu
from quicoll_transport.quic.packets import NUMBER, TAG, Slab, seal, seal_run
from quicoll_transport.quic.protection import LEAST_RTT_NS
from quicoll_transport.quic.records import Carried, SentControl, SentNumbers, SentParity, SentStripe
from quicoll_transport.quic.recovery import LossRecovery, PacketRun
from quicoll_transport.quic.varint import varint, varint_size

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.quic.acknowledgements import Acknowledgements
    from quicoll_transport.quic.arrival_line import ArrivalShare, FairRate
    from quicoll_transport.quic.closing import ConnectionEnd
    from quicoll_transport.quic.connection_ids import OwnIds, PeerIds
    from quicoll_transport.quic.control import ControlFrames
    from quicoll_transport.quic.controller import Controller
    from quicoll_transport.quic.keys import KeyPhases
    from quicoll_transport.quic.outbound import OutboundStreams
    from quicoll_transport.quic.pacer import Pacer
    from quicoll_transport.quic.paths import Path, Paths
    from quicoll_transport.quic.protection import TailProtection
    from quicoll_transport.quic.streams import SendStream
    from quicoll_transport.quic.tracing import PlaneTrace

__all__ = ["Sender"]

_SLAB = 1280 << 10  # bytes of runs in one turn: what a turn of the loop costs is shared by many packets,
_SMALL_SLAB = 256 << 10  # or so many until the window is
_TURNS = 4  # times as large: with fewer under way, senders and receivers would take turns
_GROUP = 64  # datagrams in one system call with GSO,
_GROUP_BYTES = 65507  # and their bytes
_BULK = 6  # packets of one stream from which on they are made as a run,
_BULK_BYTES = 32 * 1024  # or so many bytes
_SMALL = 16
_FLOOR = 256  # bytes of room in the window for which a packet of control frames is worth while
_HEADROOM = 40  # bytes in a packet below which no STREAM frame is begun
_STAMP_ROOM = _HEADROOM + 10  # bytes in a packet below which it has no stamp
_LEAST_TEXT = 4  # so that there is a sample, whatever the length of a packet number (RFC 9001 section 5.4.2)


class Sender:
    """See the module's head. number: of the next packet. last: the last words as they were sent, and to where."""

    def __init__(
        self,
        *,
        keys: KeyPhases,
        acknowledgements: Acknowledgements,
        own_ids: OwnIds,
        peer_ids: PeerIds,
        paths: Paths,
        outbound: OutboundStreams,
        control: ControlFrames,
        recovery: LossRecovery[Carried],
        pacer: Pacer,
        mtu: PathMtu,
        ending: ConnectionEnd,
        ack_delay_exponent: int,
        stamps_since_ns: int | None,
        arrivals: ArrivalShare | None,
        protection: TailProtection | None,
        trace: PlaneTrace | None,
    ) -> None:
        """ack_delay_exponent: the peer's. stamps_since_ns: when the clock begins by which the peer is told when ACKs
        are sent; None: it is not told. arrivals: what comes of the peer, and what it is allotted; None: it is not told.
        protection: None: no parity. trace: None: nobody traces."""
        self._trace = trace
        self.number = 0
        self.last: tuple[bytes, Address] | None = None
        self.recovery = recovery
        self._keys = keys
        self._acknowledgements = acknowledgements
        self._own_ids = own_ids
        self._peer_ids = peer_ids
        self._paths = paths
        self._outbound = outbound
        self._control = control
        self._pacer = pacer
        self.mtu = mtu
        self._ending = ending
        self._protection = protection
        self._delay_shift = ack_delay_exponent
        self._stamps_since_ns = stamps_since_ns
        self._arrivals = arrivals
        self._slab = Slab(bytearray(0))
        self._used = 0  # bytes of the slab
        self._probes = 0  # packets that a probe timeout asks for
        self._more_ns: int | None = None  # the slab was full: look again at once
        self._small = 0  # packets of small streams since the last run of this turn
        self._head = 0  # bytes of a packet before its frames, in this turn

    @property
    def probe_timeout_ns(self) -> int:
        return self.recovery.rtt.probe_timeout_ns

    # -- what came back ------------------------------------------------------------------------------------------

    def on_ack(
        self,
        frame: AckFrame,
        now_ns: int,
        arrived_ns: int,
        stamp_ns: int | None = None,
        fair_rate: FairRate | None = None,
    ) -> None:
        """Take an ACK frame that came to this host at `arrived_ns`.

        stamp_ns: when it was sent, by the peer's clock. fair_rate: what the peer lets us send. None: it does not say.

        Raises FrameError when it acknowledges what was never sent.
        """
        largest = frame.ranges[0][1] - 1
        if largest >= self.number:
            raise FrameError(PROTOCOL_VIOLATION, "an acknowledgement of what was never sent")  # RFC 9000 section 13.1
        delay_ns = min(frame.delay << self._delay_shift, 1 << 40) * 1000
        self._keys.on_acknowledged(largest)
        outcome = self.recovery.on_ack(frame.ranges, delay_ns, now_ns, arrived_ns, stamp_ns, fair_rate)
        if self._trace is not None:
            self._trace.metrics(self.recovery)
        self._arrived(outcome.acked, now_ns)
        self._lost(outcome.lost, now_ns)

    def on_timeout(self, now_ns: int) -> None:
        """Do what is due for what is in flight."""
        outcome = self.recovery.on_timeout(now_ns)
        self._lost(outcome.lost, now_ns)
        self._probes = max(self._probes, outcome.probes)
        self._again(outcome.again)

    def _arrived(self, pieces: Iterable[tuple[PacketRun[Carried], int, int]], now_ns: int) -> None:
        for run, first, end in pieces:
            # Not the size of the run: its last packet may be short, and pass where all others vanish.
            self.mtu.on_acked(run.largest(first, end), run.sent_ns)
            if run.is_mtu_probe:
                self.mtu.on_probe_acked(run.size, now_ns)
                self._use_size()
            for item in run.items:
                if isinstance(item, SentStripe):
                    start, stop, fin = item.part(run, first, end)
                    self._outbound.on_acked(item.stream, start, stop, fin=fin)
                elif isinstance(item, SentNumbers):
                    self._acknowledgements.acknowledged(item.told)
                elif isinstance(item, SentParity):
                    self._parity_settled(item)
                else:
                    for kind, about in item.keys:
                        if kind is Saying.RETIRE_CONNECTION_ID:
                            self._peer_ids.on_acked(about)
                        elif kind is Saying.RESET_STREAM:
                            self._outbound.on_reset_acked(about)

    def _lost(self, pieces: Iterable[tuple[PacketRun[Carried], int, int]], now_ns: int) -> None:
        for run, first, end in pieces:
            if run.is_mtu_probe:
                self.mtu.on_probe_lost(run.size, now_ns)
            elif self.mtu.on_lost(run.largest(first, end), run.sent_ns, now_ns):
                self._use_size()
        if self._protection is not None:
            self._protection.loss.on_burst(_bursts(pieces))
        self._again(pieces, may_be_repaired=True)

    def _use_size(self) -> None:
        """Datagrams are of another size from now on."""
        self.recovery.controller.on_datagram_size(self.mtu.size)
        self._pacer.on_datagram_size(self.mtu.size)

    def limit_datagrams(self, most: int) -> None:
        """Take the news that nothing above `most` bytes passes."""
        if self.mtu.limit(most):
            self._use_size()

    def begin_path(self, controller: Controller, mtu: PathMtu, *, rtt_ns: int) -> None:
        """Send by another path from now on, of which nothing is known (RFC 9000 section 9.4)."""
        self.mtu = mtu
        self.recovery.on_new_path(controller, rtt_ns=rtt_ns)
        self._pacer.on_datagram_size(mtu.size)

    def _again(
        self, pieces: Iterable[tuple[PacketRun[Carried], int, int]], *, may_be_repaired: bool = False
    ) -> None:  # fmt: skip
        """Let what packets carried be sent again; that is held of which the peer may make the rest from parity."""
        protection = self._protection if may_be_repaired else None
        for run, first, end in pieces:
            for item in run.items:
                if isinstance(item, SentStripe):
                    start, stop, fin = item.part(run, first, end)
                    if protection is None or not protection.hold(item.stream, start, stop, fin=fin):
                        self._outbound.on_lost(item.stream, start, stop, fin=fin)
                elif isinstance(item, SentParity):
                    if may_be_repaired:
                        self._parity_settled(item)
                elif isinstance(item, SentControl):
                    for kind, about in item.keys:
                        if kind is not Saying.PING:
                            self._control.want(kind, about)

    # -- what goes out -------------------------------------------------------------------------------------------

    def datagrams(self, now_ns: int) -> list[DatagramRun]:
        """Return what may be sent now, in order; good until the next call."""
        self._used, self._more_ns = 0, None
        self._pacer.begin_turn()
        if not self._ending.is_open:
            return self._last_words()
        keys, outbound, protection = self._keys, self._outbound, self._protection
        if protection is not None and protection.is_going:
            protection.let_go()
        if self._own_ids.news or self._peer_ids.news:
            self._tell_ids()
        if keys.is_due:
            keys.update()
        self._begin_turn()
        out: list[DatagramRun] = []
        if self._paths.has_probe(now_ns):
            self._send_path_probes(out, now_ns)
        if outbound.has_any() and (probe := self._mtu_probe(now_ns)) is not None:
            out.append(probe)
        while keys.room and self._is_waiting(now_ns):
            bulk = outbound.oldest_bulk()
            packet = None if bulk and self._small >= _SMALL else self._packet(now_ns)
            if packet is None and bulk:
                packet = self._burst(now_ns) or (self._packet(now_ns) if self._small >= _SMALL else None)
                self._small = 0
            if packet is None:
                break
            out.append(packet)
        waits = protection is not None and self._protect(protection, out, now_ns)
        if outbound.oldest_bulk() is None and self.recovery.room and not waits:
            self.recovery.on_app_limited()
        return out

    def _begin_turn(self) -> None:
        size = self.mtu.size
        self._small = 0
        self._head = 1 + len(self._peer_ids.current) + NUMBER
        self._outbound.bulk_bytes = _BULK * size if _BULK * size < _BULK_BYTES else _BULK_BYTES

    def _is_waiting(self, now_ns: int) -> bool:
        """Return whether there is anything to send, if it may go."""
        due_ns = self._acknowledgements.due_ns
        return bool(
            self._outbound.has_any() or self._control or self._probes or (due_ns is not None and due_ns <= now_ns)
        )

    def next_timer(self) -> int | None:
        """Return when `datagrams` may have more, or something in flight needs to be looked at."""
        due = self.recovery.deadline()
        if self._paths.current.room < self._head + TAG + _HEADROOM:
            return due  # nothing may go there until more comes from there
        for at in (self._acknowledgements.due_ns, self._pacer.due_ns, self._more_ns):
            if at is not None and (due is None or at < due):
                due = at
        return due

    def _tell_ids(self) -> None:
        for ids, kind in ((self._own_ids, Saying.NEW_CONNECTION_ID), (self._peer_ids, Saying.RETIRE_CONNECTION_ID)):
            for number in ids.news:
                self._control.want(kind, number)
            ids.news.clear()

    # -- one packet ----------------------------------------------------------------------------------------------

    def _reserve(self, now_ns: int) -> int:
        """Return how many bytes of the window are not for small streams and bulk.

        A part is for control frames and urgent streams only; and a probe of the MTU needs its whole size.
        """
        window, size = self.recovery.controller.window, self.mtu.size
        reserve = min(window // 16, 2 * size) if window >= 8 * size else 0
        probe = self.mtu.probe_size(now_ns) or 0
        return reserve + probe if window >= 2 * probe else reserve

    def _packet(self, now_ns: int) -> DatagramRun | None:
        """Return one packet of whatever is due, bar what goes as runs."""
        outbound, acknowledgements = self._outbound, self._acknowledgements
        path, probes = self._paths.current, self._probes
        size, most = LEAST_DATAGRAM_BYTES if probes else self.mtu.size, path.room
        size = size if size < most else most
        data = accompanied = probes > 0
        if not probes:
            window = self.recovery.room
            if (outbound.has_small() or self._has_scraps()) and window >= size + self._reserve(now_ns):
                data = self._allowance(size, now_ns) >= size
            vital = (self._control or outbound.has_urgent()) and window >= min(_FLOOR, size)
            accompanied = bool(data or vital)
            if accompanied and window < size:
                size = window
        with_ack = acknowledgements.is_due(now_ns, accompanied=accompanied)
        if not (accompanied or with_ack):
            return None
        room = size - self._head - TAG
        if room < _HEADROOM:
            return None
        parts: list[bytes | memoryview] = []
        items: list[Carried] = []
        if with_ack:
            if self._stamps_since_ns is not None and room >= _STAMP_ROOM:
                stamp = StampFrame((now_ns - self._stamps_since_ns) // 1000).encode()
                parts.append(stamp)  # before the ACK, which it is about
                room -= len(stamp)
            if self._arrivals is not None and room >= _STAMP_ROOM:
                fair_rate = self._arrivals.fair_rate(now_ns)
                if fair_rate is not None:
                    told_rate = FairRateFrame(fair_rate.rate, fair_rate.is_full).encode()
                    parts.append(told_rate)
                    room -= len(told_rate)
            frame, told = acknowledgements.frame(now_ns, room)
            parts.append(frame)
            items.append(SentNumbers(told))
            room -= len(frame)
        before = len(parts)
        if accompanied:
            if self._control:
                keys, room = self._control.fill(parts, room)
                if keys:
                    items.append(SentControl(keys))
            self._fill_streams(parts, items, room, now_ns, everything=data)
        eliciting = len(parts) > before
        ask = probes or (with_ack and acknowledgements.wants_answer(accompanied=eliciting))
        if not eliciting and ask:
            parts.append(b"\x01")
            eliciting = True
        if not parts:
            return None
        if probes:
            self._probes -= 1
        return self._seal(path, b"".join(parts), tuple(items), now_ns, eliciting=eliciting)

    def _seal(
        self, path: Path, payload: bytes, items: tuple[Carried, ...], now_ns: int, *, eliciting: bool,
        is_mtu_probe: bool = False,
    ) -> DatagramRun:  # fmt: skip
        number = self.number
        if len(payload) < _LEAST_TEXT:
            payload = payload.ljust(_LEAST_TEXT, b"\0")
        packet = seal(self._keys.send, self._peer_ids.of(path.ids), number, payload)
        self.number = number + 1
        size = len(packet)
        path.sent += size
        if self._trace is not None:
            self._trace.packet_sent(number, size, payload)
        if eliciting:
            self.recovery.on_sent(PacketRun(number, number + 1, size, 0, now_ns, items, is_mtu_probe=is_mtu_probe))
            self._pacer.spend(size)
            self._ending.asked(now_ns)
        return DatagramRun(memoryview(packet), size, path.address)

    def _has_scraps(self) -> bool:
        """Return whether the oldest bulk stream has a piece that is too short for a run."""
        outbound = self._outbound
        stream = outbound.oldest_bulk()
        if stream is None:
            return False
        start, stop = outbound.next_piece(stream, outbound.bulk_bytes)
        return 0 < stop - start < outbound.bulk_bytes

    def _fill_streams(
        self, parts: list[bytes | memoryview], items: list[Carried], room: int, now_ns: int, *, everything: bool
    ) -> None:
        """Add STREAM frames; only urgent ones, or small ones and scraps of bulk too."""
        for stream in self._outbound.small():
            if room < _HEADROOM or not (everything or stream.urgent):
                return
            room = self._fill_stream(stream, parts, items, room, now_ns)
            self._small += not stream.urgent
        bulk = self._outbound.oldest_bulk()
        if everything and bulk is not None and room >= _HEADROOM and self._has_scraps():
            self._fill_stream(bulk, parts, items, room, now_ns)

    def _fill_stream(
        self, stream: SendStream, parts: list[bytes | memoryview], items: list[Carried], room: int, now_ns: int
    ) -> int:
        """Add pieces of one stream while there is room; return what is left of it."""
        outbound = self._outbound
        while room >= _HEADROOM and stream.has_more():
            start, stop = outbound.next_piece(stream, room)
            space = room - 1 - varint_size(stream.id) - (varint_size(start) if start else 0)
            length = varint_size(room)
            fills = stop - start >= space - length
            stop = min(stop, start + space - (0 if fills else length))
            fin = stream.fin and stop == stream.length
            if stop <= start and not (fin and (stream.fin_lost or not stream.fin_sent)):
                outbound.look_again(stream)
                return room
            head = stream_head(stream.id, start, None if fills else stop - start, fin=fin)
            parts.append(head)
            if stop > start:
                parts.append(stream.read(start, stop))
            items.append(SentStripe(stream, start, 0, stop, fin))
            if self._protection is not None and not stream.urgent:
                self._note_tail(self._protection, stream, start, stop, now_ns)
            room = 0 if fills else room - len(head) - (stop - start)
            outbound.sent(stream, start, stop, fin=fin)
        return room

    def _allowance(self, wanted: int, now_ns: int) -> int:
        """Return how many of the bytes that the window has room for the pacer lets go now."""
        controller = self.recovery.controller
        rate = controller.rate(self.recovery.rtt.smoothed_ns)
        return self._pacer.allowance(rate, wanted, now_ns, controller.arrears_ns)

    # -- runs ----------------------------------------------------------------------------------------------------

    def _burst(self, now_ns: int) -> DatagramRun | None:
        """Return a run of packets of the oldest bulk stream, if it is worth one now."""
        outbound, recovery, path = self._outbound, self.recovery, self._paths.current
        while (stream := outbound.oldest_bulk()) is not None:
            start, stop = outbound.next_piece(stream, 1)
            if stop > start:
                break
            outbound.look_again(stream)
        if stream is None:
            return None
        size = self.mtu.size
        slots = self._room_for_runs(size).slots(size, self._head)
        together = max(1, min(_GROUP, _GROUP_BYTES // size))
        base = -(-self._used // size)
        count = slots.count // together * together - base
        room = min((recovery.room - self._reserve(now_ns)) // size, path.room // size, self._keys.room)
        prefix = varint(stream.id)
        step = size - self._head - 9 - len(prefix) - TAG
        if room <= 0 or self._has_scraps():
            return None
        if count <= 0:
            self._more_ns = now_ns
            return None
        count = min(count, room)
        start, stop = outbound.next_piece(stream, count * step)
        left = -(-(min(stream.length, stream.limit) - start) // step) if not stream.lost else 0
        if base and count < min(left, room) <= slots.count:  # whole in the next turn
            self._more_ns = now_ns
            return None
        if room < min(left, slots.count, recovery.controller.window // 8 // size):  # more will come, and go together
            return None
        wanted = -(-(stop - start) // step)
        allowed = self._allowance(wanted * size, now_ns) // size
        if not allowed:
            return None
        stop = min(stop, start + allowed * step)
        fin = stream.fin and stop == stream.length
        first, pieces = self.number, stream.pieces(start, stop)
        packets, made = seal_run(
            slots, base, self._keys.send, self._peer_ids.current, first, prefix, start, pieces, fin
        )
        self.number += packets
        item = SentStripe(stream, start, step, stop, fin)
        run: PacketRun[Carried] = PacketRun(first, first + packets, size, packets * size - made, now_ns, (item,))
        recovery.on_sent(run)
        if self._trace is not None:
            self._trace.run_sent(run, item)
        self._pacer.spend(made)
        self._ending.asked(now_ns)
        path.sent += made
        outbound.sent(stream, start, stop, fin=fin)
        if self._protection is not None:
            self._note_tail(self._protection, stream, start, stop, now_ns)
        begin = base * size
        self._used = (base + packets) * size
        return DatagramRun(self._slab.memory[begin : begin + made], size, path.address)

    def _room_for_runs(self, size: int) -> Slab:
        """Return the slab, as large as the window deserves."""
        wanted = _SLAB if self.recovery.controller.window >= _TURNS * _SLAB else max(_SMALL_SLAB, 4 * size)
        if len(self._slab.memory) < wanted:
            self._slab, self._used = Slab(bytearray(wanted)), 0  # runs of this turn keep the old one alive
        return self._slab

    # -- parity --------------------------------------------------------------------------------------------------

    def _note_tail(self, protection: TailProtection, stream: SendStream, start: int, stop: int, now_ns: int) -> None:
        """Remember bytes that leave now, if anything may come to be protected on this path."""
        rtt = self.recovery.rtt
        if rtt.min_ns is not None and rtt.min_ns >= LEAST_RTT_NS:
            protection.on_sent(stream, start, stop, rtt.smoothed_ns, now_ns)

    def _protect(self, protection: TailProtection, out: list[DatagramRun], now_ns: int) -> bool:
        """Send parity of what was sent lately, if nothing else is to be sent; return whether more of it waits."""
        recovery, path, size = self.recovery, self._paths.current, self.mtu.size
        most = size - self._head - TAG
        if protection.has_tail and not self._outbound.has_any():
            protection.loss.look(self.number, recovery.lost_packets - recovery.spurious_packets)
            protection.close(most - 9, most, now_ns)
        waiting = protection.waiting(recovery.rtt.smoothed_ns, now_ns) if protection.is_going else 0
        if not waiting:
            return False
        room = min((recovery.room - self._reserve(now_ns)) // size, path.room // size, self._keys.room, waiting)
        if room <= 0:
            return True
        for _ in range(self._allowance(room * size, now_ns) // size):
            packet = protection.next_packet(most)
            if packet is None:
                return False
            frame, set_id, place = packet
            out.append(self._seal(path, frame, (SentParity(set_id, place),), now_ns, eliciting=True))
            waiting -= 1
        return waiting > 0

    def _parity_settled(self, item: SentParity) -> None:
        if self._protection is not None:
            self._protection.on_settled(item.set_id, item.place)

    # -- probes and the end ----------------------------------------------------------------------------------------

    def _send_path_probes(self, out: list[DatagramRun], now_ns: int) -> None:
        for path, challenge, response in self._paths.probes(now_ns, self.probe_timeout_ns):
            payload = b""
            if response is not None:
                payload += PathResponseFrame(response).encode()
                if path is self._paths.current:
                    payload += b"\x01"  # no mere probe: it says that we are here (RFC 9000 section 9.3.3)
            if challenge is not None:
                payload += PathChallengeFrame(challenge).encode()
            head = 1 + len(self._peer_ids.of(path.ids)) + NUMBER
            size = min(LEAST_DATAGRAM_BYTES, path.room) - head - TAG
            if size >= len(payload):
                out.append(self._seal(path, payload.ljust(size, b"\0"), (), now_ns, eliciting=True))

    def _mtu_probe(self, now_ns: int) -> DatagramRun | None:
        """Return a probe of the path's MTU, if one is due and may go; asked when there is something to send anyway."""
        size, path = self.mtu.probe_size(now_ns), self._paths.current
        if size is None or not path.passes or self.recovery.room < size or not self._keys.room:
            return None
        self.mtu.on_probe_sent(size)
        payload = b"\x01".ljust(size - self._head - TAG, b"\0")
        return self._seal(path, payload, (), now_ns, eliciting=True, is_mtu_probe=True)

    def _last_words(self) -> list[DatagramRun]:
        path = self._paths.current
        words = self._ending.last_words()
        if not words or path.room < LEAST_DATAGRAM_BYTES:
            return []
        packet = seal(self._keys.send, self._peer_ids.current, self.number, words.ljust(_LEAST_TEXT, b"\0"))
        self.number += 1
        path.sent += len(packet)
        self.last = (packet, path.address)
        return [DatagramRun(memoryview(packet), len(packet), path.address)]


def _bursts(pieces: Iterable[tuple[PacketRun[Carried], int, int]]) -> int:
    """Return how many times something was lost: packets with numbers one behind the other were lost at once."""
    count, end = 0, -1
    for _, first, stop in pieces:
        count += first != end
        end = stop
    return count
