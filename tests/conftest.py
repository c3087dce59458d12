"""What all tests share."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from quicoll_transport.net.addresses import is_numeric


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
