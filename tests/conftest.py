"""What all tests share."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest

from quicoll_transport.net.addresses import is_numeric

QUICK = [Path(__file__).parent / folder for folder in ("unit", "transport")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark "quick", for `make check`, what is in these folders and is neither slow nor on the loopback interface."""
    for item in items:
        other = item.get_closest_marker("slow") or item.get_closest_marker("loopback")
        if other is None and any(folder in item.path.parents for folder in QUICK):
            item.add_marker("quick")


@pytest.fixture(autouse=True)
def quick_tests_start_no_process_and_bind_no_socket(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.get_closest_marker("quick") is None:
        return

    def refuse(*arguments: object, **options: object) -> NoReturn:
        pytest.fail("a quick test starts a process or binds a socket; mark it slow or loopback")

    # Not connect: on a datagram socket it sends nothing, and is how the system is asked for a route.
    for owner, name in [
        (subprocess.Popen, "__init__"),
        (os, "fork"),
        (os, "posix_spawn"),
        (socket.socket, "bind"),
    ]:
        monkeypatch.setattr(owner, name, refuse)


@pytest.fixture(autouse=True)
def no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks a name server: how long one takes, and what it says, differs from machine to machine.

    Known are "localhost" and numeric addresses; any other name has no address, at once.
    """
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
        if host not in (None, "", "localhost") and not is_numeric(str(host)):
            str(host).encode("idna")  # the UnicodeError of what cannot even be asked
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
