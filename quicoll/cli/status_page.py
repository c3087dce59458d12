"""The page of `quicoll top --http`: what is seen of a job, for a browser, and for nobody to change anything by.

One document without a script, a font or a picture from anywhere; it asks for itself again (`<meta http-equiv>`). All
that comes from nodes is escaped. `/links` is the same with all links in place of the worst ones, and `/status.json` has
it for programs. Whoever reaches the port may read it; so it
is at the loopback address unless another one is named.

What a stranger may try, and what comes of it:

    a page elsewhere that reads this one  the Host has to be the one that was asked for, an address or "localhost": a
     by a name that leads here (DNS        name of a stranger that resolves to this host is refused with 421. There are
     rebinding)                            no CORS headers
    framing it, injecting into it         a policy that lets nothing in: no frame, no script, styles of this page alone
    another method, path, or a body       405, 404; a body is not read
    many connections, slow ones           16 at a time, 10 s for a request; the next one is closed at once
"""

from __future__ import annotations

import html
import ipaddress
import json
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any, ClassVar

from quicoll.cli.link_words import LINK_COLUMNS
from quicoll.errors import LocalError
from quicoll_transport.errors import TransportError
from quicoll_transport.net.addresses import format_address, is_v6, parse_address

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.cli.status_words import Picture

__all__ = ["PageServer", "html_page", "page_address"]

_MOST = 16
_TIMEOUT_S = 10.0
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_STYLE = """
:root { color-scheme: light dark; --good: #1a7f37; --wait: #9a6700; --bad: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --good: #3fb950; --wait: #d29922; --bad: #f85149; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.2rem; font-weight: 600; }
.badge { color: Canvas; border-radius: .3rem; padding: .1rem .6rem; margin-right: .4rem; text-transform: uppercase; }
.good { background: var(--good); } .wait { background: var(--wait); } .bad { background: var(--bad); }
.stale, tr.troubled .state { color: var(--bad); font-weight: 600; }
ul { list-style: none; padding: 0; } table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
th { text-align: left; font-weight: 500; opacity: .7; } th, td { padding: .15rem 1rem .15rem 0; vertical-align: top; }
.nodes th:nth-child(1), .nodes th:nth-child(4), .nodes th:nth-child(5) { text-align: right; }
.links th:nth-child(n+3):not(:last-child) { text-align: right; }
.links tr.troubled td:first-child { color: var(--bad); font-weight: 600; }
th, td:not(:last-child) { white-space: nowrap; } td, li, h1 { overflow-wrap: anywhere; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
footer { opacity: .7; font-size: .85rem; }
"""


def page_address(given: str) -> tuple[str, int]:
    """Return where a page is to be served.

    Args:
        given: "PORT", at the loopback address, or "HOST:PORT".
    Raises:
        LocalError: It is neither.
    """
    try:
        host, port, *_ = parse_address(given if ":" in given else f"127.0.0.1:{given}")
    except TransportError as error:
        raise LocalError(f"--http {given!r}: {error}") from error
    return str(host), int(port)


def html_page(picture: Picture, *, every: float, stale: str = "", most_links: int | None = None) -> str:
    """Return the document.

    Args:
        picture: What is shown.
        every: Seconds until it asks for itself again.
        stale: Why what is shown is old; "" where it is not.
        most_links: How many links are shown, the worst ones; None shows all.
    """
    text = html.escape
    head = f'<h1><span class="badge {picture.grade}">{text(picture.condition)}</span> {text(picture.headline)}</h1>'
    parts = [f'<p class="stale">{text(stale)}</p>' if stale else "", head]
    parts.append("<ul>" + "".join(f"<li>{text(line)}</li>" for line in picture.lines) + "</ul>")
    if picture.rows:
        names = ("Rank", "Node", "State", "Step", "Round trip", "")
        parts.append('<table class="nodes"><thead><tr>' + "".join(f"<th>{name}</th>" for name in names))
        parts.append("</tr></thead><tbody>")
        for row in picture.rows:
            cells = (
                (row.rank, "number"),
                (row.node, ""),
                (("! " if row.troubled else "") + row.state, "state"),
                (row.step, "number"),
                (row.rtt, "number"),
                (row.note, ""),
            )
            told = "".join(f'<td class="{how}">{text(value)}</td>' for value, how in cells)
            parts.append(f'<tr class="{"troubled" if row.troubled else ""}">{told}</tr>')
        parts.append("</tbody></table>")
    if picture.unlisted:
        parts.append(f"<p>and {picture.unlisted} more nodes</p>")
    parts += _links(picture, most_links)
    if picture.events:
        rows = (
            f'<tr><td class="number">{text(ago)} ago</td><td>{text(what)}</td></tr>' for ago, what in picture.events
        )
        parts.append(f"<table><tbody>{''.join(rows)}</tbody></table>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="refresh" content="{max(1, round(every))}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{text(picture.condition)}: {text(picture.job)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}<footer>quicoll; nothing can be changed here</footer></body></html>"
    )


