"""How the ranks of one host come to each other's segments.

What the link has told both before (TLS, certificates of both sides) is where the peer is: its host, the name of its
abstract Unix socket, and a secret that it has made for this view and this peer (`MeetingPlace`). Then, over that
socket, each line between two ranks:

    dialled     the higher rank dials the lower one; the kernel says that the same user is there (SO_PEERCRED); it says
                which rank it is, and shows that it has both secrets, bound to the view and to who shows it
    proved      the lower rank, which has listened to nobody until he had said something, shows the same
    exchanged   descriptors go across: segment, two eventfds, the arena where there is one (arena.py); and the kernel's
                pidfd of the process at the other end

Only then is a peer's memory mapped. A rank has met when it has exchanged with all others. Anything else is a failure
of the meeting, of which all ranks hear over their links: then all of them go on over QUIC (quicoll.engine.neighbours).

The order of all that is a generator that never waits (`meeting_steps`): it yields each thing that it asks of the host,
and is sent the answer, or thrown the OSError. `meet_all` answers by sockets, on a thread that blocks; a simulated host
answers on a virtual clock; and tests end a rank at each of the steps.

A rank dials all below it, then waits for all its lines at once (`Await`), and goes on with whichever something has come
on. So of its peers none waits for another one, and all of a host meet while the slowest proves itself once. Only to
dial can take time, where more have dialled a rank than the kernel lets wait; that rank is a lower one, and the lowest
dials nobody.

Failure cases: a stranger dials (another user, or without the secrets), says nothing, or what it likes, and hangs up
when it likes: shut out, and nobody waits for it, because a line is answered only when something has come, and gone on
with only where that was a proof. Of lines on which nothing has come at most MOST_SILENT are kept, the last ones. A peer
says nothing more, is killed, or sends what is no descriptor: the meeting fails at its deadline at the latest, and what
came is given back by who answers the steps. It ends by that deadline.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

__all__ = [
    "MEET_S",
    "MOST_SILENT",
    "SECRET_BYTES",
    "Await",
    "Dial",
    "Give",
    "HangUp",
    "Hear",
    "Identify",
    "MeetingFailed",
    "MeetingPlace",
    "MeetingStep",
    "Met",
    "Recognise",
    "Say",
    "Take",
    "host_here",
    "listen",
    "meet_all",
    "meeting_steps",
]

MEET_S = 1.0
SECRET_BYTES = 32
MOST_SILENT = 64

_AGAIN_S = 0.005
_NAMED = b"\0quicoll-"  # abstract: no file, and gone with its socket
_PEERPIDFD = 77  # SO_PEERPIDFD (Linux 6.5), which `socket` has no name for
_GIVEN = 3  # the segment, two eventfds; and the arena, where there is one
_FIRST = struct.Struct("<Q32s")  # of a line: the rank that dials, its proof
_PROOF_BYTES = 32
_FORM = b"quicoll local 2"  # of what stands in segments: ranks of another one do not meet, and go on over QUIC
_CREDENTIALS = struct.Struct("iII")


class MeetingFailed(Exception):
    """Some rank of the host was not met; says why."""


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """Where a rank is met. name: of its abstract socket. secret: that it has given the rank which is told this."""

    name: bytes
    secret: bytes


@dataclass(frozen=True, slots=True)
class Met:
    """The descriptors of a rank that was met, which belong to whoever gets this. wakes: its eventfds. arena: where it
    has one."""

    segment: int
    wakes: tuple[int, int]
    process: int
    arena: int | None = None
    descriptors: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        arena = () if self.arena is None else (self.arena,)
        object.__setattr__(self, "descriptors", (self.segment, *self.wakes, self.process, *arena))

    def close(self) -> None:
        """Close all of them."""
        for descriptor in self.descriptors:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Dial:
    """Dial who is at this name. Answered by the line, whatever it is."""

    name: bytes


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until something has come, or the other end has hung up, on a line of this rank's or of who has dialled it.
    Answered by the line."""


@dataclass(frozen=True, slots=True)
class Recognise:
    """Ask the kernel whether the same user is at the other end. Answered by a bool."""

    line: Any


@dataclass(frozen=True, slots=True)
class Say:
    """Send some bytes, as one message."""

    line: Any
    data: bytes


@dataclass(frozen=True, slots=True)
class Hear:
    """Take what has come. Answered by at most `size` bytes of it; b"" where the other end has hung up."""

    line: Any
    size: int


@dataclass(frozen=True, slots=True)
class Identify:
    """Ask the kernel for the process at the other end. Answered by its handle."""

    line: Any


@dataclass(frozen=True, slots=True)
class Give:
    """Send handles of what this rank brings: its segment, how it is woken in front and at the back, and its arena where
    it has one."""

    line: Any


