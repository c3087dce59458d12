"""A street in a network namespace, and houses behind address translators: small ones, of this program's own.

Not Linux's, which many a kernel and machine has not (nf_tables, nft(8)).

    python street.py street 10.9.0.1 10.9.0.2 10.9.0.3    a namespace that has these addresses
    python street.py house cone 10.9.0.2 PID              another one, whose way into PID's is a translator

Each stands for as long as its process does, which prints "ready" when it does, and ends when its standard input is
closed or after LIFE_S. A command is run inside by `nsenter --net=/proc/PID/ns/net`. The namespaces have no names, so
nothing is left behind, however all of this ends. Needs root, ip(8), nsenter(1) and /dev/net/tun.

A house has one host, 192.168.7.2, whose packets come out of a TUN device here. Of these UDP over IPv4 is carried, in
sockets in the street that are bound to the house's public address:

    cone         one socket for each of the host's ports, of the same number where that is free; what comes is let in
                 from where the host has sent to from that port (RFC 4787: mapping endpoint-independent, filtering by
                 address and port)
    symmetric    another socket, of any port, for each port and destination; likewise
    firewall     a cone whose host has the public address itself: it translates nothing, and lets in answers

What the host has sent is remembered for REMEMBERS_S. There are at most SOCKETS of them, and of each at most PLACES that
it has sent to; a datagram beyond that is lost, or the oldest place is forgotten. What is larger than the TUN device's
packets is lost, and so are fragments.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time

IP = shutil.which("ip") or ""
KINDS = ("cone", "symmetric", "firewall")
HOME, DEVICE, MTU = "192.168.7.2", "wan0", 1500
LIFE_S = 300.0
REMEMBERS_S = 30.0
SOCKETS, PLACES = 64, 64

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
UDP_HEADERS = 20 + 8

Place = tuple[str, int]


def enter(namespace: int | None) -> None:
    """Have this thread in a namespace that is open, or in a new one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) if namespace is None else libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace")


def ip(*words: str) -> None:
    subprocess.run([IP, *words], check=True)


class Translator:
    """Between a TUN device, which is open, and sockets that are opened in the thread that calls `run`."""

    def __init__(self, kind: str, public: str, tun: int) -> None:
        self._by_destination = kind == "symmetric"
        self._keeps_port = kind != "symmetric"
        self._public = public
        self._tun = tun
        self._sockets: dict[tuple[Place, Place | None], socket.socket] = {}
        self._inside: dict[int, Place] = {}  # whose a socket is, by its descriptor
        self._sent_s: dict[int, dict[Place, float]] = {}  # where it has sent to, and when last
        self._poll = select.epoll()
        self._poll.register(tun, select.EPOLLIN)

    def run(self) -> None:
        by_descriptor: dict[int, socket.socket] = {}
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._tun:
                    self._outward(os.read(self._tun, 1 << 16))
                    by_descriptor = {each.fileno(): each for each in self._sockets.values()}
                else:
                    self._inward(by_descriptor[descriptor])

    def _outward(self, packet: bytes) -> None:
        """Pass on what the host sends."""
        length = (packet[0] & 15) * 4
        if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_UDP or struct.unpack_from("!H", packet, 6)[0] & 0x3FFF:
            return
        from_port, to_port, size = struct.unpack_from("!HHH", packet, length)
        inside = socket.inet_ntoa(packet[12:16]), from_port
        place = socket.inet_ntoa(packet[16:20]), to_port
        outside = self._socket(inside, place)
        if outside is None:
            return
        sent = self._sent_s[outside.fileno()]
        sent.pop(place, None)  # so that the oldest one is the first
        sent[place] = time.monotonic()
        if len(sent) > PLACES:
            del sent[next(iter(sent))]
        try:
            outside.sendto(packet[length + 8 : length + size], place)
        except OSError:
            pass  # there is no such place in the street: lost, as on any network

    def _socket(self, inside: Place, place: Place) -> socket.socket | None:
        key = inside, place if self._by_destination else None
        found = self._sockets.get(key)
        if found is None and len(self._sockets) < SOCKETS:
            found = self._sockets[key] = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            found.setblocking(False)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            try:
                found.bind((self._public, inside[1] if self._keeps_port else 0))
            except OSError:
                found.bind((self._public, 0))
            self._inside[found.fileno()] = inside
            self._sent_s[found.fileno()] = {}
            self._poll.register(found, select.EPOLLIN)
        return found

    def _inward(self, outside: socket.socket) -> None:
        """Let in what answers something."""
        try:
            data, place = outside.recvfrom(1 << 16)
        except BlockingIOError:
            return
        sent_s = self._sent_s[outside.fileno()].get(place)
        if sent_s is None or time.monotonic() - sent_s > REMEMBERS_S or len(data) > MTU - UDP_HEADERS:
            return
        host, port = self._inside[outside.fileno()]
        size = len(data) + 8
        addresses = socket.inet_aton(place[0]) + socket.inet_aton(host)
        head = struct.pack("!BBHHHBB", 0x45, 0, size + 20, 0, 0x4000, 64, socket.IPPROTO_UDP)
        head += checksum(head + addresses) + addresses
        # No checksum of UDP (RFC 768: 0), since the socket has verified it.
        os.write(self._tun, head + struct.pack("!HHHH", place[1], port, size, 0) + data)


def checksum(head: bytes) -> bytes:
    """Return what stands in a header of IPv4 between what comes before and after it."""
    total = sum(struct.unpack(f"!{len(head) // 2}H", head))
    total = (total & 0xFFFF) + (total >> 16)
    return struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF)


def street(addresses: list[str]) -> None:
    """Make this process's namespace a street."""
    enter(None)
    ip("link", "set", "lo", "up")
    for address in addresses:
        ip("addr", "add", f"{address}/24", "dev", "lo")


def house(kind: str, public: str, street: int) -> None:
    """Make this process's namespace a house, and begin to translate."""
    if kind not in KINDS:
        raise SystemExit(f"{kind!r} is none of {', '.join(KINDS)}")
    ipaddress.IPv4Address(public)
    outside = os.open(f"/proc/{street}/ns/net", os.O_RDONLY)
    enter(None)
    tun = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    ip("link", "set", "lo", "up")
    ip("addr", "add", f"{public if kind == 'firewall' else HOME}/24", "dev", DEVICE)
    ip("link", "set", DEVICE, "mtu", str(MTU), "up")
    ip("route", "add", "default", "dev", DEVICE)

    def translate() -> None:
        try:
            enter(outside)  # of this thread alone: the process stays in the house
            Translator(kind, public, tun).run()
        finally:
            os._exit(1)

    threading.Thread(target=translate, daemon=True).start()


def main(words: list[str]) -> None:
    if words[0] == "street":
        street(words[1:])
    else:
        house(words[1], words[2], int(words[3]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    select.select([sys.stdin], [], [], LIFE_S)


if __name__ == "__main__":
    main(sys.argv[1:])
