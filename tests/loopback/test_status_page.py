"""The page of a job as it is served: what a browser gets, and what strangers do not."""

from __future__ import annotations

import http.client
import json
import socket
from typing import TYPE_CHECKING

import pytest

from quicoll.cli import status_page
from quicoll.cli.status_page import PageServer, html_page
from quicoll.cli.status_words import Picture
from quicoll.errors import LocalError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.loopback

PICTURE = Picture(job="train", condition="held", sentence="job train: held for 2 s: 1 of 2 nodes are here")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[PageServer]:
    monkeypatch.setattr(status_page._Page, "timeout", 600.0)
    found = PageServer(
        ("127.0.0.1", 0),
        page=lambda: html_page(PICTURE, every=1.0),
        all_links=lambda: "<!doctype html>all links",
        facts=lambda: {"condition": "held"},
    )
    yield found
    found.close()


def port_of(server: PageServer) -> int:
    return int(server.url.rstrip("/").rpartition(":")[2])


def asked(
    server: PageServer, path: str = "/", *, method: str = "GET", host: str | None = None
) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=60)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def test_the_page_and_the_facts_are_served_with_a_policy_that_lets_nothing_in(server: PageServer) -> None:
    answer, body = asked(server)
    assert (answer.status, body[:15]) == (200, "<!doctype html>")
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in answer.headers
    answer, body = asked(server, "/status.json")
    assert (answer.headers["Content-Type"], json.loads(body)) == ("application/json", {"condition": "held"})
    assert asked(server, "/links")[1] == "<!doctype html>all links"
    answer, body = asked(server, method="HEAD")
    assert (answer.status, body) == (200, "")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:1234", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("evil.example:80", 421),
        ("127.0.0.1.evil.example", 421),
        ("", 421),
    ],
)
def test_a_name_of_a_stranger_that_leads_here_is_refused(server: PageServer, host: str, status: int) -> None:
    answer, body = asked(server, host=host)
    assert answer.status == status
    assert ("doctype" in body) == (status == 200)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/etc/passwd", 404), ("POST", "/", 501), ("PUT", "/", 501)]
)
def test_there_is_nothing_else(server: PageServer, method: str, path: str, status: int) -> None:
    assert asked(server, path, method=method)[0].status == status


def test_connections_that_say_nothing_are_bounded_and_the_server_ends_all_the_same(server: PageServer) -> None:
    idle = [socket.create_connection(("127.0.0.1", port_of(server)), timeout=60) for _ in range(17)]
    assert idle[16].recv(1) == b""  # the others have ten minutes to say something
    for each in idle:
        each.close()


def test_a_port_that_is_taken_is_an_error_that_says_so(server: PageServer) -> None:
    with pytest.raises(LocalError, match=r"cannot serve a page at 127\.0\.0\.1:\d+: "):
        PageServer(("127.0.0.1", port_of(server)), page=str, all_links=str, facts=dict)
