"""From datagrams to frames to the parts that they are for.

A run of datagrams is opened in place as far as its packets are alike, and rows that carry consecutive pieces of one
stream go to it as one table; whatever else comes goes one by one. Both ways decide the same: packets are taken in the
order in which they came, each new one once, and what is noted of them (`Acknowledgements.note`) does not depend on how
they were grouped.

The order of things for one packet, and why:

    opened          what is forged changes nothing but a count (RFC 9001 section 6.6); a stateless reset looks like that
    is it new       a duplicate is not even heard (RFC 9000 section 12.3)
    its frames      in their order; the first wrong one ends the connection, what stood before it has happened
    noted           to be acknowledged, only now: what was not taken must not be (section 13.1)
    its path        the newest packet that is no probe says where the peer is (section 9.3)

Failure cases: FrameError and PacketError, what the peer got wrong: whoever calls closes with their code. ProtocolError,
from the reader of a stream, is passed on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quicoll_transport.quic import frames as quic
from quicoll_transport.quic.arrival_line import FairRate
from quicoll_transport.quic.frame_reader import read_frames
from quicoll_transport.quic.frames import FRAME_ENCODING_ERROR, PROTOCOL_VIOLATION, FrameError, asks_for_acknowledgement
from quicoll_transport.quic.packets import Slabs, open_packet, open_run
from quicoll_transport.quic.repairs import LEAST_KEPT_NS, Repairs
from quicoll_transport.quic.varint import pull

if TYPE_CHECKING:
    from quicoll_transport.net.runs import DatagramRun
    from quicoll_transport.quic.acknowledgements import Acknowledgements
    from quicoll_transport.quic.arrival_line import ArrivalShare
    from quicoll_transport.quic.closing import ConnectionEnd
    from quicoll_transport.quic.connection_ids import OwnIds, PeerIds
    from quicoll_transport.quic.inbound import InboundStreams
    from quicoll_transport.quic.keys import KeyPhases
    from quicoll_transport.quic.outbound import OutboundStreams
    from quicoll_transport.quic.paths import Path, Paths
    from quicoll_transport.quic.protection import TailProtection
    from quicoll_transport.quic.sending import Sender
    from quicoll_transport.quic.streams import Rows
    from quicoll_transport.quic.tracing import PlaneTrace

__all__ = ["Receiver"]

_RUN = 2  # packets from which on a run is opened as one,
_MOST_RUN = 256  # and up to which
_LEAST_ALONE, _MOST_ALONE = 8, 64  # packets that are opened one by one where a run turned out to be none
_STREAM_ALIKE = 0x0C  # a STREAM frame with an offset and without a length, whatever its FIN bit
_MOST_OFFSET = (1 << 62) - 1


class Receiver:
    """See the module's head. confirmed: whether the handshake is (RFC 9001 section 4.1.2). heard_ns: when last."""

    def __init__(
        self,
        *,
        is_client: bool,
        keys: KeyPhases,
        acknowledgements: Acknowledgements,
        own_ids: OwnIds,
        peer_ids: PeerIds,
        paths: Paths,
        inbound: InboundStreams,
        outbound: OutboundStreams,
        sender: Sender,
        ending: ConnectionEnd,
        follow_paths: Callable[[], None],
        protection: TailProtection | None,
        repairs: Repairs | None,
        takes_stamps: bool,
        takes_fair_rates: bool,
        arrivals: ArrivalShare | None,
        trace: PlaneTrace | None,
    ) -> None:
        """Begin with what the plane is made of.

        follow_paths: called with each packet that has changed what `paths` says. takes_stamps, takes_fair_rates:
        whether the peer was asked for them. arrivals: is told what comes of the peer; None: nobody is. protection,
        repairs: None: no parity was agreed on. trace: None: nobody traces.
        """
        self._trace = trace
        self.confirmed = not is_client
        self.heard_ns: int | None = None
        self._is_client = is_client
        self._keys = keys
        self._acknowledgements = acknowledgements
        self._own_ids = own_ids
        self._peer_ids = peer_ids
        self._paths = paths
        self._inbound = inbound
        self._outbound = outbound
        self._sender = sender
        self._ending = ending
        self._follow_paths = follow_paths
        self._repairs = repairs
        self._takes_stamps, self._takes_fair_rates = takes_stamps, takes_fair_rates
        self._arrivals = arrivals
        self._slabs = Slabs()
        self._now_ns = self._arrived_ns = 0  # when the packets that are being looked at came to this host
        self._path: Path = paths.current  # of the packet whose frames are being looked at, and the id that it was for
        self._cid = b""
        # of the packet whose frames are being looked at, if it has them
        self._stamp_ns: int | None = None
        self._fair_rate: FairRate | None = None
        self._take: dict[type, Callable[..., None]] = {
            quic.StreamFrame: self._on_stream,
            quic.AckFrame: self._on_ack,
            quic.StampFrame: self._on_stamp,
            quic.FairRateFrame: self._on_fair_rate,
            quic.MaxDataFrame: lambda frame: outbound.on_max_data(frame.limit),
            quic.MaxStreamDataFrame: outbound.on_max_stream_data,
            quic.MaxStreamsFrame: outbound.on_max_streams,
            quic.StopSendingFrame: outbound.on_stop_sending,
            quic.ResetStreamFrame: inbound.on_reset,
            quic.StreamDataBlockedFrame: lambda frame: inbound.on_blocked(frame.stream_id),
            quic.NewConnectionIdFrame: peer_ids.add,
            quic.RetireConnectionIdFrame: lambda frame: own_ids.retire(frame.sequence, self._cid),
            quic.PathChallengeFrame: lambda frame: paths.on_challenge(self._path, frame.data),
            quic.PathResponseFrame: self._on_path_response,
            quic.HandshakeDoneFrame: self._on_handshake_done,
            quic.NewTokenFrame: self._on_new_token,
            quic.CloseFrame: ending.on_close,
            quic.ProtectedFrame: _refuse if repairs is None else repairs.on_protected,
            quic.ParityFrame: _refuse if repairs is None else repairs.on_parity,
            quic.RepairedFrame: _refuse if protection is None else lambda frame: protection.on_repaired(frame.set_id),
        }

    def receive(self, run: DatagramRun, now_ns: int) -> None:
        """Take a run of datagrams, each of one short-header packet; opened in place.

        Raises:
            FrameError: The peer broke the rules of QUIC. What follows in the run is not looked at.
            PacketError: Likewise.
            ProtocolError: The reader of a stream cannot take what came.
        """
        if not self._paths.accepts(run.address):
            return
        self._now_ns, self._arrived_ns = now_ns, now_ns - run.waited_ns
        if len(run.memory) <= run.size:
            if self._ending.is_open:
                self._receive_one(run.memory, run.address)
            return
        at, count, size = 0, len(run.memory) // run.size, run.size
        known = run.address == self._paths.current.address
        alone, pause = 0, _LEAST_ALONE  # up to where packets are opened one by one, and for how many the next time
        look = _MOST_RUN
        while at < count and self._ending.is_open:
            done, together = 0, min(count - at, look)
            is_run = known and at >= alone and together >= _RUN
            if is_run and self._acknowledgements.has_place(together):
                done = self._receive_alike(run.memory[at * size : (at + together) * size], size)
                # Each look at a run costs as much as all of its packets, even if it turns out that one alone is taken.
                look = min(2 * look, _MOST_RUN) if done == together else max(2 * _RUN, 2 * done)
                if done >= _RUN:
                    pause = _LEAST_ALONE
                else:
                    alone, pause = at + done + pause, min(2 * pause, _MOST_ALONE)
            if not done:
                self._receive_one(run.memory[at * size : (at + 1) * size], run.address)
                done = 1
            at += done
        if (rest := run.memory[count * size :]) and self._ending.is_open:
            self._receive_one(rest, run.address)

    def receive_one(self, data: memoryview | bytes, address: tuple[object, ...], now_ns: int) -> None:
        """Take one datagram that came now; raises as `receive`."""
        self._now_ns = self._arrived_ns = now_ns
        self._receive_one(data, address)

    def _receive_one(self, data: memoryview | bytes, address: tuple[object, ...]) -> None:
        now_ns = self._now_ns
        cid = bytes(data[1 : 1 + self._own_ids.size])
        opened = None
        if cid in self._own_ids:
            opened = open_packet(self._keys, data, len(cid), self._acknowledgements.largest, now_ns)
        if opened is None:
            self._look_for_reset(data)
            if self._trace is not None:
                self._trace.packets_dropped(1, len(data))
            return
        number, payload = opened
        if not self._acknowledgements.is_new(number):
            return
        if self._trace is not None:
            self._trace.packet_received(number, len(data), payload)
        path = self._path = self._paths.heard(address, len(data), cid)
        self._cid = cid
        eliciting, probing = self._frames(payload)
        self._note(number, number + 1, len(data), eliciting=eliciting)
        if path is not self._paths.current:
            if not probing and number == self._acknowledgements.largest:
                self._paths.move(path, now_ns, self._sender.probe_timeout_ns)
            self._follow_paths()

    # -- runs ----------------------------------------------------------------------------------------------------

    def _receive_alike(self, memory: memoryview, size: int) -> int:
        """Take packets from the first one on as far as they are alike; return how many."""
        cid = bytes(memory[1 : 1 + self._own_ids.size])
        if cid not in self._own_ids:
            return 0
        largest = self._acknowledgements.largest
        opened = open_run(self._keys, self._slabs, memory, size, cid, largest, self._now_ns)
        for place in opened.forged:
            self._look_for_reset(memory[place * size : (place + 1) * size])
        numbers, text = opened.numbers, opened.text
        consecutive = self._are_next(numbers)
        if not consecutive:
            numbers, text = self._only_new(numbers, text)
        if self._trace is not None:
            self._trace.packets_dropped(len(opened.forged), size)
            for number, row in zip(numbers, text, strict=True):
                self._trace.packet_received(number, size, row.tobytes())
        self._path, self._cid = self._paths.current, cid
        if len(numbers):
            self._path = self._paths.heard(self._path.address, len(numbers) * size, cid)
        i, total = 0, len(numbers)
        while i < total and self._ending.is_open:
            done, eliciting = 0, True
            if text[i, 0] & 0xFE == _STREAM_ALIKE:
                done = self._take_rows(text[i:])
            if not done:
                eliciting, _ = self._frames(text[i].tobytes())
                done = 1
            if consecutive:
                first = numbers[i]
                self._note(first, first + done, done * size, eliciting=eliciting)
            else:
                self._note_numbers(numbers[i : i + done], size, eliciting=eliciting)
            i += done
        return opened.taken

    def _are_next(self, numbers: list[int]) -> bool:
        """Return whether these are above all before, each one more than the one before it: the usual case."""
        if not numbers or numbers[0] <= self._acknowledgements.largest:
            return False
        due = numbers[0]
        for number in numbers:
            if number != due:
                return False
            due += 1
        return True

    def _only_new(self, numbers: list[int], text: Rows) -> tuple[list[int], Rows]:
        """Leave out duplicates; those of one run among themselves too."""
        seen: dict[int, None] = {}
        keep = []
        for i, number in enumerate(numbers):
            if number not in seen and self._acknowledgements.is_new(number):
                seen[number] = None
                keep.append(i)
        return list(seen), text[keep]

    def _take_rows(self, text: Rows) -> int:
        """Take packets that each are one STREAM frame without length, of one stream, one behind the other; how many."""
        beginning = text[0, :17].tobytes()
        stream_id, at = pull(beginning, 1)
        if at >= len(beginning) or beginning[at] < 0xC0:  # offsets of eight bytes, as we write them
            return 0
        offset, end = pull(beginning, at)
        count, step = len(text), text.shape[1] - end
        if step <= 0 or offset + count * step > _MOST_OFFSET:
            return 0
        heads = text[:, :end].tobytes()
        kind = bytes((_STREAM_ALIKE,)) + beginning[1:at]
        taken, fin, due = 0, False, offset | 3 << 62  # the two bits that say that it has eight bytes
        for i in range(0, count * end, end):
            head, like = heads[i : i + end], kind + due.to_bytes(8, "big")
            if head != like:
                fin = head[0] == _STREAM_ALIKE | 1 and head[1:] == like[1:]
                taken += fin
                break
            taken += 1
            due += step
        self._inbound.on_rows(stream_id, offset, text[:taken, end:], fin=fin)
        if self._repairs is not None:
            self._keep(self._repairs, stream_id, offset, text[:taken, end:], taken * step)
        return taken

    def _keep(self, repairs: Repairs, stream_id: int, offset: int, data: memoryview | Rows, size: int) -> None:
        """Keep bytes of a stream that have been taken, for as long as parity may be about them."""
        rtt = self._sender.recovery.rtt
        if rtt.min_ns is not None and rtt.min_ns >= LEAST_KEPT_NS and stream_id & 2:
            repairs.note(stream_id, offset, data, size)
            if repairs.has_open:
                repairs.late(stream_id)

    def _note_numbers(self, numbers: list[int], size: int, *, eliciting: bool) -> None:
        start = stop = numbers[0]
        for number in numbers:
            if number != stop:
                self._note(start, stop, (stop - start) * size, eliciting=eliciting)
                start = stop = number
            stop += 1
        self._note(start, stop, (stop - start) * size, eliciting=eliciting)

    # -- packets -------------------------------------------------------------------------------------------------

    def _note(self, start: int, stop: int, nbytes: int, *, eliciting: bool) -> None:
        self._acknowledgements.note(
            start, stop, nbytes, eliciting=eliciting, now_ns=self._now_ns, arrived_ns=self._arrived_ns
        )
        if eliciting and self._arrivals is not None:
            self._arrivals.on_arrived(nbytes, self._sender.recovery.rtt.min_ns, self._arrived_ns)
        self._ending.heard(self._now_ns)
        self.heard_ns = self._now_ns

    def _frames(self, payload: bytes) -> tuple[bool, bool]:
        """Take the frames of a packet; whether they ask for an acknowledgement, and whether they only probe (9.1)."""
        eliciting, probing = False, True
        self._stamp_ns = self._fair_rate = None
        for frame in read_frames(payload):
            kind = type(frame)
            eliciting = eliciting or asks_for_acknowledgement(frame)
            probing = probing and kind in _PROBING
            take = self._take.get(kind)
            if take is not None:
                take(frame)
        return eliciting, probing

    def _look_for_reset(self, data: memoryview | bytes) -> None:
        if self._peer_ids.is_reset(data):
            self._ending.on_reset()

    # -- frames --------------------------------------------------------------------------------------------------

    def _on_stream(self, frame: quic.StreamFrame) -> None:
        data = memoryview(frame.data)
        self._inbound.on_stream(frame.stream_id, frame.offset, data, len(data), fin=frame.fin)
        if self._repairs is not None:
            self._keep(self._repairs, frame.stream_id, frame.offset, data, len(data))

    def _on_ack(self, frame: quic.AckFrame) -> None:
        self._sender.on_ack(frame, self._now_ns, self._arrived_ns, self._stamp_ns, self._fair_rate)

    def _on_stamp(self, frame: quic.StampFrame) -> None:
        if not self._takes_stamps:
            raise FrameError(FRAME_ENCODING_ERROR, "a stamp where none was asked for")
        self._stamp_ns = frame.sent_us * 1000

    def _on_fair_rate(self, frame: quic.FairRateFrame) -> None:
        if not self._takes_fair_rates:
            raise FrameError(FRAME_ENCODING_ERROR, "a fair rate where none was asked for")
        self._fair_rate = FairRate(frame.rate, frame.is_full)

    def _on_path_response(self, frame: quic.PathResponseFrame) -> None:
        self._paths.on_response(frame.data, self._now_ns)
        self._follow_paths()

    def _on_handshake_done(self, frame: quic.HandshakeDoneFrame) -> None:
        if not self._is_client:
            raise FrameError(PROTOCOL_VIOLATION, "a client confirms nothing")  # RFC 9000 section 19.20
        self.confirmed = True
        self._keys.confirm()

    def _on_new_token(self, frame: quic.NewTokenFrame) -> None:
        if not self._is_client:
            raise FrameError(PROTOCOL_VIOLATION, "a client gives no tokens")  # RFC 9000 section 19.7


_PROBING = (quic.PathChallengeFrame, quic.PathResponseFrame, quic.NewConnectionIdFrame)  # RFC 9000 section 9.1


def _refuse(frame: quic.Frame) -> None:
    raise FrameError(FRAME_ENCODING_ERROR, f"{type(frame).__name__} where no parity was agreed on")
