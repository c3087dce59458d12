"""How the ranks of one host come to each other's segments.

What the link has told both before (TLS, certificates of both sides) is where the peer is: its host, the name of its
abstract Unix socket, and a secret that it has made for this view and this peer (`MeetingPlace`). Then, over that
socket:

    dialled     the higher rank dials the lower one, and says which rank it is
    proved      the kernel says that the same user is there (SO_PEERCRED); each side shows that it has both secrets,
                bound to the view and to who shows it
    exchanged   descriptors go across: segment and two eventfds; and the kernel's pidfd of the process at the other end

Only then is a peer's segment mapped. A rank has met when it has exchanged with all others. Anything else is a failure
of the meeting, of which all ranks hear over their links: then all of them go on over QUIC (quicoll.engine.neighbours).

Failure cases: a stranger dials (another user, or without the secrets): shut out, the meeting goes on. A peer says
nothing, is killed, or sends what is no descriptor: the meeting fails at its deadline at the latest, and descriptors
that came are closed. It is carried out on a thread of its own, which ends by that deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

__all__ = ["MEET_S", "SECRET_BYTES", "MeetingFailed", "MeetingPlace", "Met", "host_here", "listen", "meet_all"]

MEET_S = 1.0
SECRET_BYTES = 32

_NAMED = b"\0quicoll-"  # abstract: no file, and gone with its socket
_PEERPIDFD = 77  # SO_PEERPIDFD (Linux 6.5), which `socket` has no name for
_DESCRIPTORS = 3
_RANK = struct.Struct("<Q")
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
    """The descriptors of a rank that was met, which belong to whoever gets this. wakes: its eventfds."""

    segment: int
    wakes: tuple[int, int]
    process: int
    descriptors: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "descriptors", (self.segment, *self.wakes, self.process))

    def close(self) -> None:
        """Close all of them."""
        for descriptor in self.descriptors:
            os.close(descriptor)


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
        descriptors: What they are given: segment and two eventfds.
        within: Seconds for all of it.
    Returns:
        By rank, what they gave.
    Raises:
        MeetingFailed: Somebody was not met in time, or gave something else.
    """
    until = time.monotonic() + within
    found: dict[int, Met] = {}
    whom = "nobody"
    try:
        for peer in sorted(places):
            if peer > rank:
                continue
            whom = f"rank {peer}"
            if not places[peer].name.startswith(_NAMED):  # or it would have us dial whatever it likes
                raise ValueError("it names no socket of ours")
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(_left(until))
                sock.connect(places[peer].name)
                sock.send(_RANK.pack(rank))
                found[peer] = _exchange(sock, until, view_id, rank, peer, places, secrets, descriptors)
        while len(found) < len(places):
            whom = f"ranks {', '.join(str(each) for each in sorted(places) if each not in found)}"
            server.settimeout(_left(until))
            sock, _ = server.accept()
            with sock, contextlib.suppress(_Stranger):
                sock.settimeout(_left(until))
                said = sock.recv(_RANK.size + 1)
                peer = _RANK.unpack(said)[0] if len(said) == _RANK.size else rank
                if peer <= rank or peer not in places or peer in found:
                    continue
                found[peer] = _exchange(sock, until, view_id, rank, peer, places, secrets, descriptors)
    except (OSError, ValueError, _Stranger) as error:
        for each in found.values():
            each.close()
        raise MeetingFailed(f"{whom} not met: {error}") from error
    return found


class _Stranger(Exception):
    """Who is at the other end is not who should be."""


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("not in time")
    return left


def _proof(
    secrets: Mapping[int, bytes], places: Mapping[int, MeetingPlace], view_id: int, rank: int, shows: int
) -> bytes:
    """What rank `shows` shows to prove that it is one of the two, `rank` being the other one of them than us."""
    key = b"".join(sorted((secrets[rank], places[rank].secret)))
    return hmac.digest(key, b"quicoll local" + struct.pack("<QQ", view_id, shows), hashlib.sha256)


def _exchange(
    sock: socket.socket,
    until: float,
    view_id: int,
    rank: int,
    peer: int,
    places: Mapping[int, MeetingPlace],
    secrets: Mapping[int, bytes],
    descriptors: Sequence[int],
) -> Met:
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise _Stranger("another user is at its socket")
    sock.settimeout(_left(until))
    sock.send(_proof(secrets, places, view_id, peer, rank))
    if not hmac.compare_digest(sock.recv(64), _proof(secrets, places, view_id, peer, peer)):
        raise _Stranger("it does not know the secrets")
    process = _process(sock)
    received: list[int] = []
    try:
        socket.send_fds(sock, [b"3"], list(descriptors))
        sock.settimeout(_left(until))
        _, received, _, _ = socket.recv_fds(sock, 1, _DESCRIPTORS + 1, socket.MSG_CMSG_CLOEXEC)
        if len(received) != _DESCRIPTORS:
            raise ValueError(f"it sent {len(received)} descriptors")
    except BaseException:
        for each in [*received, process]:
            os.close(each)
        raise
    return Met(received[0], (received[1], received[2]), process)


def _process(sock: socket.socket) -> int:
    """The pidfd of the process at the other end: the kernel's, or by its number while its socket is open."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _PEERPIDFD)
    except OSError:
        pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if pid <= 0:
            raise ValueError("its process cannot be seen from here") from None
        return os.pidfd_open(pid)
