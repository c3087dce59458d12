"""What the system can do with several datagrams in one call: found out, not assumed."""

from __future__ import annotations

import errno
import socket
import struct
import sys
from collections.abc import Iterator

import pytest

from quicoll_transport.net import offload
from quicoll_transport.net.offload import Offload, coalesced_size, supported

INT = struct.Struct("=i")


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    supported.cache_clear()
    yield monkeypatch
    supported.cache_clear()


@pytest.mark.interpreted
def test_where_it_is_not_linux_nothing_is_tried(probe: pytest.MonkeyPatch) -> None:
    probe.setattr(sys, "platform", "darwin")
    probe.setattr(offload.socket, "socket", None)
    assert supported() == Offload(sends=False, receives=False)


@pytest.mark.loopback
@pytest.mark.skipif(sys.platform != "linux", reason="these are options of Linux")
@pytest.mark.parametrize(
    ("option", "able"), [(103, Offload(sends=False, receives=True)), (104, Offload(sends=True, receives=False))]
)
def test_a_kernel_without_an_option_is_found_out(probe: pytest.MonkeyPatch, option: int, able: Offload) -> None:
    before = supported()
    if not (before.sends and before.receives):
        pytest.skip("this kernel has not both of them")
    supported.cache_clear()

    class Older(socket.socket):
        def setsockopt(self, level: int, name: int, value: int) -> None:
            if (level, name) == (17, option):
                raise OSError(errno.ENOPROTOOPT, "told to fail")
            super().setsockopt(level, name, value)

    probe.setattr(offload.socket, "socket", Older)
    assert supported() == able


@pytest.mark.loopback
@pytest.mark.skipif(sys.platform != "linux", reason="these are options of Linux")
def test_a_system_that_takes_the_option_and_refuses_to_send_is_found_out(probe: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        def sendmsg(self, *arguments: object) -> int:
            raise OSError(errno.EIO, "told to fail")

    probe.setattr(offload.socket, "socket", Refusing)
    assert not supported().sends


@pytest.mark.parametrize(
    ("ancillary", "size"),
    [
        ([], 100),
        ([(17, 104, INT.pack(30))], 30),
        ([(0, 8, INT.pack(3)), (17, 104, INT.pack(30))], 30),
        ([(17, 104, INT.pack(100))], 100),
        ([(17, 104, INT.pack(0))], 100),
        ([(17, 104, INT.pack(-1))], 100),
        ([(17, 104, b"\x1e")], 100),
    ],
)
def test_the_size_of_what_came_together(ancillary: list[tuple[int, int, bytes]], size: int) -> None:
    assert coalesced_size(ancillary, 100) == size