def _links(picture: Picture, most: int | None) -> list[str]:
    """The table of links, and what is not in it."""
    text, parts, shown = html.escape, [], picture.links[:most]
    if shown:
        parts.append('<table class="links"><thead><tr>' + "".join(f"<th>{name}</th>" for name in LINK_COLUMNS))
        parts.append("</tr></thead><tbody>")
        for row in shown:
            told = "".join(
                f'<td class="{"number" if 2 <= at < len(LINK_COLUMNS) - 1 else ""}">{text(value)}</td>'
                for at, value in enumerate(row.cells)
            )
            parts.append(f'<tr class="{"troubled" if row.troubled else ""}">{told}</tr>')
        parts.append("</tbody></table>")
    hidden = len(picture.links) - len(shown)
    if shown and hidden:
        parts.append(f'<p><a href="/links">and {hidden} more links</a></p>')
    if shown and picture.untold:
        parts.append(f"<p>and {picture.untold} more links that their ranks have not told of</p>")
    if picture.unknown and most != 0:
        parts.append(f"<p>{text(picture.unknown)}</p>")
    return parts


class PageServer:
    """Serves the page in threads of its own, from when it is made until `close`.

    Args:
        address: Where; port 0 picks one.
        page: Returns the document of this moment; called from any thread.
        all_links: Returns the same with all links.
        facts: Returns the same for programs.
    Raises:
        LocalError: It cannot listen there.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        page: Callable[[], str],
        all_links: Callable[[], str],
        facts: Callable[[], dict[str, Any]],
    ) -> None:
        documents = {
            "/": ("text/html; charset=utf-8", page),
            "/links": ("text/html; charset=utf-8", all_links),
            "/status.json": ("application/json", lambda: json.dumps(facts(), indent=2)),
        }
        handler = type("_JobPage", (_Page,), {"documents": documents, "host": address[0]})
        kind = _Server6 if is_v6((address[0], address[1])) else _Server
        try:
            self._server = kind(address, handler)
        except OSError as error:
            raise LocalError(f"cannot serve a page at {format_address(address)}: {error.strerror or error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="quicoll-page", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where a browser finds it."""
        host, port = self._server.server_address[:2]
        return f"http://{format_address((str(host), int(port)))}/"

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # who reads slowly has its own end

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._room = threading.BoundedSemaphore(_MOST)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks a name server who we are, which may take its time

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is its own peer's affair."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Page(BaseHTTPRequestHandler):
    documents: ClassVar[dict[str, tuple[str, Callable[[], str]]]] = {}
    host = ""
    timeout = _TIMEOUT_S
    server_version = "quicoll"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the document."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Answer with what there would be."""
        self._answer(with_body=False)

    def log_message(self, *_: Any) -> None:
        """Nobody is told who looks."""

    def _answer(self, *, with_body: bool) -> None:
        self.close_connection = True
        if not self._is_meant():
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST)
            return
        found = self.documents.get(self.path.partition("?")[0])
        if found is None:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        kind, document = found
        self._send(HTTPStatus.OK, kind, document(), with_body=with_body)

    def _is_meant(self) -> bool:
        """Whether the request names this host by an address, or as it was asked to be named."""
        name = self.headers.get("Host", "")
        name = name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]
        if name.lower() in ("localhost", self.host.lower()):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _refuse(self, status: HTTPStatus) -> None:
        self._send(status, "text/plain; charset=utf-8", f"{status.value} {status.phrase}\n", with_body=True)

    def _send(self, status: HTTPStatus, kind: str, document: str, *, with_body: bool) -> None:
        data = document.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Connection", "close")
        self.end_headers()
        if with_body:
            self.wfile.write(data)
