"""Hostile frames inside good packets, straight into a plane: `PYTHONPATH=tests/helpers python -m quicoll_fuzz.plane`.

Both sides' keys are known, so each input is a packet that authenticates. Frames are of the grammar, with values near
what means something to this connection (its streams, limits, packet numbers, ids) or at their extremes, or bytes; in
packets of their own or in runs, repeated, out of order, under new keys, from other addresses, between datagrams that
authenticate as nothing. The plane's owner sends, resets and reads in between.

What must hold after each input: no exception but ProtocolError of the reader; a violation closes with a code; what is
kept for the peer is within its bounds (`_bounds`); answers are bounded; timers are not in the past for ever. A plane
that was closed comes to its end, and another takes its place. All chance comes from (seed, episode).
"""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

from quicoll_transport.errors import ProtocolError
from quicoll_transport.net.runs import DatagramRun
from quicoll_transport.quic import frames as f
from quicoll_transport.quic.arrival_line import ArrivalLine
from quicoll_transport.quic.handshake import Handover
from quicoll_transport.quic.keys import AES_128_GCM_SHA256, Keys
from quicoll_transport.quic.mtu import PathMtu
from quicoll_transport.quic.newreno import NewReno
from quicoll_transport.quic.packets import seal
from quicoll_transport.quic.parameters import (
    SENDS_PARITY,
    TAKES_FAIR_RATES,
    TAKES_PARITY,
    TAKES_STAMPS,
    TransportParameters,
)
from quicoll_transport.quic.plane import Plane

from .command import main
from .mutate import EXTREMES, mutate_bytes, mutate_frames, random_frames
from .world import Finding

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.quic.streams import ReceiveStream

__all__ = ["PlaneFuzz", "run_plane_episode"]

MS = 1_000_000
HOME: Address = ("10.1.0.1", 1)
WINDOW = 1 << 16
STREAMS = 16
CIDS = 8
ROOM = 600  # of packets that parity is about
_MOST_ANSWERS = 400  # datagrams for one input