@dataclass(frozen=True, slots=True)
class Take:
    """Take handles that have come. Answered by a sequence of them, which need not be as many as there should be."""

    line: Any


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close a line."""

    line: Any


MeetingStep: TypeAlias = Dial | Await | Recognise | Say | Hear | Identify | Give | Take | HangUp
"""What a meeting asks of the host, one after the other."""


def meeting_steps(
    *, view_id: int, rank: int, places: Mapping[int, MeetingPlace], secrets: Mapping[int, bytes]
) -> Generator[MeetingStep, Any, dict[int, tuple[Any, ...]]]:
    """Meet all others.

    Args:
        view_id: The view.
        rank: This rank in it.
        places: By rank, where the others are.
        secrets: By rank, what this rank has told the others beside its own name.
    Yields:
        What is to be done; the answer is sent, an OSError thrown.
    Returns:
        By rank, handles of its segment, of how it is woken in front and at the back, and of its process; and of its
        arena, where it has one.
    Raises:
        MeetingFailed: Somebody was not met, or gave something else. Lines that are open, and handles that came, are
            the caller's to close.
    """
    found: dict[int, tuple[Any, ...]] = {}
    callers = {peer for peer in places if peer > rank}  # who have yet to dial
    dialled: dict[Any, int] = {}
    exchanging: dict[Any, tuple[int, Any]] = {}  # by line, who is there and its process
    whom = "nobody"

    def proof(peer: int, shows: int) -> bytes:
        return _proof(secrets, places, view_id, peer, shows)

    try:
        for peer in sorted(places):
            if peer > rank:
                continue
            whom = f"rank {peer}"
            if not places[peer].name.startswith(_NAMED):  # or it would have us dial whatever it likes
                raise ValueError("it names no socket of ours")
            line = yield Dial(places[peer].name)
            yield from _recognise(line)
            yield Say(line, _FIRST.pack(rank, proof(peer, rank)))
            dialled[line] = peer
        while len(found) < len(places):
            missing = [str(each) for each in sorted(places) if each not in found]
            whom = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
            line = yield Await()
            if line in exchanging:
                peer, process = exchanging.pop(line)
                whom = f"rank {peer}"
                taken = yield Take(line)
                if len(taken) not in (_GIVEN, _GIVEN + 1):
                    raise ValueError(f"it sent {len(taken)} descriptors")
                found[peer] = (*taken[:_GIVEN], process, *taken[_GIVEN:])
                yield HangUp(line)
                continue
            if line in dialled:
                peer = dialled.pop(line)
                whom = f"rank {peer}"
                shown = yield Hear(line, _PROOF_BYTES + 1)
                if not hmac.compare_digest(shown, proof(peer, peer)):
                    raise _Stranger("it has not shown that it knows the secrets")
            else:
                peer, shown = yield from _introduced(line)
                if peer not in callers or not hmac.compare_digest(shown, proof(peer, peer)):
                    yield HangUp(line)
                    continue
                callers.remove(peer)
                whom = f"rank {peer}"
                yield Say(line, proof(peer, rank))
            exchanging[line] = peer, (yield Identify(line))
            yield Give(line)
    except (OSError, ValueError, _Stranger) as error:
        raise MeetingFailed(f"{whom} not met: {error}") from error
    return found


def _recognise(line: Any) -> Generator[MeetingStep, Any, None]:
    """Before anything is awaited of it, or told to it."""
    if not (yield Recognise(line)):
        raise _Stranger("another user is at its socket")


def _introduced(line: Any) -> Generator[MeetingStep, Any, tuple[int, bytes]]:
    """Who says to have dialled, and its proof: (-1, b"") for a stranger, who may hang up, which concerns nobody."""
    try:
        yield from _recognise(line)
        said = yield Hear(line, _FIRST.size + 1)
    except TimeoutError:
        raise
    except (OSError, _Stranger):
        return -1, b""
    peer, shown = _FIRST.unpack(said) if len(said) == _FIRST.size else (-1, b"")
    return peer, shown


@lru_cache(maxsize=1)
def host_here() -> str:
    """Return what tells this host from others: two processes that have it in common can meet. "" where it is unknown.

    An abstract socket is one of a network namespace, and a namespace one of a boot of a machine.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        namespace = os.stat("/proc/self/ns/net")
    except OSError:
        return ""
    return hashlib.sha256(f"{boot} {namespace.st_dev} {namespace.st_ino} {os.geteuid()}".encode()).hexdigest()[:32]


