"""When a datagram came: what the kernel says, what is believed of it, and what becomes of it in a socket's runs."""

from __future__ import annotations

import asyncio
import socket
import struct
import time

import pytest

from quicoll_transport.net import arrival
from quicoll_transport.net.runs import DatagramRun
from quicoll_transport.net.udp import UdpSocket

MS = 1_000_000
S = 1_000_000_000


def test_a_time_is_found_among_what_recvmsg_gives() -> None:
    other = (17, 104, struct.pack("=i", 1452))
    assert arrival.stamp_of([other, (socket.SOL_SOCKET, 35, struct.pack("=qq", 3, 5))]) == 3 * S + 5
    assert arrival.stamp_of([other]) == 0
    assert arrival.stamp_of([(socket.SOL_SOCKET, 35, b"short")]) == 0


@pytest.mark.parametrize(
    ("came_ns", "waited_ns"),
    [
        (9 * S, 0),
        (9 * S - 3 * MS, 3 * MS),
        (9 * S - arrival.MOST_NS, arrival.MOST_NS),
        (9 * S - arrival.MOST_NS - 1, 0),  # the clock was set forward, or nobody has read for long
        (9 * S + 1, 0),  # it was set back
        (0, 0),  # the system does not say it
    ],
)
def test_a_wait_that_a_clock_has_made_is_not_believed(came_ns: int, waited_ns: int) -> None:
    assert arrival.waited(came_ns, 9 * S) == waited_ns


def test_parts_and_copies_of_a_run_have_waited_as_long() -> None:
    run = DatagramRun(memoryview(bytearray(b"aabbc")), 2, ("192.0.2.1", 1), 7)
    assert run.part(1, 3).waited_ns == run.kept().waited_ns == 7


@pytest.mark.loopback
async def test_what_lay_in_the_socket_while_the_loop_was_busy_says_for_how_long() -> None:
    if not arrival.can_stamp():
        pytest.skip("this system does not say when a datagram came")
    loop = asyncio.get_running_loop()
    receiver, sender = UdpSocket("127.0.0.1", 0, loop=loop), UdpSocket("127.0.0.1", 0, loop=loop)
    runs: asyncio.Queue[DatagramRun] = asyncio.Queue()
    receiver.start(lambda got: [runs.put_nowait(run.kept()) for run in got] and None, lambda *_: None)

    def send(text: bytes) -> int:
        sender.send([DatagramRun(memoryview(bytearray(text)), len(text), receiver.local_address)])
        return time.monotonic_ns()

    def be_busy(until_ns: int) -> None:
        while time.monotonic_ns() < until_ns:
            pass

    try:
        first_ns = send(b"first")
        be_busy(first_ns + 20 * MS)
        second_ns = send(b"other")  # of the same size and sender, but it came later
        be_busy(second_ns + 5 * MS)
        first, second = await runs.get(), await runs.get()
        waits = time.monotonic_ns() - first_ns, time.monotonic_ns() - second_ns
    finally:
        receiver.close()
        sender.close()
    assert (bytes(first.memory), bytes(second.memory)) == (b"first", b"other")
    for run, least_ns, most_ns in ((first, 20 * MS, waits[0]), (second, 5 * MS, waits[1])):
        # This process may have been held up for longer than anybody believes.
        assert least_ns - MS <= run.waited_ns <= most_ns + MS or most_ns > arrival.MOST_NS
