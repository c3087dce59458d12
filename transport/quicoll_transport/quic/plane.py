"""The connection after the handshake: everything of 1-RTT, tied together. RFC 9000, 9001 and 9002; sans-IO.

Each part has its own module, states and rules; this one makes them, and says in which order they are asked.

    receiving    datagrams to frames to parts            acknowledgements    what has arrived, and who is told when
    sending      what goes into the next packets         recovery            what is in flight, and what was lost
    inbound      streams of the peer                     outbound            streams to the peer, and their order
    control      other frames that wait                  connection_ids      ours, and the peer's
    paths        where the peer is                       mtu                 how large datagrams may be
    protection   parity behind the tail of what is sent  repairs             what is made of the peer's
    closing      how it ends                             keys, packets       protection of packets

The plane is driven like a carrier: `receive` or `handle_timer`, then `datagrams`, then `next_timer`. Streams are read
by a StreamReader, in the calls that bring their bytes. What is the peer's fault by the rules of QUIC closes the
connection with a code of QUIC (`violation`); the last words are among the next datagrams. ProtocolError, from the
reader, is passed on: it closes with a code of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quicoll_transport.quic.acknowledgements import Acknowledgements
from quicoll_transport.quic.closing import AEAD_LIMIT_REACHED, ConnectionEnd, EndCause
from quicoll_transport.quic.connection_ids import OwnIds, PeerIds
from quicoll_transport.quic.control import ControlFrames, Saying
from quicoll_transport.quic.flow import StreamLimits
from quicoll_transport.quic.frames import FrameError, HandshakeDoneFrame, PingFrame
from quicoll_transport.quic.inbound import InboundStreams, StreamReader
from quicoll_transport.quic.keys import KeyPhases, PacketError
from quicoll_transport.quic.outbound import OutboundStreams
from quicoll_transport.quic.pacer import Pacer
from quicoll_transport.quic.parameters import SENDS_PARITY, TAKES_FAIR_RATES, TAKES_PARITY, TAKES_STAMPS
from quicoll_transport.quic.paths import Paths
from quicoll_transport.quic.protection import TailProtection
from quicoll_transport.quic.receiving import Receiver
from quicoll_transport.quic.recovery import LossRecovery
from quicoll_transport.quic.repairs import Repairs
from quicoll_transport.quic.sending import Sender
from quicoll_transport.quic.tracing import PlaneTrace

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun
    from quicoll_transport.quic.arrival_line import ArrivalShare
    from quicoll_transport.quic.controller import Controller
    from quicoll_transport.quic.handshake import Handover
    from quicoll_transport.quic.mtu import PathMtu
    from quicoll_transport.quic.parameters import TransportParameters
    from quicoll_transport.quic.records import Carried

__all__ = ["Plane"]


class Plane:
    """See the module's head.

    violation: what the peer got wrong, once it did. The parts are attributes, for whoever asks for streams or figures.
    """

    def __init__(
        self,
        handover: Handover,
        *,
        reader: StreamReader,
        controller: Callable[[int], Controller],
        mtu: Callable[[], PathMtu],
        arrivals: ArrivalShare,
        key_packets: int,
        forged_packets: int,
        initial_rtt_ns: int,
        reset_key: bytes,
        draw: Callable[[int], bytes],
        now_ns: int,
    ) -> None:
        """Take a connection over from its handshake.

        Args:
            handover: What the handshake has agreed on.
            reader: Takes what streams bring.
            controller: Makes congestion control for a path with datagrams of so many bytes.
            mtu: Begins the search for the size of datagrams, on each path.
            arrivals: Is told what comes, and says what the peer is allotted if that asks for it.
            key_packets: Packets to protect with one key before the next is asked for.
            forged_packets: Packets that fail their authentication until the connection is closed.
            initial_rtt_ns: Of a path of which nothing is known.
            reset_key: For stateless reset tokens.
            draw: Returns so many bytes of chance.
            now_ns: The time.
        """
        local, remote, is_client = handover.local, handover.remote, handover.is_client
        self.violation: str | None = None
        self._controller = controller
        self._initial_rtt_ns = initial_rtt_ns
        self._forged_packets = forged_packets
        self._mtu = mtu
        first = mtu()
        self.recovery: LossRecovery[Carried] = LossRecovery(
            controller(first.size),
            rtt_ns=handover.rtt_ns or initial_rtt_ns,
            max_ack_delay_ns=remote.max_ack_delay * 1_000_000,
        )
        self.keys = KeyPhases(
            handover.suite,
            handover.send_secret,
            handover.receive_secret,
            key_packets=key_packets,
            pto_ns=lambda: self.recovery.rtt.probe_timeout_ns,
            confirmed=not is_client,
        )
        self.control = ControlFrames()
        self.control.answers(Saying.PING, lambda _: PingFrame().encode())
        self.control.answers(Saying.HANDSHAKE_DONE, lambda _: HandshakeDoneFrame().encode())
        self.own_ids = OwnIds(handover.cid, limit=remote.active_connection_id_limit, key=reset_key, draw=draw)
        self.peer_ids = PeerIds(
            handover.peer_cid, limit=local.active_connection_id_limit, token=remote.stateless_reset_token
        )
        self.control.answers(Saying.NEW_CONNECTION_ID, self.own_ids.frame)
        self.control.answers(Saying.RETIRE_CONNECTION_ID, self.peer_ids.frame)
        self.outbound = OutboundStreams(is_client=is_client, limits=_limits(remote), control=self.control)
        self.inbound = InboundStreams(
            is_client=is_client, limits=_limits(local), outbound=self.outbound, control=self.control, reader=reader
        )
        self.paths = Paths(handover.address, is_client=is_client, draw=draw)
        self.ending = ConnectionEnd(idle_ns=_idle_ns(local, remote), now_ns=now_ns)
        trace = None if handover.trace is None else PlaneTrace(handover.trace)
        self.protection: TailProtection | None = None
        if local.ours & SENDS_PARITY and remote.ours & TAKES_PARITY:
            self.protection = TailProtection(self.outbound)
        self.repairs: Repairs | None = None
        if local.ours & TAKES_PARITY and remote.ours & SENDS_PARITY:
            self.repairs = Repairs(self.inbound, self.control)
        acknowledgements = Acknowledgements(exponent=local.ack_delay_exponent)
        self.sender = Sender(
            keys=self.keys,
            acknowledgements=acknowledgements,
            own_ids=self.own_ids,
            peer_ids=self.peer_ids,
            paths=self.paths,
            outbound=self.outbound,
            control=self.control,
            recovery=self.recovery,
            pacer=Pacer(first.size, now_ns),
            mtu=first,
            ending=self.ending,
            ack_delay_exponent=remote.ack_delay_exponent,
            stamps_since_ns=now_ns if remote.ours & TAKES_STAMPS else None,
            arrivals=arrivals if remote.ours & TAKES_FAIR_RATES else None,
            protection=self.protection,
            trace=trace,
        )
        self._receiver = Receiver(
            is_client=is_client,
            keys=self.keys,
            acknowledgements=acknowledgements,
            own_ids=self.own_ids,
            peer_ids=self.peer_ids,
            paths=self.paths,
            inbound=self.inbound,
            outbound=self.outbound,
            sender=self.sender,
            ending=self.ending,
            follow_paths=self._follow_paths,
            protection=self.protection,
            repairs=self.repairs,
            takes_stamps=bool(local.ours & TAKES_STAMPS),
            takes_fair_rates=bool(local.ours & TAKES_FAIR_RATES),
            arrivals=arrivals if remote.ours & TAKES_FAIR_RATES else None,
            trace=trace,
        )
        if not is_client:
            self.control.want(Saying.HANDSHAKE_DONE)

    # -- what happens --------------------------------------------------------------------------------------------

    def receive(self, run: DatagramRun, now_ns: int) -> None:
        """Take a run of datagrams, each of one short-header packet; they are opened in place.

        Raises:
            ProtocolError: The reader of a stream cannot take what came.
        """
        self._guard(self._receiver.receive, run, now_ns)

    def receive_one(self, data: memoryview | bytes, address: Address, now_ns: int) -> None:
        """Take one datagram; raises as `receive`."""
        self._guard(self._receiver.receive_one, data, address, now_ns)

    def _guard(self, work: Callable[..., None], *arguments: object) -> None:
        if not self.ending.is_open:
            return
        try:
            work(*arguments)
        except FrameError as wrong:  # two names: in compiled code one has one type
            self._violated(wrong.code, wrong.reason)
        except PacketError as error:
            self._violated(error.code, error.text)
        if self.keys.forged >= self._forged_packets:
            # No fault of the peer: somebody else forges (RFC 9001 section 6.6).
            self.ending.close(AEAD_LIMIT_REACHED, "too many forged packets", is_application=False)

    def _violated(self, code: int, reason: str) -> None:
        if self.ending.is_open:
            self.violation = reason
            self.ending.close(code, reason, is_application=False)

    def _follow_paths(self) -> None:
        """Send as the present path asks for.

        Nothing is known of the capacity of another one (RFC 9000 section 9.4), nor of its MTU (section 14.3).
        """
        paths = self.paths
        if paths.current.ids != self.peer_ids.path:
            self.peer_ids.use(paths.current.ids)
        while paths.gone:
            self.peer_ids.leave(paths.gone.pop())
        if paths.changed:
            paths.changed = False
            mtu = self._mtu()
            self.sender.begin_path(self._controller(mtu.size), mtu, rtt_ns=self._initial_rtt_ns)

    def handle_timer(self, now_ns: int) -> None:
        """Do what is due. Early calls do nothing."""
        pto_ns = self.sender.probe_timeout_ns
        self.ending.on_timer(now_ns, pto_ns)
        if self.ending.is_open:
            self.keys.on_timer(now_ns)
            self.paths.on_timer(now_ns)
            self._follow_paths()
            self.sender.on_timeout(now_ns)

    def next_timer(self) -> int | None:
        """Return when `handle_timer` is due, and `datagrams` after it."""
        due = self.ending.next_timer(self.recovery.rtt.probe_timeout_ns)
        if self.ending.is_open:
            for at in (self.sender.next_timer(), self.keys.next_timer(), self.paths.next_timer()):
                if at is not None and (due is None or at < due):
                    due = at
        return due

    def datagrams(self, now_ns: int) -> list[DatagramRun]:
        """Return what is to be sent now, in order; good until the next call."""
        if self.ending.is_open and not self.keys.room:
            self.ending.close(AEAD_LIMIT_REACHED, "no more packets may be protected", is_application=False)
        return self.sender.datagrams(now_ns)

    # -- what is known and asked for -------------------------------------------------------------------------------

    @property
    def confirmed(self) -> bool:
        """Whether the handshake is (RFC 9001 section 4.1.2)."""
        return self._receiver.confirmed

    @property
    def heard_ns(self) -> int | None:
        """When the last authentic packet came that was not a repetition; None before the first."""
        return self._receiver.heard_ns

    @property
    def cause(self) -> EndCause | None:
        """Why it has ended; None while it is open."""
        return self.ending.cause

    def ping(self) -> None:
        """Ask the peer for an acknowledgement."""
        self.control.want(Saying.PING)

    def close(self, code: int, reason: str) -> None:
        """End the connection with a code of the application's."""
        self.ending.close(code, reason, is_application=True)

    def release(self) -> None:
        """Let go of all memory of others; the last call."""
        self.inbound.release()
        self.outbound.release()
        if self.protection is not None:
            self.protection.release()
        if self.repairs is not None:
            self.repairs.release()


def _limits(parameters: TransportParameters) -> StreamLimits:
    return StreamLimits(
        data=parameters.initial_max_data,
        stream_ours=parameters.initial_max_stream_data_bidi_local,
        stream_theirs=parameters.initial_max_stream_data_bidi_remote,
        stream_uni=parameters.initial_max_stream_data_uni,
        streams_bidi=parameters.initial_max_streams_bidi,
        streams_uni=parameters.initial_max_streams_uni,
    )


def _idle_ns(local: TransportParameters, remote: TransportParameters) -> int:
    """Return the smaller of the times that both sides named (RFC 9000 section 10.1); 0: neither did."""
    return min((ms for ms in (local.max_idle_timeout, remote.max_idle_timeout) if ms), default=0) * 1_000_000