class Reader:
    """Reads some streams, has others written to memory, and refuses the rest."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.plane: Plane | None = None
        self.targets: list[Target] = []

    def stream_arrived(self, stream: ReceiveStream) -> None:
        assert self.plane is not None
        choice = (stream.id >> 2) % 5
        if choice == 0 and not stream.is_direct and stream.peek(4) is not None:
            self.targets.append(Target())
            stream.direct(self.targets[-1], 4)
        elif choice == 1 and not stream.discarded:
            self.plane.inbound.stop(stream, 1)
        elif choice == 2 and not stream.is_direct and stream.upto < 100:
            pass  # it is read later
        elif not stream.is_direct:
            stream.read()
        elif stream.is_orphaned:
            self.plane.inbound.stop(stream, 2)

    def stream_reset(self, stream: ReceiveStream, code: int) -> None: ...


class Target:
    """1000 bytes for a stream."""

    def __init__(self) -> None:
        self.memory = bytearray(1000)
        self.view = memoryview(self.memory)
        self.filled = 0
        self.alive = True


class PlaneFuzz:
    """One plane and its hostile peer. tally: counts by name."""

    forged_packets: tuple[int, ...] = (50, 1 << 52)

    def __init__(self, rng: random.Random, tally: dict[str, int], *, is_client: bool | None = None) -> None:
        self.rng, self.tally = rng, tally
        # Who breaks a rule is cut off at once and reaches little: most are careful, most of the time.
        self.care = rng.choice((0.0, 0.9, 0.99, 0.999, 0.999))
        self.now = 10**18
        is_client = self.is_client = rng.random() < 0.5 if is_client is None else is_client
        parameters = TransportParameters(
            max_idle_timeout=30_000,
            initial_max_data=WINDOW,
            initial_max_stream_data_bidi_local=WINDOW,
            initial_max_stream_data_bidi_remote=WINDOW,
            initial_max_stream_data_uni=WINDOW,
            initial_max_streams_bidi=2,
            initial_max_streams_uni=STREAMS,
            active_connection_id_limit=CIDS,
            stateless_reset_token=bytes(16),
            ours=SENDS_PARITY | TAKES_PARITY | TAKES_STAMPS | TAKES_FAIR_RATES,
        )
        secrets = rng.randbytes(32), rng.randbytes(32)
        handover = Handover(
            is_client=is_client,
            suite=AES_128_GCM_SHA256,
            send_secret=secrets[0],
            receive_secret=secrets[1],
            cid=b"victim00",
            peer_cid=b"hostile0",
            local=parameters,
            remote=parameters,
            address=HOME,
            rtt_ns=10 * MS,
            certificate=None,
            chain=(),
            early=(),
            trace=None,
        )
        self.keys = Keys(AES_128_GCM_SHA256, secrets[1])
        self.number = 0
        self.cid = 1
        reader = self.reader = Reader(rng)
        self.plane = reader.plane = Plane(
            handover,
            reader=reader,
            controller=NewReno,
            mtu=lambda: PathMtu(base=1200, most=1452),
            arrivals=ArrivalLine().join(),
            key_packets=rng.choice((20, 1 << 22)),
            forged_packets=rng.choice(self.forged_packets),
            initial_rtt_ns=10 * MS,
            reset_key=bytes(32),
            draw=rng.randbytes,
            now_ns=self.now,
        )
        self.sent: list[bytes] = []
        self.streams: list[Any] = []
        self.given: dict[Address, list[int]] = {}
        self.sizes: dict[str, int] = {}

    # -- what is sent --------------------------------------------------------------------------------------------

    def _number(self) -> int:
        rng = self.rng
        kind = rng.random()
        if kind < 0.5:
            return rng.choice(EXTREMES)
        return rng.randrange(1 << rng.randrange(1, 20))

    def _stream_id(self, *, receive: bool = True) -> int:
        rng = self.rng
        if rng.random() > self.care:
            wild = rng.randrange(rng.choice((STREAMS + 1, 2 * STREAMS))) << 2 | rng.randrange(4)
            return rng.choice((self._number(), wild))
        ours = 0 if self.is_client else 1
        if receive and rng.random() < 0.9:
            limit = self.plane.inbound._kinds[1].limit
            return (limit - 1 - rng.randrange(min(limit, STREAMS))) << 2 | 2 | (1 - ours)
        opened = self.plane.outbound._opened[1].used
        if not receive and opened and rng.random() < 0.9:
            return rng.randrange(max(0, opened - 20), opened) << 2 | 2 | ours
        return rng.randrange(2) << 2 | (1 - ours)

    def _offset(self) -> int:
        rng = self.rng
        if rng.random() > self.care:
            return rng.choice((self._number(), WINDOW - 1, WINDOW))
        return rng.choice((0, 0, 1, rng.randrange(300), rng.randrange(3000), rng.randrange(3000)))

    def _ranges(self) -> list[tuple[int, int]]:
        rng = self.rng
        top = max(self.plane.sender.number, 1)
        if rng.random() > self.care:
            top += rng.choice((1, 5, 1 << 40))
        out, stop = [], rng.randrange(1, top + 1) if rng.random() < 0.5 else top
        for _ in range(rng.choice((1, 1, 3, 200))):
            start = stop - rng.choice((1, 1, 2, 10))
            if start < 0:
                break
            out.append((start, stop))
            stop = start - rng.choice((1, 1, 3))
            if stop <= 0:
                break
        return out or [(0, 1)]

    def _frame(self) -> bytes:
        rng = self.rng
        kind = rng.randrange(26)
        match kind:
            case 0 | 1 | 2 | 3:
                size = rng.choice((0, 1, 1, 5, 100, 1000))
                frame: Any = f.StreamFrame(
                    self._stream_id(), self._offset(), rng.randbytes(size), rng.random() > self.care
                )
            case 4 | 5 | 6 if self.plane.sender.number or rng.random() > self.care:
                frame = f.AckFrame(self._ranges(), rng.choice((0, 1, 1000, (1 << 62) - 1)))
                before = b""
                if rng.random() < 0.5:
                    before += f.StampFrame(rng.choice((0, self.now // 1000, self._number()))).encode()
                if rng.random() < 0.5:
                    rate = rng.choice((0, 1, 10**6, (1 << 61) - 1))
                    before += f.FairRateFrame(rate, is_full=rng.random() < 0.5).encode()
                if before:
                    return before + frame.encode()
            case 7:
                stream_id = self._stream_id()
                known = self.plane.inbound._streams.get(stream_id)
                final = known.highest if known is not None and rng.random() < self.care else self._offset()
                frame = f.ResetStreamFrame(stream_id, self._number(), final)
            case 8:
                frame = f.StopSendingFrame(self._stream_id(receive=False), self._number())
            case 9:
                frame = f.MaxDataFrame(rng.choice((self._number(), WINDOW + rng.randrange(WINDOW))))
            case 10:
                frame = f.MaxStreamDataFrame(
                    self._stream_id(receive=False), rng.choice((self._number(), WINDOW + rng.randrange(WINDOW)))
                )
            case 11:
                frame = f.MaxStreamsFrame(rng.choice((rng.randrange(100), 1 << 60)), rng.random() < 0.5)
            case 12:
                frame = f.NewConnectionIdFrame(
                    self.cid, max(0, self.cid - rng.randrange(CIDS - 1)), self.cid.to_bytes(8, "big"), rng.randbytes(16)
                )
                if rng.random() > self.care:
                    frame = f.NewConnectionIdFrame(
                        rng.randrange(1, 100), rng.choice((0, 1)), rng.randbytes(8), bytes(16)
                    )
                self.cid += rng.random() < 0.8
            case 13:
                issued = [number for number in self.plane.own_ids._by_number if number]
                careful = rng.random() < self.care and issued
                frame = f.RetireConnectionIdFrame(rng.choice(issued) if careful else rng.randrange(30))
            case 14:
                frame = f.PathChallengeFrame(rng.randbytes(8))
            case 15:
                frame = f.PathResponseFrame(rng.randbytes(8))
            case 16:
                frame = f.StreamDataBlockedFrame(self._stream_id(), self._number())
            case 17:
                frame = f.CryptoFrame(rng.randrange(1000), rng.randbytes(20))
            case 18:
                frame = f.PingFrame()
            case 19:
                frame = (
                    rng.choice((f.HandshakeDoneFrame(), f.NewTokenFrame(b"t")))
                    if rng.random() > self.care
                    else f.PingFrame()
                )
            case 20:
                frame = f.StreamsBlockedFrame(rng.randrange(100), rng.random() < 0.5)
            case 21 | 22:
                frame = self._protected()
            case 23 | 24:
                row = rng.randrange(16) if rng.random() < self.care else self._number()
                size = rng.choice((ROOM - 1, ROOM - 1, ROOM - 2, rng.randrange(1000)))
                frame = f.ParityFrame(rng.randrange(4), rng.randrange(4), row, rng.randbytes(size))
            case _ if rng.random() < 0.5:
                frame = f.RepairedFrame(rng.randrange(8))
            case _:
                frame = f.CloseFrame(1, None, b"") if rng.random() > self.care else f.DataBlockedFrame(self._number())
        return bytes(frame.encode())

    def _protected(self) -> f.ProtectedFrame:
        """Return the description of a set of parity, mostly of streams that there are and spans that may be."""
        rng = self.rng
        spans = []
        for _ in range(rng.choice((1, 1, 2, 20))):
            start = self._offset()
            stop = min(start + rng.randrange(1, 6000), (1 << 62) - 1) if rng.random() < self.care else start
            spans.append((self._stream_id(), start, max(stop, start), rng.random() > self.care))
        room, groups = (ROOM, 1) if rng.random() < self.care else (self._number(), rng.randrange(40))
        return f.ProtectedFrame(rng.randrange(4), room, groups, spans)

    def _payload(self) -> bytes:
        rng = self.rng
        made = b""
        for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
            frame = self._frame()
            made += frame if len(made) + len(frame) < 1380 or rng.random() > self.care else b""
        made = made[:1380]
        kind = rng.random()
        if kind < 0.06 * (1 - self.care):
            made = mutate_frames(made or b"\1", rng, self.sent[-3:])
        elif kind < 0.3 * (1 - self.care):
            made = random_frames(rng, rng.randrange(1, 400))
        elif kind < 0.4 * (1 - self.care):
            made = made[0:1] * rng.choice((1, 1000)) if made else b"\1"
        return made.ljust(4, b"\0") if rng.random() < self.care else b""

    def _packet(self, payload: bytes) -> bytes:
        rng = self.rng
        if rng.random() < 0.002:
            self.keys = self.keys.following()
        number = self.number
        if rng.random() < 0.05:
            number = max(0, number - rng.randrange(200))
        else:
            self.number = number + rng.choice((1, 1, 1, 1, 2, 50))
        cid = b"victim00"
        if rng.random() < 0.02:
            cid = rng.choice(list(self.plane.own_ids._active) or [cid])
        if not payload:
            payload = b"\0\0\0\0" if rng.random() < 0.9 else b"\1\0\0\0"
        return seal(self.keys, cid, number, payload)

    def _run(self) -> DatagramRun:
        rng = self.rng
        address: Address = HOME
        if not self.is_client and rng.random() < 0.03:
            address = (f"10.2.0.{rng.randrange(12)}", rng.randrange(1, 4))
        kind = rng.random()
        if kind < 0.8:
            data = self._packet(self._payload())
        elif kind < 0.9:
            # A run of packets of one size: pieces of a stream, some of them something else.
            stream, at, step = self._stream_id(), min(self._offset(), (1 << 62) - 1000), rng.choice((20, 200))
            count = min(rng.choice((4, 12, 40)), 4 if at > WINDOW else 40)
            pieces = []
            for i in range(count):
                head = f.stream_head(stream, at + i * step, None, fin=rng.random() * 0.1 > self.care)
                text = (head + rng.randbytes(step)) if rng.random() < 0.9 else self._frame()
                pieces.append(self._packet(text[: step + len(head)].ljust(step + len(head), b"\0")))
            size = len(pieces[0])
            pieces = [piece for piece in pieces if len(piece) == size]
            if rng.random() < 0.3:
                rng.shuffle(pieces)
            data = b"".join(pieces)
            self.tally["packets"] += len(pieces) - 1
            self.sent.append(data)
            return self._count(DatagramRun(memoryview(bytearray(data)), size, address), address)
        elif self.sent and kind < 0.96:
            data = mutate_bytes(rng.choice(self.sent), rng, self.sent) or b"\x40"
        else:
            data = rng.choice(self.sent) if self.sent else b"\x40" + rng.randbytes(40)
        self.sent = [*self.sent[-20:], data]
        data = data[:1500] or b"\x40"
        return self._count(DatagramRun(memoryview(bytearray(data)), len(data), address), address)

    def _count(self, run: DatagramRun, address: Address) -> DatagramRun:
        self.tally["packets"] += 1
        self.given.setdefault(address, [0, 0])[0] += len(run.memory)
        return run

    # -- what the owner does -------------------------------------------------------------------------------------

    def _work(self) -> None:
        rng, outbound = self.rng, self.plane.outbound
        kind = rng.random()
        if kind < 0.5 and len(outbound) < 60:
            stream = outbound.open(unidirectional=rng.random() < 0.9, urgent=rng.random() < 0.1)
            outbound.write(stream, memoryview(bytes(rng.choice((0, 1, 500, 3000, 20_000)))), fin=rng.random() < 0.9)
            self.streams = [*self.streams[-60:], stream]
        elif kind < 0.6 and self.streams:
            outbound.reset(rng.choice(self.streams), 3)
        elif kind < 0.7 and self.reader.targets:
            self.reader.targets.pop(rng.randrange(len(self.reader.targets))).alive = False
        elif kind < 0.75:
            self.plane.ping()
        elif kind < 0.755:
            self.plane.close(5, "enough")

    # -- the oracle ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One input and what follows; whether the plane goes on."""
        plane, rng = self.plane, self.rng
        self.tally["inputs"] += 1
        over = False
        try:
            plane.receive(self._run(), self.now)
        except ProtocolError:
            self.tally["refused"] += 1
            plane.close(2, "refused")
        if plane.violation is not None:
            over = True
        if rng.random() < 0.3 and plane.ending.is_open:
            self._work()
        self._send()
        self._bounds()
        if rng.random() < 0.5:
            self.now += rng.choice((1, MS // 10, MS, 20 * MS, 300 * MS))
            self._timers()
        plane.own_ids.fresh.clear()
        plane.own_ids.gone.clear()
        return plane.ending.is_open and not over

    def _send(self) -> None:
        count = 0
        for run in self.plane.datagrams(self.now):
            count += len(run)
            given = self.given.setdefault(run.address, [0, 0])
            validated = any(path.address == run.address and path.validated for path in self.plane.paths)
            if not validated:
                given[1] += len(run.memory)
                if given[1] > 3 * given[0]:
                    raise Finding(f"{given[1]} bytes to an address that sent {given[0]}")
        if count > _MOST_ANSWERS:
            raise Finding(f"{count} datagrams for one input")

    def _timers(self) -> None:
        for _ in range(200):
            at = self.plane.next_timer()
            if at is None or at > self.now:
                return
            self.plane.handle_timer(self.now)
            self._send()
        raise Finding("time stands still")

    def _bounds(self) -> None:
        plane = self.plane
        inbound, outbound, recovery = plane.inbound, plane.outbound, plane.recovery
        figures = {
            "control frames": (len(plane.control), 400),
            "streams in": (len(inbound), STREAMS + 2 + 60),
            "streams out": (sum(s.reset_code is None for s in outbound._streams.values()), 70),
            "holes": (inbound.holes, 64 + WINDOW // 256),
            "bytes held": (sum(len(s._held) for s in inbound._streams.values()), 2 * WINDOW),
            "ids": (len(plane.own_ids), 4),
            "peer's ids": (len(plane.peer_ids._known), CIDS),
            "retirements": (len(plane.peer_ids._owed), 64),
            "paths": (sum(1 for _ in plane.paths), 4),
            "late": (recovery._late_packets, 1 << 16),
            "acknowledged": (len(plane.sender._acknowledgements._known), 1024),
            "kept": (plane.repairs.recent_bytes if plane.repairs else 0, 6 << 20),
            "rows of parity": (plane.repairs._rows_bytes if plane.repairs else 0, 1 << 20),
            "sets taken": (len(plane.repairs._sets) if plane.repairs else 0, 8),
            "sets sent": (len(plane.protection._sets) if plane.protection else 0, 8),
            "told": (len(plane.sender._acknowledgements._open), 512),
        }
        for name, (figure, most) in figures.items():
            if figure > self.tally.setdefault("most " + name, 0):
                self.tally["most " + name] = figure
            if figure > most and plane.violation is None:
                raise Finding(f"{figure} {name}, more than {most}")
        if inbound.received - inbound.taken > WINDOW:
            raise Finding(f"{inbound.received} bytes taken in, {inbound.taken} read")

    def end(self) -> None:
        """A plane that was closed says its last words and wants nothing more."""
        self._send()
        ending = self.plane.ending
        if ending.is_open or ending.has_words or self.plane.next_timer() is not None:
            raise Finding("it is closed and does not end")
        if self.plane.datagrams(self.now):
            raise Finding("it has ended and goes on")
        self.plane.release()


def run_plane_episode(
    seed: int, episode: int, size: int, tally: dict[str, int], why: dict[str, int] | None = None
) -> None:
    """`size` inputs, for as many planes as they need. Raises Finding."""
    rng = random.Random(f"plane {seed}/{episode}")
    for name in ("inputs", "packets", "planes", "refused", "violations"):
        tally.setdefault(name, 0)
    until = tally["inputs"] + size
    try:
        while tally["inputs"] < until:
            fuzz = PlaneFuzz(rng, tally)
            tally["planes"] += 1
            while tally["inputs"] < until and fuzz.step():
                pass
            tally["violations"] += fuzz.plane.violation is not None
            if fuzz.plane.violation is not None and why is not None:
                why[fuzz.plane.violation] = why.get(fuzz.plane.violation, 0) + 1
            if fuzz.plane.ending.is_open:
                fuzz.plane.close(0, "")
            fuzz.end()
    except Exception as error:  # any at all is a finding
        again = f"PYTHONPATH=tests/helpers python -m quicoll_fuzz.plane --seed {seed} --episode {episode} --size {size}"
        raise Finding(f"{type(error).__name__}: {error}\n    to see it again: {again}") from error


if __name__ == "__main__":
    sys.exit(main("quicoll_fuzz.plane", __doc__, run_plane_episode))