def listen() -> tuple[socket.socket, bytes]:
    """Return a socket that others can dial, and its name, which is gone with it."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        name = _NAMED + os.urandom(16).hex().encode()
        server.bind(name)
        server.listen(64)
    except BaseException:
        server.close()
        raise
    return server, name


def meet_all(
    server: socket.socket,
    *,
    view_id: int,
    rank: int,
    places: Mapping[int, MeetingPlace],
    secrets: Mapping[int, bytes],
    descriptors: Sequence[int],
    within: float = MEET_S,
) -> dict[int, Met]:
    """Meet all others. Blocks, for `within` seconds at most.

    Args:
        server: This rank's, which `listen` gave.
        view_id: The view.
        rank: This rank in it.
        places: By rank, where the others are.
        secrets: By rank, what this rank has told the others beside its own name.
        descriptors: What they are given: segment, two eventfds, the arena where there is one.
        within: Seconds for all of it.
    Returns:
        By rank, what they gave.
    Raises:
        MeetingFailed: Somebody was not met in time, or gave something else.
    """
    sockets = _Sockets(server, descriptors, within)
    steps = meeting_steps(view_id=view_id, rank=rank, places=places, secrets=secrets)
    try:
        step = next(steps)
        while True:
            try:
                answer = sockets.answer(step)
            except OSError as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as stop:
        return {
            peer: Met(segment, (front, back), process, *arena)
            for peer, (segment, front, back, process, *arena) in stop.value.items()
        }
    except BaseException:
        for each in sockets.taken:
            os.close(each)
        raise
    finally:
        sockets.close()


class _Stranger(Exception):
    """Who is at the other end is not who should be."""


def _proof(
    secrets: Mapping[int, bytes], places: Mapping[int, MeetingPlace], view_id: int, rank: int, shows: int
) -> bytes:
    """What rank `shows` shows to prove that it is one of the two, `rank` being the other one of them than us."""
    key = b"".join(sorted((secrets[rank], places[rank].secret)))
    return hmac.digest(key, _FORM + struct.pack("<QQ", view_id, shows), hashlib.sha256)


class _Sockets:
    """Answers the steps of a meeting by sockets, for `within` seconds. taken: descriptors that have come."""

    def __init__(self, server: socket.socket, descriptors: Sequence[int], within: float) -> None:
        self.taken: list[int] = []
        self._server = server
        self._descriptors = list(descriptors)
        self._until = time.monotonic() + within
        server.setblocking(False)
        self._lines: dict[int, socket.socket] = {}  # by descriptor
        self._silent: dict[int, socket.socket] = {}  # of who has dialled and said nothing, in their order
        self._poll = select.poll()
        self._poll.register(server, select.POLLIN)

    def answer(self, step: MeetingStep) -> Any:
        """Do what is asked. Raises OSError, TimeoutError where the time is up."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("not in time")
        match step:
            case Dial():
                line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
                self._lines[line.fileno()] = line
                line.settimeout(left)
                self._connect(line, step.name)
                self._poll.register(line, select.POLLIN)
                return line
            case Await():
                return self._awaited()
            case HangUp():
                self._poll.unregister(step.line)
                self._lines.pop(step.line.fileno()).close()
                return None
        step.line.settimeout(left)
        match step:
            case Recognise():
                return _credentials(step.line)[1] == os.geteuid()
            case Say():
                step.line.send(step.data)
                return None
            case Hear():
                return step.line.recv(step.size)
            case Identify():
                self.taken.append(_process(step.line))
                return self.taken[-1]
            case Give():
                socket.send_fds(step.line, [b"3"], self._descriptors)
                return None
            case Take():
                _, taken, _, _ = socket.recv_fds(step.line, 1, _GIVEN + 2, socket.MSG_CMSG_CLOEXEC)
                self.taken += taken
                return taken

    def _connect(self, line: socket.socket, name: bytes) -> None:
        while True:
            try:
                line.connect(name)
            except BlockingIOError:  # more have dialled there than the kernel lets wait; strangers perhaps
                if time.monotonic() + _AGAIN_S >= self._until:
                    raise TimeoutError("not in time") from None
                time.sleep(_AGAIN_S)
            else:
                return

    def _awaited(self) -> socket.socket:
        while (left := self._until - time.monotonic()) > 0:
            for descriptor, _ in self._poll.poll(left * 1000 + 1):
                if descriptor == self._server.fileno():
                    self._admit()
                elif descriptor in self._lines:
                    return self._lines[descriptor]
                elif descriptor in self._silent:  # it has said something, or hung up
                    line = self._lines[descriptor] = self._silent.pop(descriptor)
                    return line
        raise TimeoutError("not in time")

    def _admit(self) -> None:
        try:
            line, _ = self._server.accept()
        except BlockingIOError:
            return
        self._silent[line.fileno()] = line
        self._poll.register(line, select.POLLIN)
        if len(self._silent) > MOST_SILENT:
            first = self._silent.pop(next(iter(self._silent)))
            self._poll.unregister(first)
            first.close()

    def close(self) -> None:
        """Hang up all lines that are open."""
        for line in (*self._lines.values(), *self._silent.values()):
            line.close()


def _credentials(line: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group of who is at the other end."""
    pid, uid, gid = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid


def _process(line: socket.socket) -> int:
    """The pidfd of the process at the other end: the kernel's, or by its number while its socket is open."""
    try:
        return line.getsockopt(socket.SOL_SOCKET, _PEERPIDFD)
    except OSError:
        pid, _, _ = _credentials(line)
        if pid <= 0:
            raise OSError("its process cannot be seen from here") from None
        return os.pidfd_open(pid)
